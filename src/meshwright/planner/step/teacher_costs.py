"""What a teacher beside the student adds to a step: its frozen weights, its forward passes, and at the student's loss
the logits of both. Its gathers under ZeRO-3 are counted in bytes and not in time."""

from dataclasses import replace

from meshwright.planner.cost import activations
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.states import counts
from meshwright.planner.step.shared_costs import SharedCosts
from meshwright.spec.distillation_rules import teacher_layout
from meshwright.spec.held import WIDTHS
from meshwright.spec.layout import Layout
from meshwright.spec.objective_traits import CROSS_ENTROPY
from meshwright.spec.recipe import Recipe

BUFFERS = 5
"""Of a chunk's logits in fp32 (kernels/linear_divergence.py)."""


def teachers_recipe(recipe: Recipe) -> Recipe:
    """Of the teacher's forward passes."""
    return replace(recipe, objective=CROSS_ENTROPY, products="same", dropout=0.0, noise_scale_every=0, batch_ramp=())


def pass_cost(teacher: SharedCosts, layout: Layout) -> MicroBatchCost:
    """Of one micro-batch: the forward pass, and the worst of what it holds for a moment."""
    own = teacher_layout(layout, teacher.shape)
    [stage] = teacher.stages(own)
    of, _ = teacher.parts(own)
    logits = activations.divergence_chunk(of, BUFFERS) + _gathered_bytes(teacher, own)
    return MicroBatchCost(forward_s=stage.forward_s, logits=activations.Logits(0.0, 0.0, logits))


def _gathered_bytes(teacher: SharedCosts, own: Layout) -> float:
    """Under ZeRO-3 norm and head, and a block's, which FSDP keeps until the next gather."""
    if not own.zero:
        return 0.0
    shape = teacher.shape
    last = counts(shape, own, (), first=shape.tied, last=True)
    block = counts(shape, own, (shape.layers - 1,), first=False, last=False)
    return float((last.gathered + block.gathered) * WIDTHS[teacher.recipe.precision].parameter)


def held_bytes(teacher: SharedCosts, layout: Layout) -> float:
    """Of the weights of a rank."""
    own = teacher_layout(layout, teacher.shape)
    count = teacher.held(own, 0)
    return float((count.shard if own.zero else count.whole) * WIDTHS[teacher.recipe.precision].parameter)
