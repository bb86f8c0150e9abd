"""Answers of the planner: in words, and as the shared JSON document of `plan` (docs/planner.md).

In words: what fits and why, what it costs, what each degree gains, what to change. Caveats name unmeasured assumptions
behind a prediction: parts of a model that exist in plans only, rates of a device, lengths of documents. They also say
if it is above everything published.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from math import floor, log10
from typing import Any

from meshwright.planner.cost.speeds import takes_flash_4
from meshwright.planner.kernels.fitted_kernel import REACHED
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.recommend import (
    LayoutChange,
    cheapest_fixes,
    is_bold,
    longest_sequence,
    on_half,
    without_techniques,
)
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator, predict
from meshwright.planner.step.prediction import (
    LIKELY,
    Prediction,
    budget,
    critical,
    fit_probability,
    ranges,
    relative_range,
    usable_bytes,
)
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.errors import argument
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import SAMPLES, Plan, as_document
from meshwright.spec.rules.legal import divisors
from meshwright.spec.rules.passes import holds_codes
from meshwright.spec.units import GIB, count, duration, gib, many, short_gib, step_time

SHOWN = 3
"""Kinds of memory named in a summary. The rest is one figure."""
COLLAPSED = 0.25
"""MFU below which a warning is due, if fewer devices would each do WORTH times as much."""
WORTH = 1.25
NAMES = {
    "moments": "optimizer moments", "masters": "fp32 master weights", "shards": "own shards",
    "buffers": "gathered layers and exchange buffers",
}  # fmt: skip
PASSING = ("activations", "logits", "temporaries", "buffers")
"""Kinds that a shorter sequence shrinks."""
NOT_STATES = (*PASSING, "tokens", "staging", "reserve")
"""Kinds that are not kept from step to step."""
BEST_MFU: dict[str, tuple[float, str]] = {
    "A100": (0.706, "Hagemann et al. 2023, arXiv:2311.05610: LLaMA 13B, 2,048 tokens, 64 of 80 GB"),
    "H100": (0.60, "IST-DASLab/llmq, README at b77d969: Qwen2.5 7B, 1,024 tokens, one"),
    "H200": (0.601, "this engine, 2026-11-27: Llama 3.1 8B, 4,096 tokens, one; KempnerForge at 5666d0d: 57.8%"),
}
"""Prefix of a device's name -> (best published share of its data sheet's peak in 16-bit training, source).

FLOP of all keys, without recomputation.
"""
LEAST_SAVED = 2**20
"""Least bytes of a peak that a policy must save to be named."""
MEASURED = "H200-SXM"
"""Device on which steps of Meshwright's engine were measured (cost/speeds.py)."""


def layout_words(layout: Layout, model: ModelShape | None = None) -> str:
    """Return `dp_shard=8 zero=3 tp=4 sp pp=2 1f1b micro_batch=1 recompute=none`.

    Passed to --layout with the same model and cluster, it gives exactly this layout. `model`: with experts, ep=1 is
    spelled out.
    """
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
                     *(["overlap=off"] if layout.overlap == "off" else []),
                     *(["cuda_graphs=on"] if layout.cuda_graphs == "on" else [])))  # fmt: skip


def words_of(plan: Plan) -> str:
    """Return the layout words of a plan."""
    return layout_words(plan.layout, plan.model)


def kind_name(kind: str) -> str:
    """Return the common name of a kind of memory."""
    return NAMES.get(kind, kind)


def largest_kind(prediction: Prediction) -> tuple[str, float]:
    """Return name and bytes of the largest kind at the peak."""
    kind, size = max(prediction.worst.kinds.items(), key=lambda pair: pair[1])
    return kind_name(kind), size


def groups(prediction: Prediction) -> list[tuple[str, float]]:
    """Return a summary of the peak: (name, bytes), the largest first.

    States that are kept from step to step are one entry.
    """
    kinds = prediction.worst.kinds
    states = sum(size for kind, size in kinds.items() if kind not in NOT_STATES)
    passing = [(kind, size) for kind, size in kinds.items() if kind in NOT_STATES]
    rows = sorted([("states", states), *passing], key=lambda row: -row[1])
    return [*rows[:SHOWN], ("other", sum(size for _, size in rows[SHOWN:]))]


def searched(ranking: Ranking) -> str:
    """Say how many layouts were searched and how many do not fit."""
    do = "does" if ranking.too_large == 1 else "do"
    return f"{ranking.legal:,} layouts searched; {ranking.too_large:,} {do} not fit."


def rejected(ranking: Ranking) -> Iterator[str]:
    """Yield each reason with its nearest rejected layout, and how many layouts were not counted."""
    plan = ranking.best[0].plan
    for rejection in ranking.rejected[:3]:
        have, peak_bytes = "has" if rejection.count == 1 else "have", rejection.peak_bytes
        yield (
            f"{rejection.count:,} {have} too much memory in {kind_name(rejection.reason)}. One of "
            f"the nearest needs {short_gib(peak_bytes)}, {short_gib(peak_bytes - usable_bytes(plan))} over "
            f"the usable memory: {layout_words(rejection.layout, plan.model)}"
        )
    if ranking.slower:
        yield f"{ranking.slower:,} {'is' if ranking.slower == 1 else 'are'} provably no faster than those listed."


def batch_note(plan: Plan) -> Iterator[str]:
    """Yield why a batch that nobody chose is no power of two."""
    batch, devices = plan.recipe.global_batch, plan.cluster.devices
    if batch & (batch - 1):
        yield (
            f"A step takes {batch:,} sequences: {devices:,} devices cannot share a power of 2 evenly. Set another "
            "number with --recipe global_batch=N."
        )


def caution(estimator: Estimator, ranking: Ranking, fixed: Fixed) -> Iterator[str]:
    """Yield the risks of the recommended layout: little free memory, or tensor parallelism between nodes."""
    best, plan = ranking.best[0], ranking.best[0].plan
    if is_bold(best):
        room = usable_bytes(plan)
        none = f" No layout that was found fits with {LIKELY:.0%}." if ranking.legal > 1 else ""
        yield f"Only {short_gib(room - best.peak_bytes)} of {short_gib(room)} are free.{none}"
    node = plan.cluster.devices_per_node
    if plan.layout.tp <= node or "tp" in fixed:
        return
    inside = search(
        estimator, plan, fixed={**fixed, "tp": divisors(node)}, listed=1, share=estimator.largest_share
    ).best
    other = f"With tp={node} or less none fits with {LIKELY:.0%}."
    if inside:
        slower = inside[0].step_s / best.step_s - 1
        other = f"The fastest layout with tp={node} or less takes {slower:.1%} longer: {words_of(inside[0].plan)}"
    yield f"Note: tp={plan.layout.tp} spans nodes of {many(node, 'device')}. {other}"


def reasons(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """Yield why each technique is there: the same layout without it."""
    for change in without_techniques(estimator, best.plan):
        yield f"with {change.what} {_compare(best, change)}."


def _compare(best: Prediction, change: LayoutChange) -> str:
    other, less = change.prediction, change.prediction.peak_bytes - best.peak_bytes
    time = other.step_s / best.step_s - 1
    speed_words = f"{abs(time):.0%} {'slower' if time > 0 else 'faster'}" if abs(time) >= 0.005 else "as fast"
    speed_words = speed_words if time < 1 else f"{1 + time:.1f} times as slow"
    if not change.fits:
        return f"it needs {short_gib(other.peak_bytes)} per device, and would be {speed_words}"
    return f"it takes {short_gib(abs(less))} {'more' if less > 0 else 'less'} memory and is {speed_words}"


def limit(estimator: Estimator, best: Prediction) -> str:
    """Return the longest sequence that fits with this layout. Empty if no longer one is legal."""
    sequence, beyond = longest_sequence(estimator, best.plan)
    if not beyond:
        return ""
    over = beyond.prediction.peak_bytes - usable_bytes(best.plan)
    reach = f"{int(beyond.what.partition('=')[2]):,} is {short_gib(over)} over, most of it"
    fits = f"sequence {sequence:,} fits; " if sequence > best.plan.recipe.sequence else "sequence "
    return f"{fits}{reach} {largest_kind(beyond.prediction)[0]}."


def half_machine(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """Yield the best layout on half the devices. Nothing if they cannot be halved."""
    plan, half = best.plan, on_half(estimator, best.plan)
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


def scale_warnings(estimator: Estimator, best: Prediction, tokens: float) -> Iterator[str]:
    """Yield warnings of sequences beyond the model's positions, and of too many devices for model and batch."""
    plan = best.plan
    if plan.beyond_positions:
        yield f"Warning: {plan.beyond_positions}."
    # A second search is worth its time only where MFU is suspicious.
    half = on_half(estimator, plan) if best.mfu(causal=False) < COLLAPSED else None
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
    """Return time and money of a token budget, each with its range."""
    total = budget(tokens, best.tokens_per_step, best.step_s, best.plan.layout.world, price)
    within = relative_range(best.plan, best.stack)

    def with_range(figure: float, unit: str = "") -> str:
        low, high = between(within.scale(figure)).split(" to ")
        return f"{unit}{_amount(figure)} ({unit}{low} to {unit}{high})"

    money = f", {with_range(total.price, '$')} at ${price:g} per device-hour" if price else ""
    long = f"{with_range(total.days)} days" if total.days >= 1 else duration(total.days * 86400)
    return (
        f"{count(tokens)} tokens: {total.steps:,} {'step' if total.steps == 1 else 'steps'}, {long}, "
        f"{with_range(total.device_hours)} device-hours{money} (without failures, evaluation, checkpoints)."
    )


def _amount(figure: float) -> str:
    """Format a number with three digits, as many as are certain."""
    if 1e-3 < figure < 100:
        return f"{figure:,.{max(0, 2 - floor(log10(figure)))}f}"
    return f"{round(figure, 2 - floor(log10(figure))) if figure > 0 else 0.0:,.0f}"


def between(pair: tuple[float, float], unit: float = 1.0) -> str:
    """Return `5.95 to 7.94`, three digits each, in multiples of `unit`."""
    low, high = (bound / unit for bound in pair)
    return f"{_amount(low)} to {_amount(high)}"


def probability(share: float, least: float = 0.02) -> str:
    """Return `a probability of 84%`. The outermost observed errors allow only `below 2%` and `above 98%`."""
    known = f"below {least:.0%}" if share < least else f"above {1 - least:.0%}" if share > 1 - least else ""
    return f"a probability {known or f'of {share:.0%}'}"


def range_words(prediction: Prediction) -> str:
    """Return one sentence with the ranges that hold nine of ten published runs."""
    known = ranges(prediction)
    whose = "other software, the widest of it, since this has none" if known.pooled else "this software"
    return (
        f"Ranges hold nine of ten published runs of {whose}: {between(known.step_seconds)} s per step, MFU "
        f"{between(known.mfu_full, 0.01)}%, {between(known.peak_bytes, GIB)} GiB; fits with "
        f"{probability(known.fit_probability)}."
    )


def failure(ranking: Ranking, nodes: int = 0, *, free: bool = True, adapted_bytes: float | None = None) -> str:
    """Return why nothing fits: the nearest layout, its largest kind of memory, and remedies.

    `nodes`: this many are enough. `free`: no fixed degree is to blame.
    """
    nearest = ranking.nearest
    assert nearest is not None
    worst, room = nearest.worst, usable_bytes(nearest.plan)
    kind, size = largest_kind(nearest)
    cures = [f"{nodes} nodes are enough: take more nodes"] if nodes else ["take more nodes"]
    if not free:
        cures = ["fix fewer degrees"]
    elif not nodes and worst.total_bytes - sum(worst.kinds.get(kind, 0.0) for kind in PASSING) <= room:
        cures.append("a shorter sequence")
    if adapted_bytes is not None:
        cures.append(f"train adapters alone ({argument('tune', 'lora')} fits at {short_gib(adapted_bytes)})")
    elif nearest.plan.data.form == SAMPLES and nearest.plan.model.lora is None:
        cures.append(f"train adapters alone ({argument('tune', 'lora')})")
    elif nearest.plan.model.lora is not None and not holds_codes(nearest.plan.model):
        cures.append(f"hold frozen matrices in 4 bits ({argument('tune', 'qlora')})")
    return (
        f"none of {ranking.legal:,} legal layouts fits: the nearest needs {short_gib(worst.total_bytes)} per device "
        f"({kind} {short_gib(size)}); {short_gib(room)} is usable: {words_of(nearest.plan)}; "
        + ", ".join(cures)
        + " or another device"
    )


def unfit(estimator: Estimator, prediction: Prediction) -> str:
    """Return why a requested layout does not fit.

    The largest kind of memory and the cheapest changes, each with its price in time.
    """
    ways = [
        f"{change.what} ({change.prediction.step_s / prediction.step_s - 1:+.0%} time, "
        f"{short_gib(change.prediction.peak_bytes)})"
        for change in cheapest_fixes(estimator, prediction.plan)
    ]
    worst, (kind, size) = prediction.worst, largest_kind(prediction)
    where = f"pipeline rank {worst.pp_rank}, {worst.when}" if prediction.plan.layout.pp > 1 else worst.when
    cure = f"; cheapest fixes: {'; or '.join(ways)}" if ways else "; no single change of the layout makes it fit"
    return (
        f"does not fit: needs {short_gib(worst.total_bytes)} per device; {short_gib(usable_bytes(prediction.plan))} is "
        f"usable (peak: {where}; largest: {kind} {short_gib(size)}){cure}"
    )


def caveats(prediction: Prediction) -> tuple[str, ...]:
    """Return the caveats as sentences, the gravest first."""
    return tuple((*_recompute_caveats(prediction), *_plan_caveats(prediction.plan), *_time_caveats(prediction)))


def _recompute_caveats(prediction: Prediction) -> Iterator[str]:
    """Yield the policies that save memory, if the chosen one saves none."""
    layout = prediction.plan.layout
    if not prediction.stack.drops_scores_alone or layout.recompute == layout.acting_recompute:
        return
    sentence = "layout.recompute=selective saves nothing here: this attention stores no S x S weights to make again."
    policies = [policy for policy in layout.policies if policy not in ("none", layout.recompute)]
    plans = [replace(prediction.plan, layout=replace(layout, recompute=policy)) for policy in policies]
    peaks = [(policy, predict(plan, prediction.stack).peak_bytes) for policy, plan in zip(policies, plans, strict=True)]
    less = [f"{policy} {gib(peak)}" for policy, peak in peaks if peak < prediction.peak_bytes - LEAST_SAVED]
    yield f"{sentence} Peaks: selective {gib(prediction.peak_bytes)}, {', '.join(less)}." if less else sentence


def rate_caveats(prediction: Prediction) -> Iterator[str]:
    """Yield caveats of a GPU plan that is faster than anything published, or whose device was not measured."""
    device, recipe = prediction.plan.cluster.device, prediction.plan.recipe
    full, narrow = prediction.mfu(causal=False), recipe.precision != "fp32" and recipe.products == "same"
    best, source = next((published for name, published in BEST_MFU.items() if device.name.startswith(name)), (1.0, ""))
    if narrow and full > best:
        yield f"{full:.0%} MFU (full) is above the best published for the {device.name}, {best:.0%} ({source})."
    if _is_preset(prediction) and not device.name.startswith(MEASURED):
        yield f"Steps of this engine were measured on one {MEASURED} alone: on the {device.name} this is a prediction."


def _is_preset(prediction: Prediction) -> bool:
    """Return True if times rest on a data sheet rather than on `calibrate`."""
    device = prediction.plan.cluster.device
    return prediction.stack.is_meshwright and device.is_gpu and not device.certainty.startswith("measured")


def _time_caveats(prediction: Prediction) -> Iterator[str]:
    """Yield the assumptions behind the time of a GPU plan."""
    yield from rate_caveats(prediction)
    if not _is_preset(prediction):
        return
    if takes_flash_4(prediction.plan):
        yield (
            "Documents and windows are planned with FlashAttention 4, which is installed here; "
            "its rates are published ones, and this engine has not measured it."
        )
    if prediction.plan.recipe.document_mask and not prediction.document_tokens:
        yield "Documents are taken to fill their rows, the slowest case: --document-tokens says how long yours are."


def _plan_caveats(plan: Plan) -> Iterator[str]:
    if plan.layout.kernels == "reference":
        yield "layout.kernels=reference is plain code, for comparison: it is slower and keeps more activations."
    if plan.plan_only:
        yield f"{plan.plan_only[:1].upper()}{plan.plan_only[1:]}."
        yield from _unbuilt_caveats(plan.model)
    device = plan.cluster.device
    if plan.recipe.dropout and device.is_gpu:
        yield (
            f"recipe.dropout={plan.recipe.dropout} takes attention out of fused kernels, much slower on a GPU. "
            "It runs tile by tile in fp32, so that every layout draws the same masks: recipe.dropout=0 avoids that."
        )
    if plan.recipe.products == "fp8-all" and plan.model.moe is not None and device.is_gpu:
        yield (
            "recipe.products=fp8-all rounds the operands of experts, too, which was slower than bf16 on an H200 (0.38 "
            "of its rate, before rounding was one kernel): recipe.products=fp8 leaves experts in bf16."
        )
    if device.is_gpu and not device.half_matmul_flop_per_s:
        kind = "bf16" if device.bf16_flop_per_s else "fp16"
        yield (
            f"{device.name} has no measured {kind} product: {REACHED:.0%} of its data sheet's "
            f"{device.half_flop_per_s / 1e12:,.4g} TFLOP/s stands for it (measured elsewhere: 51% to 87%)."
        )


def _unbuilt_caveats(shape: ModelShape) -> Iterator[str]:
    """Yield how the plan counts parts that have no formula of their own."""
    parts = shape.unbuilt
    if parts is None:
        return
    if parts.full_every and shape.routed_layers:
        yield "Routed layers with a window and without are counted as equal ones that see as many keys in the mean."
    if parts.linear:
        yield (
            "Layers with linear attention and without are counted as equal ones, with the mean of both. The products "
            "of the published algorithm and its bytes are counted, and no published run was there to hold them against."
        )
    if parts.chunk:
        yield f"Attention is counted over the whole sequence, not over chunks of {parts.chunk:,} tokens."
    if parts.activation in ("gelu", "clamped"):
        yield "The MLP's time is that of SwiGLU."


def document(prediction: Prediction) -> dict[str, Any]:
    """Return predicted memory, traffic and time of one plan."""
    worst, time, error_ranges = prediction.worst, prediction.time, ranges(prediction)
    return {
        "source": "predicted",
        "plan": as_document(prediction.plan),
        "peak_bytes": round(prediction.peak_bytes),
        "peak_rank": worst.pp_rank * (prediction.plan.layout.world // prediction.plan.layout.pp),
        "memory": [{"kind": kind, "bytes": round(size)} for kind, size in worst.kinds.items() if size],
        "host_bytes": round(prediction.host_bytes),
        "node_bytes": round(prediction.node_bytes),
        "traffic": [
            {"axis": sent.axis, "collective": sent.collective, "bytes": sent.sent_bytes, "calls": sent.calls}
            for sent in prediction.traffic(worst.pp_rank)
        ],
        "time": [
            {"what": part.name.removesuffix("_s"), "seconds": getattr(time, part.name)} for part in fields(StepTime)
        ],
        "step_seconds": prediction.step_s,
        "tokens_per_second_per_device": prediction.tokens_per_s_per_device,
        "mfu_causal": prediction.mfu(causal=True),
        "mfu_full": prediction.mfu(causal=False),
        "hfu": prediction.hfu,
        "bubble_fraction": prediction.bubble_fraction,
        "fit_probability": error_ranges.fit_probability,
        "range": error_ranges.document(),
        **({} if prediction.executions is None else {"execution": prediction.executions.document()}),
        "caveats": list(caveats(prediction)),
    }


def ranked(ranking: Ranking) -> dict[str, Any]:
    """Return what a search adds to the document of its recommendation: all listed layouts, the fastest first."""
    return {
        "layouts": [
            {
                "layout": asdict(prediction.plan.layout),
                "peak_bytes": round(prediction.peak_bytes),
                "step_seconds": prediction.step_s,
                "tokens_per_second_per_device": prediction.tokens_per_s_per_device,
                "mfu_causal": prediction.mfu(causal=True),
                "mfu_full": prediction.mfu(causal=False),
                "bubble_fraction": prediction.bubble_fraction,
                "tight": is_bold(prediction),
                "fit_probability": fit_probability(prediction),
            }
            for prediction in sorted(ranking.best, key=lambda prediction: prediction.step_s)
        ],
        "rejected": [
            {"layout": asdict(group.layout), "reason": f"does not fit: {group.reason}",
             "peak_bytes": round(group.peak_bytes), "count": group.count}
            for group in ranking.rejected
        ],
        "legal": ranking.legal,
        "too_large": ranking.too_large,
        "slower": ranking.slower,
    }  # fmt: skip
