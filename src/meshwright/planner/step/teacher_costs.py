"""What a teacher beside the student adds to a step: its frozen weights, its forward passes, and at the student's loss
the logits of both. Under a pipeline its passes stand before the student's, and hidden states wait for those. Its
gathers under ZeRO-3 are counted in bytes and not in time."""

from dataclasses import replace

from meshwright.planner.cost import activations, adapters
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.states import counts
from meshwright.planner.memory.rank_memory import RankMemory
from meshwright.planner.step.shared_costs import SharedCosts
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.distillation_rules import teacher_layout
from meshwright.spec.held import WIDTHS
from meshwright.spec.layout import Layout
from meshwright.spec.objective_traits import CROSS_ENTROPY
from meshwright.spec.places import own_stages
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.sampling_memory import cache_bytes
from meshwright.spec.shape import ModelShape

AFTER_PASSES = ("optimizer step", "evaluation")
"""Moments (rank_memory) at which nothing waits any more."""
BUFFERS = 5
"""Of a chunk's logits in fp32 (kernels/linear_divergence.py)."""


def teachers_recipe(recipe: Recipe) -> Recipe:
    """Of the teacher's forward passes."""
    plain = replace(recipe, products="same", fake_quantize=NO_SCHEME, dropout=0.0)
    return replace(plain, objective=CROSS_ENTROPY, noise_scale_every=0, batch_ramp=())


def pass_cost(teacher: SharedCosts, layout: Layout) -> MicroBatchCost:
    """Of one micro-batch, on the student's last stage: the forward pass, where it is made there, and the worst of what
    is held for a moment."""
    own = teacher_layout(layout, teacher.shape)
    of, _ = teacher.parts(own)
    restored = max(adapters.restored_bytes(of, group) for group in ("attention", "mlp", "expert"))
    logits = max(activations.divergence_chunk(of, BUFFERS), restored) + _gathered_bytes(teacher, own)
    forward_s = 0.0 if layout.pp > 1 else teacher.stages(own)[0].forward_s
    return MicroBatchCost(forward_s=forward_s, logits=activations.Logits(0.0, 0.0, logits))


def _gathered_bytes(teacher: SharedCosts, own: Layout) -> float:
    """Under ZeRO-3 norm and head, and without a pipeline a block's, which FSDP keeps until the next gather."""
    if not own.zero:
        return 0.0
    shape = teacher.shape
    last = counts(shape, own, (), first=shape.tied, last=True).gathered * _width(teacher)
    block = counts(shape, own, (shape.layers - 1,), first=False, last=False)
    return float(last + (block.gathered * _width(teacher) + block.codes_gathered if own.pp == 1 else 0))


def _width(teacher: SharedCosts) -> int:
    return WIDTHS[teacher.recipe.precision].parameter


def held_bytes(teacher: SharedCosts, layout: Layout, rank: int) -> float:
    """Of the weights of a pipeline rank."""
    own = teacher_layout(layout, teacher.shape)
    count = teacher.held(own, rank)
    return float((count.shard if own.zero else count.whole) * _width(teacher) + count.codes)


def before_step(teacher: SharedCosts, time: StepTime, layout: Layout, micro_batches: int) -> StepTime:
    """A step of a pipeline, with the teacher's passes in front: one micro-batch goes through all of its stages, the
    others through its slowest rank."""
    if layout.pp == 1:
        return time
    own = teacher_layout(layout, teacher.shape)
    forward = [one.forward_s for one in teacher.stages(own)]
    busiest = max(sum(forward[stage] for stage in own_stages(own, rank)) for rank in range(own.pp))
    return replace(
        time, compute_s=time.compute_s + micro_batches * busiest, bubble_s=time.bubble_s + sum(forward) - busiest
    )


def least_ahead_s(teacher: SharedCosts, layout: Layout, micro_batches: int) -> float:
    """Seconds that a teacher's passes add to a step at the least, wherever its layers lie: of a pipeline those of
    `before_step`."""
    forward_s = sum(stage.forward_s for stage in teacher.stages(teacher_layout(layout, teacher.shape)))
    return forward_s * (1 + (micro_batches - 1) / layout.pp)


def with_cache(one: RankMemory, shape: ModelShape, recipe: Recipe, layout: Layout) -> RankMemory:
    """The memory of a rank whose student samples: where that is more, its cache of keys and values beside the states,
    without gradients. What a step of sampling computes for a moment is left out: some rows of one layer."""
    if not recipe.distillation_on_policy:
        return one
    cache = cache_bytes(shape, recipe, layout, WIDTHS[recipe.precision].parameter)
    none = dict.fromkeys(("gradients", "logits", "temporaries", "activations"), 0.0)
    sampling = {**one.kinds, **none, "buffers": float(cache)}
    return replace(one, kinds=sampling, when="sampling") if sum(sampling.values()) > one.total_bytes else one


def with_states(teacher: SharedCosts, one: RankMemory, layout: Layout, rank: int, micro_batches: int) -> RankMemory:
    """A pipeline rank's memory with what waits at the teacher's head on the last stage: hidden states of all
    micro-batches. Or, where it is more, what the teacher's passes hold: its stage, gathered, and no gradients."""
    if layout.pp == 1:
        return one
    own = teacher_layout(layout, teacher.shape)
    of, _ = teacher.parts(own)
    stages = own_stages(own, rank)
    waits = micro_batches * of.tokens * teacher.shape.hidden * of.width if stages[-1] == own.pp * own.vp - 1 else 0.0
    if one.when not in AFTER_PASSES:
        one = replace(one, kinds={**one.kinds, "activations": one.kinds["activations"] + waits})
    before = {**one.kinds, "gradients": 0.0, "logits": 0.0, "temporaries": 0.0, "activations": waits + of.hidden_bytes}
    if own.zero:  # the whole stage, and what two blocks were gathered into
        block = counts(teacher.shape, own, (teacher.shape.layers - 1,), first=False, last=False).gathered
        held = teacher.held(own, rank)
        before["parameters"] = float(held.gathered * _width(teacher) + held.codes)
        before["buffers"] = float(2 * block * _width(teacher))
    if sum(before.values()) > one.total_bytes:
        return replace(one, kinds=before, when="teacher's forward passes")
    return one
