"""Units that fully_shard gathers and reduces together on a rank (parallel/axes/data.py).

The embedding, a block, in it experts that are spread over ranks, and the norm with the head.
"""

from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from meshwright.planner.cost.states import ElementCounts, counts, expert_counts, largest_cut_stack
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape


class GatherUnit(NamedTuple):
    """Bytes of a unit: parameters, gradients as summed and as computed."""

    parameters: float = 0.0
    gradients: float = 0.0
    made: float = 0.0
    share: float = 0.0
    """Bytes of gradients left after the reduction."""


NO_UNIT = GatherUnit()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherUnits:
    """Units of a model: the embedding, a block, norm with head. A tied matrix is in both ends."""

    first: GatherUnit
    block: GatherUnit
    last: GatherUnit
    summed: bool
    """True if other ranks have gradients to be summed with these."""
    tied: bool
    """Both ends are one unit."""
    dense: GatherUnit
    """A block without experts that are a separate unit."""
    experts: GatherUnit = NO_UNIT
    """A block's experts on this rank, if other ranks have other ones."""
    stack: float = 0.0
    """Bytes of the largest stack of experts as its gradient is computed, if ZeRO cuts inside experts.

    Stacks are then copied as they are gathered, and one by one before they are reduced.
    """
    alone: bool = False
    """No other rank has these experts, so nothing of them is gathered."""


def widest_layer(shape: ModelShape) -> int:
    """Return the last layer, or the last of linear attention if that has more parameters."""
    ends = {bool(shape.linear_of(layer)): layer for layer in range(shape.layers)}.values()
    return max(ends, key=lambda layer: counts(shape, Layout(), (layer,), first=False, last=False).whole)


def gather_units(shape: ModelShape, layout: Layout, width: float, gradient: float) -> GatherUnits:
    """Return the units of a shape. `width` and `gradient`: bytes of an element."""
    tied, layer = shape.tied, widest_layer(shape)

    def unit(elements: ElementCounts) -> GatherUnit:
        learned = elements.learned_gathered
        parameters = elements.gathered * width + elements.codes_gathered
        return GatherUnit(parameters, learned * gradient, learned * width, elements.updated * gradient)

    # experts spread over ranks are sharded over fewer ranks than the rest of their block
    apart = layout.ep > 1 and shape.is_moe_layer(layer)
    block = unit(counts(shape, layout, (layer,), first=False, last=False))
    experts = unit(expert_counts(shape, layout, layer)) if apart else NO_UNIT
    return GatherUnits(
        first=unit(counts(shape, layout, (), first=True, last=tied)),
        block=block,
        last=unit(counts(shape, layout, (), first=tied, last=True)),
        summed=layout.sums_gradients,
        tied=tied,
        dense=GatherUnit(*map(sub, block, experts)),
        experts=experts,
        stack=largest_cut_stack(shape, layout, layer) * width if apart else 0.0,
        alone=apart and layout.zero_ranks[1] == 1,
    )
