"""Layout -> ranks and their groups, all made before the first step.

Ranks are numbered with tp innermost: rank = (((pp * R + dp_replicate) * S + dp_shard) * C + cp) * T + tp. Neighbours in
number are neighbours in a node, where the collectives of tensor parallelism need the fast links; pipeline stages lie
farthest apart, since they send least (Narayanan et al. 2021, arXiv:2104.04473, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.group import Count, Group
from meshwright.spec.layout import AXES, Layout

Made = dict[tuple[int, ...], dist.ProcessGroup | None]
PRODUCTS = {
    "replicate": ("dp_replicate",),
    "shard": ("dp_shard", "cp"),
    "data": ("dp_replicate", "dp_shard", "cp"),
    "model": ("pp", "dp_shard", "cp", "tp"),
    "world": AXES,
}
"""Groups over several axes. shard: ranks that share one replica's gradients; data: ranks that hold the same
parameters."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mesh:
    """The groups of one rank by name: each axis, each product in PRODUCTS; `ep` shares the experts, `expert_shard` (in
    one replica) and `expert_data` (in all) hold the same ones; `alone` is this rank."""

    layout: Layout
    rank: int
    groups: dict[str, Group]
    made: Made
    """Process groups by their ranks; another mesh of the same process takes them over."""

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    @property
    def places(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return {axis: self.groups[axis].index for axis in AXES}


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


def _expert_data(layout: Layout, rank: int) -> tuple[int, ...]:
    """Ranks of all replicas that hold the same experts."""
    replicas = ranks_along(layout, ("dp_replicate",), rank)
    return tuple(member for replica in replicas for member in expert_ranks(layout, replica)[1])


def make_mesh(layout: Layout, rank: int | None = None, count: Count | None = None, made: Made | None = None) -> Mesh:
    """All groups of a layout for this rank (default: that of the process group that is initialised).

    Every rank makes them in the same order; only members take part in making one, so the cost is the number of groups
    of a rank, not of the world. A process that makes several meshes hands `made` of the one to the next: torch names
    groups by their ranks.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = {axis: ranks_along(layout, (axis,), rank) for axis in AXES}
    ranks |= {name: ranks_along(layout, axes, rank) for name, axes in PRODUCTS.items()}
    ranks["ep"], ranks["expert_shard"] = expert_ranks(layout, rank)
    ranks["expert_data"] = _expert_data(layout, rank)
    ranks["alone"] = (rank,)
    mesh = Mesh(layout=layout, rank=rank, groups={}, made={} if made is None else made)
    for name, members in ranks.items():
        mesh.groups[name] = make_group(name, members, mesh, count)
    return mesh


def make_group(axis: str, ranks: tuple[int, ...], mesh: Mesh, count: Count | None = None) -> Group:
    """One more group, of ranks of `mesh`; every one of them calls this at the same place."""
    if ranks not in mesh.made:
        mesh.made[ranks] = _process_group(ranks, mesh.layout.world)
    return Group(axis, ranks, ranks.index(mesh.rank), mesh.made[ranks], count)


def saving_group(mesh: Mesh) -> Group:
    """All ranks once more, over Gloo: for a thread that works beside the training, whose collectives would meet those
    of the training in a group that both use. Every rank calls this at the same place."""
    world = mesh["world"]
    process_group = dist.new_group(backend="gloo") if world.size > 1 else None
    return replace(world, axis="saving", process_group=process_group, count=None)


def counted(mesh: Mesh, count: Count | None) -> Mesh:
    """The same mesh whose collectives are told to `count`."""
    return replace(mesh, groups={name: replace(group, count=count) for name, group in mesh.groups.items()})


def _process_group(ranks: tuple[int, ...], world: int) -> dist.ProcessGroup | None:
    if world == 1:
        return None
    if len(ranks) == world:
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def device_mesh(mesh: Mesh, outer: Group, inner: Group, device_type: str) -> DeviceMesh:
    """What fully_shard takes, from groups that exist already: (replicate, shard), or (shard,) without replicas."""
    if outer.size == 1:
        return DeviceMesh.from_group(_real(mesh, inner), device_type, mesh_dim_names=("shard",))
    here = inner.ranks[inner.index]
    table = [[rank + other - here for other in inner.ranks] for rank in outer.ranks]
    groups = [_real(mesh, outer), _real(mesh, inner)]
    return DeviceMesh.from_group(groups, device_type, mesh=table, mesh_dim_names=("replicate", "shard"))


def _real(mesh: Mesh, group: Group) -> dist.ProcessGroup:
    """fully_shard wants a process group for one rank too."""
    found = group.process_group or mesh["alone"].process_group
    assert found is not None
    return found
