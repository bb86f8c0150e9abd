"""A search's answer in words: what fits and why, what it costs, what each degree bought, what to change."""

from collections.abc import Iterator
from math import floor, log10

from meshwright.planner.search.changes import (
    LayoutChange,
    cheapest_fixes,
    longest_sequence,
    on_half,
    without_techniques,
)
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.budget import budget, critical
from meshwright.planner.step.error_ranges import LIKELY, ranges, relative_range
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.layout import Layout
from meshwright.spec.legal import divisors
from meshwright.spec.plan import SAMPLES, Plan
from meshwright.spec.shape import ModelShape
from meshwright.spec.units import GIB, count, duration, many, short_gib, step_time

SHOWN = 3
"""Kinds of memory named in a few words; the rest is one figure."""
COLLAPSED = 0.25
"""MFU below which a warning is due, where fewer devices would use each better by as much as WORTH."""
WORTH = 1.25
NAMES = {
    "moments": "optimizer moments", "masters": "fp32 master weights", "shards": "own shards",
    "buffers": "gathered layers and exchange buffers",
}  # fmt: skip
PASSING = ("activations", "logits", "temporaries", "buffers")
"""Kinds that a shorter sequence makes smaller."""
NOT_STATES = (*PASSING, "tokens", "staging", "reserve")
"""Kinds that are not kept from step to step."""


def layout_words(layout: Layout, model: ModelShape | None = None) -> str:
    """`dp_shard=8 zero=3 tp=4 sp pp=2 1f1b micro_batch=1 recompute=none`: given back to --layout of the same model and
    cluster, it is this layout and no other. `model`: one with experts, of which ep=1 is a choice."""
    words = [f"{axis}={getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard") if getattr(layout, axis) > 1]
    if layout.zero or layout.dp_shard * layout.cp > 1:
        words.append(f"zero={layout.zero}")
    if layout.tp > 1:
        words.append(f"tp={layout.tp} {'sp' if layout.sp else 'sp=false'}")
    words += [f"{axis}={getattr(layout, axis)}" for axis in ("cp", "pp") if getattr(layout, axis) > 1]
    if layout.pp > 1:
        words.append(layout.schedule + (f" vp={layout.vp}" if layout.vp > 1 else ""))
    if layout.ep > 1 or (model is not None and model.moe is not None):
        words.append(f"ep={layout.ep}")
    words += [f"micro_batch={layout.micro_batch}", f"recompute={layout.recompute}"]
    return " ".join((*words, *([f"recompute_layers={n}"] if (n := layout.recompute_layers) else []),
                     *([f"offload={layout.offload}"] if layout.offload != "off" else []),
                     *(["cuda_graphs=on"] if layout.cuda_graphs == "on" else [])))  # fmt: skip


def words_of(plan: Plan) -> str:
    """The same of a plan."""
    return layout_words(plan.layout, plan.model)


def kind_name(kind: str) -> str:
    """What people call a kind of memory."""
    return NAMES.get(kind, kind)


def largest_kind(found: Prediction) -> tuple[str, float]:
    """Name and bytes of the kind that holds most at the peak."""
    kind, size = max(found.worst.kinds.items(), key=lambda item: item[1])
    return kind_name(kind), size


def groups(found: Prediction) -> list[tuple[str, float]]:
    """The peak in a few words: (name, bytes), the largest first; what is kept from step to step is one of them."""
    kinds = found.worst.kinds
    states = sum(size for kind, size in kinds.items() if kind not in NOT_STATES)
    passing = [(kind, size) for kind, size in kinds.items() if kind in NOT_STATES]
    rows = sorted([("states", states), *passing], key=lambda row: -row[1])
    return [*rows[:SHOWN], ("other", sum(size for _, size in rows[SHOWN:]))]


def searched(found: Ranking) -> str:
    """How many layouts were searched, and what became of those that are not shown."""
    do = "does" if found.too_large == 1 else "do"
    return f"{found.legal:,} layouts searched; {found.too_large:,} {do} not fit."


def rejected(found: Ranking) -> Iterator[str]:
    """Each reason with the nearest layout that it rejects, and how many were not counted at all."""
    plan = found.best[0].plan
    for one in found.rejected[:3]:
        yield (
            f"{one.count:,} {'has' if one.count == 1 else 'have'} too much memory in {kind_name(one.reason)}. One of "
            f"the nearest needs {short_gib(one.peak_bytes)}, {short_gib(one.peak_bytes - usable_bytes(plan))} over "
            f"the usable memory: {layout_words(one.layout, plan.model)}"
        )
    if found.slower:
        yield f"{found.slower:,} {'is' if found.slower == 1 else 'are'} provably no faster than those listed."


def own_batch(plan: Plan) -> Iterator[str]:
    """Of a batch that nobody chose, why it is no power of two."""
    batch, devices = plan.recipe.global_batch, plan.cluster.devices
    if batch & (batch - 1):
        yield (
            f"A step takes {batch:,} sequences: {devices:,} devices cannot share a power of 2 evenly. Set another "
            "number with --recipe global_batch=N."
        )


def caution(of: Estimator, found: Ranking, fixed: Fixed) -> Iterator[str]:
    """What makes the recommended layout a risk: little memory left, or tensor parallelism between nodes."""
    best, plan = found.best[0], found.best[0].plan
    if is_bold(best):
        room = usable_bytes(plan)
        none = f" No layout that was found fits with {LIKELY:.0%}." if found.legal > 1 else ""
        yield f"Only {short_gib(room - best.peak_bytes)} of {short_gib(room)} are free.{none}"
    node = plan.cluster.devices_per_node
    if plan.layout.tp <= node or "tp" in fixed:
        return
    inside = search(of, plan, fixed={**fixed, "tp": divisors(node)}, listed=1, share=of.largest_share).best
    other = f"With tp={node} or less none fits with {LIKELY:.0%}."
    if inside:
        slower = inside[0].step_s / best.step_s - 1
        other = f"The fastest layout with tp={node} or less takes {slower:.1%} longer: {words_of(inside[0].plan)}"
    yield f"Note: tp={plan.layout.tp} spans nodes of {many(node, 'device')}. {other}"


def reasons(of: Estimator, best: Prediction) -> Iterator[str]:
    """Why each technique is there: the same layout with less of it."""
    for change in without_techniques(of, best.plan):
        yield f"with {change.what} {_compared(best, change)}."


def _compared(best: Prediction, change: LayoutChange) -> str:
    other, less = change.prediction, change.prediction.peak_bytes - best.peak_bytes
    time = other.step_s / best.step_s - 1
    speed_words = f"{abs(time):.0%} {'slower' if time > 0 else 'faster'}" if abs(time) >= 0.005 else "as fast"
    speed_words = speed_words if time < 1 else f"{1 + time:.1f} times as slow"
    if not change.fits:
        return f"it needs {short_gib(other.peak_bytes)} per device, and would be {speed_words}"
    return f"it takes {short_gib(abs(less))} {'more' if less > 0 else 'less'} memory and is {speed_words}"


def limit(of: Estimator, best: Prediction) -> str:
    """The longest sequence that fits with this layout; empty where no longer one is legal."""
    sequence, beyond = longest_sequence(of, best.plan)
    if not beyond:
        return ""
    over = beyond.prediction.peak_bytes - usable_bytes(best.plan)
    reach = f"{int(beyond.what.partition('=')[2]):,} is {short_gib(over)} over, most of it"
    fits = f"sequence {sequence:,} fits; " if sequence > best.plan.recipe.sequence else "sequence "
    return f"{fits}{reach} {largest_kind(beyond.prediction)[0]}."


def half_machine(of: Estimator, best: Prediction) -> Iterator[str]:
    """The best layout of half the devices; nothing where there is no half."""
    plan, half = best.plan, on_half(of, best.plan)
    if half is None:
        return
    devices = f"Half the devices ({plan.cluster.devices // 2})"
    if not half.best:
        yield f"{devices}: nothing fits."
        return
    other = half.best[0]
    yield (
        f"{devices}: {step_time(other.step_s)} per step ({other.step_s / best.step_s:.2f} times as long), MFU "
        f"{other.mfu(causal=False):.1%}, with {words_of(other.plan)}"
    )


def scale_warnings(of: Estimator, best: Prediction, tokens: float) -> Iterator[str]:
    """Sequences beyond the model's positions; more devices than the model and its batch can use."""
    plan = best.plan
    if plan.beyond_positions:
        yield f"Warning: {plan.beyond_positions}."
    half = on_half(of, plan) if best.mfu(causal=False) < COLLAPSED else None
    if half and half.best and (ratio := half.best[0].step_s / best.step_s) < 2 / WORTH:
        yield (
            f"Warning: {plan.cluster.devices} devices are too many for this model and batch. MFU is "
            f"{best.mfu(causal=False):.1%}, and half of them do {2 / ratio:.2f} times the work per device."
        )
    critical_batch = critical(plan.model, tokens)
    if best.tokens_per_step > 2 * critical_batch.batch_tokens:
        yield (
            f"Warning: {count(best.tokens_per_step)} tokens per step are far above the critical batch of about "
            f"{count(critical_batch.batch_tokens)} (Kaplan et al. 2020, at a loss of {critical_batch.loss_nats:.2f}). "
            "More devices will buy little."
        )


def bill(best: Prediction, tokens: float, price: float) -> str:
    """Time and money of a token budget, each with its range."""
    total = budget(tokens, best.tokens_per_step, best.step_s, best.plan.layout.world, price)
    within = relative_range(best.plan, best.stack)

    def known(value: float, unit: str = "") -> str:
        low, high = between(within.scale(value)).split(" to ")
        return f"{unit}{_amount(value)} ({unit}{low} to {unit}{high})"

    money = f", {known(total.price, '$')} at ${price:g} per device-hour" if price else ""
    long = f"{known(total.days)} days" if total.days >= 1 else duration(total.days * 86400)
    return (
        f"{count(tokens)} tokens: {total.steps:,} {'step' if total.steps == 1 else 'steps'}, {long}, "
        f"{known(total.device_hours)} device-hours{money} (without failures, evaluation, checkpoints)."
    )


def _amount(value: float) -> str:
    """To three digits: no more is known."""
    return f"{value:,.{max(0, 2 - floor(log10(value)))}f}" if 1e-3 < value < 100 else f"{_three(value):,.0f}"


def _three(value: float) -> float:
    return round(value, 2 - floor(log10(value))) if value > 0 else 0.0


def between(pair: tuple[float, float], unit: float = 1.0) -> str:
    """`5.95 to 7.94`, three digits each, in some unit."""
    low, high = (one / unit for one in pair)
    return f"{_amount(low)} to {_amount(high)}"


def probability(share: float, least: float = 0.02) -> str:
    """`a probability of 84%`; the outermost errors that were seen allow no more than `below 2%` and `above 98%`."""
    known = f"below {least:.0%}" if share < least else f"above {1 - least:.0%}" if share > 1 - least else ""
    return f"a probability {known or f'of {share:.0%}'}"


def range_words(found: Prediction) -> str:
    """What nine of ten published runs lie within, in one sentence."""
    said = ranges(found)
    whose = "other software, the widest of it, since this has none" if said.pooled else "this software"
    return (
        f"Ranges hold nine of ten published runs of {whose}: {between(said.step_seconds)} s per step, MFU "
        f"{between(said.mfu_full, 0.01)}%, {between(said.peak_bytes, GIB)} GiB; fits with "
        f"{probability(said.fit_probability)}."
    )


def failure(found: Ranking, nodes: int = 0, *, free: bool = True, adapted_bytes: float | None = None) -> str:
    """Where nothing fits: the nearest layout, the term that overflows, and what would help. `nodes`: so many are
    enough. `free`: no degree that was fixed is to blame."""
    nearest = found.nearest
    assert nearest is not None
    worst, room = nearest.worst, usable_bytes(nearest.plan)
    kind, size = largest_kind(nearest)
    cures = [f"{nodes} nodes are enough: take more nodes"] if nodes else ["take more nodes"]
    if not free:
        cures = ["fix fewer degrees"]
    elif not nodes and worst.total_bytes - sum(worst.kinds.get(kind, 0.0) for kind in PASSING) <= room:
        cures.append("a shorter sequence")
    if adapted_bytes is not None:
        cures.append(f"train adapters alone (tune=lora fits at {short_gib(adapted_bytes)})")
    elif nearest.plan.data.form == SAMPLES and nearest.plan.model.lora is None:
        cures.append("train adapters alone (tune=lora)")
    elif nearest.plan.model.lora is not None and not holds_codes(nearest.plan.model):
        cures.append("hold frozen matrices in 4 bits (tune=qlora)")
    return (
        f"none of {found.legal:,} legal layouts fits: the nearest needs {short_gib(worst.total_bytes)} per device "
        f"({kind} {short_gib(size)}); {short_gib(room)} is usable: {words_of(nearest.plan)}; "
        + ", ".join(cures)
        + " or another device"
    )


def unfit(of: Estimator, found: Prediction) -> str:
    """Where one given layout does not fit: the largest term and the cheapest changes, each with its price in time."""
    ways = [
        f"{change.what} ({change.prediction.step_s / found.step_s - 1:+.0%} time, "
        f"{short_gib(change.prediction.peak_bytes)})"
        for change in cheapest_fixes(of, found.plan)
    ]
    worst, (kind, size) = found.worst, largest_kind(found)
    where = f"pipeline rank {worst.pp_rank}, {worst.when}" if found.plan.layout.pp > 1 else worst.when
    cure = f"; cheapest fixes: {'; or '.join(ways)}" if ways else "; no single change of the layout makes it fit"
    return (
        f"does not fit: needs {short_gib(worst.total_bytes)} per device; {short_gib(usable_bytes(found.plan))} is "
        f"usable (peak: {where}; largest: {kind} {short_gib(size)}){cure}"
    )
