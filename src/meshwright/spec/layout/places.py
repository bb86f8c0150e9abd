"""Coordinates of a rank in a layout, the ranks with which it shares data, and its pipeline stages.

Ranks are numbered with tp innermost: rank = (((pp * R + dp_replicate) * S + dp_shard) * C + cp) * T + tp.
"""

from collections.abc import Sequence
from itertools import product

from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule import ranges, stage_layers, stages_of_ranks


def place_of(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's coordinate on each axis."""
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, getattr(layout, axis))
    return coordinates


def rank_of(layout: Layout, coordinates: dict[str, int]) -> int:
    """Return the rank at these coordinates."""
    rank = 0
    for axis in AXES:
        rank = rank * int(getattr(layout, axis)) + coordinates[axis]
    return rank


def pipeline_ranks(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline coordinate. Others of the same coordinate hold and send as much."""
    return [stage * (layout.world // layout.pp) for stage in range(layout.pp)]


def check_ranks(layout: Layout, ranks: Sequence[int]) -> None:
    """Raise PlanError unless all ranks belong to the layout."""
    for rank in ranks:
        if not 0 <= rank < layout.world:
            raise PlanError(f"rank={rank} is not one of the {layout.world} ranks of the plan (0 to {layout.world - 1})")


def ranks_along(layout: Layout, axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` on `axes` only, in the order of AXES."""
    coordinates = place_of(layout, rank)
    ordered = [axis for axis in AXES if axis in axes]
    ranges = [range(getattr(layout, axis)) for axis in ordered]
    return tuple(
        rank_of(layout, {**coordinates, **dict(zip(ordered, indices, strict=True))}) for indices in product(*ranges)
    )


def expert_ranks(layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (ranks that share the experts, ranks that hold the same ones) in dp_shard x cp x tp, ep innermost."""
    ranks = ranks_along(layout, ("dp_shard", "cp", "tp"), rank)
    index = ranks.index(rank)
    start = index - index % layout.ep
    return ranks[start : start + layout.ep], ranks[index % layout.ep :: layout.ep]


def expert_place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return (index among ranks that share experts, index among holders of the same ones, number of holders)."""
    block = layout.dp_shard * layout.cp * layout.tp
    index = rank % block
    return index % layout.ep, index // layout.ep, block // layout.ep


def expert_replicas(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks of all replicas that hold the same experts."""
    replicas = ranks_along(layout, ("dp_replicate",), rank)
    return tuple(member for replica in replicas for member in expert_ranks(layout, replica)[1])


def own_stages(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank in ascending order."""
    return stages_of_ranks(layout.schedule, layout.pp, layout.vp)[pp_rank]


def layers_of_stages(layers: int, layout: Layout) -> list[range]:
    """Return the layers of each pipeline stage: from `layout.stages`, or dealt evenly."""
    if layout.stages:
        return ranges(layout.stages)
    return stage_layers(layers, layout.pp * layout.vp if layout.pp > 1 else 1)
