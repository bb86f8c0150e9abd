"""Kernels of an optimizer step, and the bytes that each moves (training/optimizer/optimizer.py)."""

from typing import NamedTuple

from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.states import ElementCounts, States
from meshwright.spec.layout.layout import Layout
from meshwright.spec.recipe.recipe import Recipe

GRADIENT_BYTES = 4.0
"""Bytes of a gradient as the optimizer of other software reads it."""
NORM_BYTES = 4.0
"""Bytes to read such gradients once for their norm."""
NARROW_BYTES = 18.0
"""Bytes with 8-bit moments: code books and scales bound that kernel, whatever the weights are."""


class UpdatePass(NamedTuple):
    """One kernel over all parameters of a rank."""

    kernel: str
    """Name in Speeds.update_shares."""
    weight_bytes: float
    """Bytes per parameter: gradient and weights, read and written."""
    moments: float = 0.0
    """Times that it moves the bytes of the moments."""


def update_passes(
    stack: Stack, recipe: Recipe, gradient_bytes: float, *, at_once: bool = False, measured: bool = False
) -> tuple[UpdatePass, ...]:
    """Return the kernels in the order in which they run. A `measured` machine has one, as `calibrate` timed it.

    torch's AdamW reads gradients in fp32, and its masters are rounded to new weights. Kernels of narrower moments, and
    of fp32 ones `at_once` (kernels/triton/many_tensors.py), read gradients as they are and write both.
    `gradient_bytes`: of a gradient as kept over a step.
    """
    sixteen, storage = recipe.precision != "fp32", recipe.storage
    only = 4.0 if sixteen else 8.0
    weights = 8.0 + 2.0 if sixteen and storage.masters else only
    if not stack.is_meshwright or measured:
        return (UpdatePass("", NORM_BYTES + GRADIENT_BYTES + weights, 2.0),)
    norm = UpdatePass("half" if at_once else "norm", gradient_bytes)
    # one kernel per format of moments; torch's AdamW serves fp32 ones
    if storage.moments == "int8":
        return norm, UpdatePass("narrow", NARROW_BYTES)
    if storage.narrow or at_once:
        return norm, UpdatePass("half", gradient_bytes + weights, 2.0)
    rounded = (UpdatePass("copy", 4.0 + 2.0),) if sixteen else ()
    return norm, UpdatePass("adamw", 4.0 + 8.0, 2.0), *rounded


def update_seconds(
    speeds: Speeds, stack: Stack, recipe: Recipe, elements: float, moment_bytes: float, gradient_bytes: float,
    *, at_once: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of the optimizer over a rank's elements and moments, and of the norm of its gradients."""
    passes = update_passes(stack, recipe, gradient_bytes, at_once=at_once, measured=speeds.curves is not None)
    return sum(
        speeds.update_seconds(elements * kernel.weight_bytes + kernel.moments * moment_bytes, kernel.kernel)
        for kernel in passes
    )


class GradientSums(NamedTuple):
    """Summation of a rank's 16-bit gradients in fp32 (kernels/linear/weight_gradients.py)."""

    learned: float
    """Trained elements of its parameters."""
    updated: float
    """Elements that the rank updates."""
    micro_batches: int
    reduces_each: bool
    """Each micro-batch's gradients are reduced separately (ZeRO-2 and -3 without a pipeline)."""

    def seconds(
        self, speeds: Speeds, stack: Stack, recipe: Recipe, gradient_bytes: float, *, at_once: bool = False
    ) -> float:
        """Return the seconds of widening and adding gradients in separate passes.

        Each gradient is widened where it is summed first, and later ones are added. A gradient without a sum is read as
        it is, if the kernel can. Other software adds inside its products, or sets Stack.accumulates.
        """
        if not stack.is_meshwright or speeds.curves is not None or recipe.precision == "fp32":
            return 0.0
        if gradient_bytes < 4 and (recipe.storage.narrow or at_once):
            return 0.0
        widened = self.learned * (2.0 + 4.0) * (self.micro_batches if self.reduces_each else 1)
        added = (self.micro_batches - 1) * (self.updated * 12.0 if self.reduces_each else self.learned * (2.0 + 8.0))
        return speeds.update_seconds(widened, "widen") + (speeds.update_seconds(added, "add") if added else 0.0)


def optimizer_seconds(
    speeds: Speeds,
    stack: Stack,
    recipe: Recipe,
    layout: Layout,
    count: ElementCounts,
    state: States,
    micro_batches: int,
) -> float:
    """Return the seconds of a rank to sum the gradients of a step and update its weights.

    With CUDA graphs gradients stay in place: they are zeroed and added to.
    """
    sums = GradientSums(count.learned, count.updated, micro_batches, layout.zero >= 2 and layout.pp == 1)
    at_once, width = stack.updates_at_once and layout.kernels in ("auto", "triton"), state.gradient_bytes
    seconds = update_seconds(speeds, stack, recipe, count.updated, count.moments, width, at_once=at_once)
    seconds += sums.seconds(speeds, stack, recipe, width, at_once=at_once)
    return seconds + (speeds.update_seconds(4 * state.step["gradients"]) if layout.cuda_graphs == "on" else 0.0)
