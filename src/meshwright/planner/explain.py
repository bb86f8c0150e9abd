"""A search's answer in words: what fits and why, what it costs, what each degree bought, what to change."""

from collections.abc import Iterator

from meshwright.planner.search.changes import Change, fixes, longest_sequence, on_half, without
from meshwright.planner.search.ranking import Found, techniques, usable_bytes
from meshwright.planner.search.recommend import FREE, is_tight
from meshwright.planner.step.budget import budget, critical
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.units import GIB, count, duration, gib

TIE = 0.02
"""Step times nearer than this are no choice of the planner's."""
COLLAPSED = 0.25
"""MFU below which a warning is due, where fewer devices would use each better by as much as WORTH."""
WORTH = 1.25
NAMES = {
    "moments": "optimizer moments", "masters": "fp32 master weights", "shards": "own shards",
    "buffers": "gathered layers and exchange buffers",
}  # fmt: skip


def layout_words(layout: Layout) -> str:
    """`dp=8 (zero=3) tp=4 sp pp=2 1f1b micro_batch=1 recompute=full`: what is not the default."""
    words = [
        f"dp={layout.dp_replicate}x{layout.dp_shard}"
        if layout.dp_replicate > 1 < layout.dp_shard
        else f"dp={layout.dp}"
    ]
    if layout.zero:
        words[0] += f" zero={layout.zero}"
    for axis in ("tp", "cp", "pp", "ep"):
        if getattr(layout, axis) > 1:
            words.append(f"{axis}={getattr(layout, axis)}" + (" sp" if axis == "tp" and layout.sp else ""))
    if layout.pp > 1:
        words.append(layout.schedule + (f" vp={layout.vp}" if layout.vp > 1 else ""))
    words.append(f"micro_batch={layout.micro_batch}")
    if layout.recompute != "none":
        words.append(f"recompute={layout.recompute}")
    return " ".join(words)


def fits(found: Prediction) -> str:
    """`Fits: 61.3 of 80 GiB (worst: pipeline rank 0; largest: activations 30.1 GiB).`"""
    worst, room = found.worst, found.plan.cluster.device.memory_bytes
    kind, size = max(worst.kinds.items(), key=lambda item: item[1])
    whole = f" of {room / GIB:.0f}" if room else ""
    where = f"worst: pipeline rank {worst.pp_rank}, " if found.plan.layout.pp > 1 else ""
    verb = "Fits" if worst.total_bytes <= usable_bytes(found.plan) else "Does not fit"
    return (
        f"{verb}: {worst.total_bytes / GIB:.1f}{whole} GiB ({where}{worst.when}; largest: {NAMES.get(kind, kind)} "
        f"{gib(size)})."
    )


def speed(found: Prediction) -> str:
    """Step time, tokens/s, MFU of both conventions."""
    return (
        f"{duration(found.step_s)} a step, {count(found.tokens_per_s_per_device)} tokens/s a device, "
        f"MFU {found.mfu(causal=False):.1%} (attention in full; {found.mfu(causal=True):.1%} causal by half)"
    )


def summary(found: Found) -> Iterator[str]:
    """The first lines of an answer."""
    best = found.best[0]
    if found.legal == 1:
        yield f"{fits(best)} {layout_words(best.plan.layout)}: {speed(best)}."
        return
    roomy = f" that leaves {FREE:.0%} of memory free" if any(map(is_tight, found.best)) and not is_tight(best) else ""
    fastest = f"Fastest of {found.legal:,} legal layouts{roomy}"
    yield f"{fits(best)} {fastest}: {layout_words(best.plan.layout)}: {speed(best)}."
    yield from _tight(found)
    yield from _others(found)
    yield f"Of the others {found.too_large:,} do not fit and {found.slower:,} cannot be faster than those listed."
    for one in found.rejected[:3]:
        room = usable_bytes(best.plan)
        yield (
            f"  {one.count:,} have too large {NAMES.get(one.reason, one.reason)}; one of the nearest "
            f"needs {gib(one.peak_bytes)}, {gib(one.peak_bytes - room)} more than a program can have: "
            f"{layout_words(one.layout)}"
        )


def _tight(found: Found) -> Iterator[str]:
    """Where little memory is left: what is faster than the recommended one, or that nothing leaves more."""
    best, room = found.best[0], usable_bytes(found.best[0].plan)
    if is_tight(best):
        yield (
            f"Tight: {gib(room - best.peak_bytes)} of {gib(room)} are left, the planner errs by several percent, and "
            f"no layout that was found leaves {FREE:.0%}."
        )
        return
    fastest = min(found.best, key=lambda one: one.step_s)
    if is_tight(fastest) and fastest.step_s < best.step_s:
        yield (
            f"Faster by {best.step_s / fastest.step_s - 1:.1%}, but tight ({gib(room - fastest.peak_bytes)} of "
            f"{gib(room)} left, and the planner errs by several percent): {layout_words(fastest.plan.layout)}."
        )


def _others(found: Found) -> Iterator[str]:
    best, rest = found.best[0], [one for one in found.best[1:] if is_tight(found.best[0]) or not is_tight(one)]
    ties = sum(other.step_s <= best.step_s * (1 + TIE) for other in rest)
    if ties:
        some = "At least " if ties == len(found.best) - 1 else ""
        number = f"{some}{ties} more {'is' if ties == 1 else 'are'}"
        yield f"{number} within {TIE:.0%} of it: choose among them by memory and habit."
    simpler = next((o for o in rest if techniques(o.plan.layout) < techniques(best.plan.layout)), None)
    if simpler:
        slower = simpler.step_s / best.step_s - 1
        yield f"Simpler, {slower:.1%} slower: {layout_words(simpler.plan.layout)}."


def reasons(of: Estimator, best: Prediction) -> Iterator[str]:
    """Why each technique is there: the same layout without it."""
    for change in without(of, best.plan):
        yield f"{_technique(best.plan.layout, change.what)}: {_compared(best, change)}"


def _technique(layout: Layout, without_it: str) -> str:
    axis = without_it.partition("=")[0]
    return f"{axis}={getattr(layout, axis)}"


def _compared(best: Prediction, change: Change) -> str:
    other, less = change.prediction, change.prediction.peak_bytes - best.peak_bytes
    time = other.step_s / best.step_s - 1
    speed_words = f"{abs(time):.0%} {'slower' if time > 0 else 'faster'}" if abs(time) >= 0.005 else "as fast"
    memory = f"{gib(abs(less))} {'more' if less > 0 else 'less'}"
    if not change.fits:
        return f"without it {gib(other.peak_bytes)} are needed, and it would be {speed_words}"
    return f"without it {memory} memory and {speed_words}"


def outlook(of: Estimator, best: Prediction, tokens: float, price: float) -> Iterator[str]:
    """Sensitivities: a longer sequence, half the machine, the critical batch, the bill."""
    plan = best.plan
    sequence, beyond = longest_sequence(of, plan)
    if beyond:
        over = beyond.prediction.peak_bytes - usable_bytes(plan)
        kind = max(beyond.prediction.worst.kinds, key=beyond.prediction.worst.kinds.__getitem__)
        reach = f"{beyond.what.partition('.')[2]} overflows by {gib(over)} ({NAMES.get(kind, kind)})"
        yield f"Longer: sequence={sequence} fits with this layout; {reach}."
    half = on_half(of, plan)
    if half and half.best:
        ratio = half.best[0].step_s / best.step_s
        yield (
            f"Half the devices ({plan.cluster.devices // 2}): {ratio:.2f}x as long a step, MFU "
            f"{half.best[0].mfu(causal=False):.1%}, with {layout_words(half.best[0].plan.layout)}."
        )
        if best.mfu(causal=False) < COLLAPSED and ratio < 2 / WORTH:
            yield (
                f"Warning: {plan.cluster.devices} devices are too many for this model and batch: MFU is "
                f"{best.mfu(causal=False):.1%}, half of them would do {2 / ratio:.2f}x the work per device."
            )
    elif half:
        yield f"Half the devices ({plan.cluster.devices // 2}): nothing fits."
    yield from _batch_words(plan, best, tokens)
    if tokens:
        bill = budget(tokens, best.tokens_per_step, best.step_s, plan.layout.world, price)
        money = f", {_amount(bill.price)} at {price:g} a device hour" if price else ""
        long = f"{bill.days:.1f} days" if bill.days >= 1 else duration(bill.days * 86400)
        yield (
            f"{count(tokens)} tokens: {bill.steps:,} steps, {long}, {_amount(bill.device_hours)} device hours"
            f"{money} (without failures, evaluation, checkpoints)."
        )


def _amount(value: float) -> str:
    """Whole where it is large, else to three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _batch_words(plan: Plan, best: Prediction, tokens: float) -> Iterator[str]:
    limit = critical(plan.model, tokens)
    if best.tokens_per_step > 2 * limit.batch_tokens:
        yield (
            f"Warning: {count(best.tokens_per_step)} tokens a step are far above the critical batch of about "
            f"{count(limit.batch_tokens)} (Kaplan et al. 2020, at a loss of {limit.loss_nats:.2f}): more devices will "
            "buy little."
        )


PASSING = ("activations", "logits", "temporaries", "buffers")
"""Kinds that a shorter sequence makes smaller."""


def failure(found: Found, nodes: int = 0, *, free: bool = True) -> str:
    """Where nothing fits: the nearest layout, the term that overflows, and what would help. `nodes`: so many are
    enough. `free`: no degree was fixed."""
    nearest = found.nearest
    assert nearest is not None
    worst, room = nearest.worst, usable_bytes(nearest.plan)
    kind, size = max(worst.kinds.items(), key=lambda item: item[1])
    cures = [f"{nodes} nodes are enough: take more nodes"] if nodes else ["take more nodes"]
    if not free:
        cures = ["fix fewer degrees"]
    elif not nodes and worst.total_bytes - sum(worst.kinds.get(kind, 0.0) for kind in PASSING) <= room:
        cures.append("a shorter sequence")
    return (
        f"none of {found.legal:,} legal layouts fits: the nearest needs {gib(worst.total_bytes)} of {gib(room)} a "
        f"device, {NAMES.get(kind, kind)} {gib(size)} of them: {layout_words(nearest.plan.layout)}; "
        + ", ".join(cures)
        + " or another device"
    )


def unfit(of: Estimator, found: Prediction) -> str:
    """Where one given layout does not fit: the largest term and the cheapest changes, each with its price in time."""
    ways = [
        f"{change.what} ({change.prediction.step_s / found.step_s - 1:+.0%} time, {gib(change.prediction.peak_bytes)})"
        for change in fixes(of, found.plan)
    ]
    cure = f"; cheapest fixes: {'; or '.join(ways)}" if ways else "; no single change of the layout makes it fit"
    return fits(found).rstrip(".").replace("Does not fit", "does not fit") + cure
