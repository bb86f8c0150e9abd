"""Cost of a teacher beside the student: frozen weights, forward passes, and the logits of both at the student's loss.

Under a pipeline its passes precede the student's, and hidden states wait for those. Its gathers under ZeRO-3 are
counted in bytes and not in time.
"""

from dataclasses import replace

from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.states import counts
from meshwright.planner.memory.rank_memory import RankMemory
from meshwright.planner.step.shared_costs import SharedCosts
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.layout.layout import Layout, own_stages
from meshwright.spec.memory.buffers import cache_bytes
from meshwright.spec.memory.held import WIDTHS
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, NO_SCHEME, Recipe
from meshwright.spec.rules.objectives import teacher_layout

AFTER_PASSES = ("optimizer step", "evaluation")
"""Moments (rank_memory) at which no hidden states wait any more."""


def teachers_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the teacher's forward passes."""
    plain = replace(recipe, products="same", fake_quantize=NO_SCHEME, dropout=0.0)
    return replace(plain, objective=CROSS_ENTROPY, noise_scale_every=0, batch_ramp=())


def _stages(teacher: SharedCosts, forward_layout: Layout) -> list[MicroBatchCost]:
    return teacher.stages(forward_layout, teacher.pass_terms(forward_layout))


def _width(teacher: SharedCosts) -> int:
    return WIDTHS[teacher.recipe.precision].parameter


def held_bytes(teacher: SharedCosts, layout: Layout, rank: int) -> float:
    """Return the bytes of the weights of a pipeline rank."""
    forward_layout = teacher_layout(layout, teacher.shape)
    count = teacher.held(forward_layout, rank)
    return float((count.shard if forward_layout.zero else count.whole) * _width(teacher) + count.codes)


def before_step(teacher: SharedCosts, time: StepTime, layout: Layout, micro_batches: int) -> StepTime:
    """Return the time of a pipeline's step with the teacher's passes in front.

    One micro-batch goes through all stages, the others through the slowest rank.
    """
    if layout.pp == 1:
        return time
    forward_layout = teacher_layout(layout, teacher.shape)
    # the first micro-batch fills the pipeline; each later one adds the slowest rank's time
    forward = [stage.forward_s for stage in _stages(teacher, forward_layout)]
    busiest = max(
        sum(forward[stage] for stage in own_stages(forward_layout, rank)) for rank in range(forward_layout.pp)
    )
    return replace(
        time, compute_s=time.compute_s + micro_batches * busiest, bubble_s=time.bubble_s + sum(forward) - busiest
    )


def least_ahead_s(teacher: SharedCosts, layout: Layout, micro_batches: int) -> float:
    """Return the least seconds that a teacher's passes add to a step, wherever its layers lie.

    Of a pipeline those of `before_step`.
    """
    forward_s = sum(stage.forward_s for stage in _stages(teacher, teacher_layout(layout, teacher.shape)))
    return forward_s * (1 + (micro_batches - 1) / layout.pp)


def with_cache(memory: RankMemory, shape: ModelShape, recipe: Recipe, layout: Layout) -> RankMemory:
    """Return the memory of a rank whose student generates samples.

    If that is more, it is the cache of keys and values beside the states, without gradients. Transient memory of a
    sampling step is ignored: some rows of one layer.
    """
    if not recipe.distillation_on_policy:
        return memory
    cache = cache_bytes(shape, recipe, layout, WIDTHS[recipe.precision].parameter)
    none = dict.fromkeys(("gradients", "logits", "temporaries", "activations"), 0.0)
    sampling = {**memory.kinds, **none, "buffers": float(cache)}
    return replace(memory, kinds=sampling, when="sampling") if sum(sampling.values()) > memory.total_bytes else memory


def with_states(teacher: SharedCosts, memory: RankMemory, layout: Layout, rank: int, micro_batches: int) -> RankMemory:
    """Return a pipeline rank's memory with a teacher.

    On the last stage hidden states of all micro-batches wait at the teacher's head. If the teacher's passes hold more,
    they count instead: its stage, gathered, and no gradients.
    """
    if layout.pp == 1:
        return memory
    forward_layout = teacher_layout(layout, teacher.shape)
    local, _ = teacher.parts(forward_layout)
    stages = own_stages(forward_layout, rank)
    waits = (
        micro_batches * local.tokens * teacher.shape.hidden * local.width
        if stages[-1] == forward_layout.pp * forward_layout.vp - 1
        else 0.0
    )
    # at the optimizer step no hidden states wait any more
    if memory.when not in AFTER_PASSES:
        memory = replace(memory, kinds={**memory.kinds, "activations": memory.kinds["activations"] + waits})
    before = {
        **memory.kinds,
        "gradients": 0.0,
        "logits": 0.0,
        "temporaries": 0.0,
        "activations": waits + local.hidden_bytes,
    }
    if forward_layout.zero:  # the whole stage, and what two blocks were gathered into
        block = counts(teacher.shape, forward_layout, (teacher.shape.layers - 1,), first=False, last=False).gathered
        held = teacher.held(forward_layout, rank)
        before["parameters"] = float(held.gathered * _width(teacher) + held.codes)
        before["buffers"] = float(2 * block * _width(teacher))
    # the teacher's passes run before the student's: the two peaks never coincide
    if sum(before.values()) > memory.total_bytes:
        return replace(memory, kinds=before, when="teacher's forward passes")
    return memory
