"""What stands behind a prediction and was not measured: parts of a model that are planned only, rates of a device."""

from collections.abc import Iterator

from meshwright.planner.kernels.chips import REACHED
from meshwright.spec.plan import Plan
from meshwright.spec.shape import ModelShape


def caveats(plan: Plan) -> tuple[str, ...]:
    """Sentences, the gravest first; none where the engine runs it on a device whose products were measured."""
    return tuple(_caveats(plan))


def _caveats(plan: Plan) -> Iterator[str]:
    if plan.layout.kernels == "reference":
        yield (
            "layout.kernels=reference is plain code, for comparison: it is slower, and holds several times the "
            "activations that are counted here."
        )
    if plan.plan_only:
        yield f"{plan.plan_only[:1].upper()}{plan.plan_only[1:]}."
        yield from _counted(plan.model)
    device = plan.cluster.device
    if device.is_gpu and not device.half_matmul_flop_per_s:
        kind = "bf16" if device.bf16_flop_per_s else "fp16"
        yield (
            f"{device.name} has no measured {kind} product: {REACHED:.0%} of its data sheet's "
            f"{device.half_flop_per_s / 1e12:,.4g} TFLOP/s stands for it (measured elsewhere: 51% to 87%)."
        )


def _counted(shape: ModelShape) -> Iterator[str]:
    """What the plan takes for a part that has no formula of its own."""
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
