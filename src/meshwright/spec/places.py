"""Layout -> where a rank stands on each axis, with whom it shares what, and which pipeline stages it holds.

Ranks are numbered with tp innermost: rank = (((pp * R + dp_replicate) * S + dp_shard) * C + cp) * T + tp.
"""

from collections.abc import Sequence
from itertools import product

from meshwright.spec.errors import PlanError
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.schedule import ranges, stage_layers, stages_of_ranks


def place_of(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's place on each axis."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return found


def rank_of(layout: Layout, place: dict[str, int]) -> int:
    """The rank at a place."""
    rank = 0
    for axis in AXES:
        rank = rank * int(getattr(layout, axis)) + place[axis]
    return rank


def pipeline_ranks(layout: Layout) -> list[int]:
    """The first rank of each pipeline place: others of the place hold and send as much."""
    return [place * (layout.world // layout.pp) for place in range(layout.pp)]


def check_ranks(layout: Layout, ranks: Sequence[int]) -> None:
    """PlanError where one of `ranks` is none of the layout's."""
    for rank in ranks:
        if not 0 <= rank < layout.world:
            raise PlanError(f"rank={rank} is not one of the {layout.world} ranks of the plan (0 to {layout.world - 1})")


def ranks_along(layout: Layout, axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Ranks that differ from `rank` on `axes` only, in the order of the axes in AXES."""
    place = place_of(layout, rank)
    ordered = [axis for axis in AXES if axis in axes]
    ranges = [range(getattr(layout, axis)) for axis in ordered]
    return tuple(rank_of(layout, {**place, **dict(zip(ordered, at, strict=True))}) for at in product(*ranges))


def expert_ranks(layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that share the experts, ranks that hold the same ones) among dp_shard x cp x tp: ep is the inner part."""
    ranks = ranks_along(layout, ("dp_shard", "cp", "tp"), rank)
    at = ranks.index(rank)
    start = at - at % layout.ep
    return ranks[start : start + layout.ep], ranks[at % layout.ep :: layout.ep]


def expert_place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """(place among the ranks that share the experts, place among those that hold the same ones, number of these): of
    `expert_ranks`, without naming anybody."""
    block = layout.dp_shard * layout.cp * layout.tp
    at = rank % block
    return at % layout.ep, at // layout.ep, block // layout.ep


def expert_replicas(layout: Layout, rank: int) -> tuple[int, ...]:
    """Ranks of all replicas that hold the same experts."""
    replicas = ranks_along(layout, ("dp_replicate",), rank)
    return tuple(member for replica in replicas for member in expert_ranks(layout, replica)[1])


def own_stages(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The stages, ascending, of a pipeline rank."""
    return stages_of_ranks(layout.schedule, layout.pp, layout.vp)[pp_rank]


def layers_of_stages(layers: int, layout: Layout) -> list[range]:
    """Which of a model's layers each pipeline stage has: as `layout.stages` says, or dealt evenly."""
    if layout.stages:
        return ranges(layout.stages)
    return stage_layers(layers, layout.pp * layout.vp if layout.pp > 1 else 1)
