"""A prediction and its caveats as the shared JSON document of `plan` (docs/planner.md).

Caveats name unmeasured assumptions behind it: parts of a model that exist in plans only, rates of a device, lengths of
documents. They also say if it is above everything published.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from meshwright.planner.cost.speeds import takes_flash_4
from meshwright.planner.kernels.fitted_kernel import REACHED
from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.error_ranges import fit_probability, ranges
from meshwright.planner.step.predict import predict
from meshwright.planner.step.prediction import Prediction
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan, as_document
from meshwright.spec.units import gib

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
