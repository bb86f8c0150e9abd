"""Layout -> ranks and their groups, all made before the first step.

Ranks are numbered with tp innermost (spec/places.py). Neighbours in number are neighbours in a node, where the
collectives of tensor parallelism need the fast links; pipeline stages lie farthest apart, since they send least
(Narayanan et al. 2021, arXiv:2104.04473, section 3.2).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright import compat
from meshwright.parallel.group import Group
from meshwright.parallel.traffic import Traffic
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.places import expert_ranks, expert_replicas, place_of, ranks_along
from meshwright.spec.replay import StageLink, links
from meshwright.spec.schedule import stage_rank

Made = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]
"""(purpose, ranks): a purpose of its own makes another group of the same ranks."""
GROUPS = {
    "pp": ("pp",),
    "cp": ("cp",),
    "tp": ("tp",),
    "replicate": ("dp_replicate",),
    "shard": ("dp_shard", "cp"),
    "data": ("dp_replicate", "dp_shard", "cp"),
    "losses": ("pp", "dp_replicate", "dp_shard", "cp"),
    "world": AXES,
}
"""Over which axes. shard: ranks that share one replica's gradients; data: ranks that hold the same parameters; losses:
ranks whose parts of the loss are summed (those of tp ranks are equal). No group is made that nobody uses: with NCCL
each costs memory and time at the start."""

GPU_LIMIT = timedelta(hours=2)
"""How long a collective on GPUs may take before the library itself ends the process: the second line behind the
watchdog, for a process whose threads no longer run."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mesh:
    """The groups of one rank by name: those of GROUPS, of which `pp` only says who the ranks are; `ep` shares the
    experts, `expert_shard` (in one replica) and `expert_data` (in all) hold the same ones, where ep > 1; `alone` is
    this rank."""

    layout: Layout
    rank: int
    groups: dict[str, Group]
    traffic: Traffic
    """Told of every collective of every group."""
    links: dict[StageLink, Group]
    """The two ranks of each link of the pipeline that this rank sends or receives on, in order of rank."""
    made: Made
    """Process groups; another mesh of the same process takes them over."""

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    @property
    def places(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return place_of(self.layout, self.rank)

    @property
    def reader(self) -> int:
        """Which of the layout.dp readers of different sequences this rank is."""
        return self.places["dp_replicate"] * self.layout.dp_shard + self.places["dp_shard"]


def make_mesh(
    layout: Layout, rank: int | None = None, traffic: Traffic | None = None, made: Made | None = None
) -> Mesh:
    """All groups of a layout for this rank (default: that of the process group that is initialised).

    Every rank makes them in the same order; only members take part in making one, so the cost is the number of groups
    of a rank, not of the world. A process that makes several meshes hands `made` of the one to the next, which takes
    over what is there. `traffic`: one that somebody watches already.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = {name: ranks_along(layout, axes, rank) for name, axes in GROUPS.items()}
    ranks |= dict.fromkeys(("alone", "ep", "expert_shard", "expert_data"), (rank,))
    if layout.ep > 1:
        ranks["ep"], ranks["expert_shard"] = expert_ranks(layout, rank)
        ranks["expert_data"] = expert_replicas(layout, rank)
    traffic = Traffic() if traffic is None else traffic
    mesh = Mesh(layout=layout, rank=rank, groups={}, traffic=traffic, links={}, made={} if made is None else made)
    along = ranks.pop("pp")
    mesh.groups["pp"] = Group("pp", along, along.index(rank), None, traffic)
    for name, members in ranks.items():
        mesh.groups[name] = make_group(name, members, mesh)
        if _uses_nccl(mesh.groups[name]):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=mesh.groups[name].process_group)
    if layout.pp > 1:
        _make_links(mesh)
    return mesh


def _make_links(mesh: Mesh) -> None:
    """A group of two ranks for each link of this rank, connected by a first message. In a group that does more, a
    transfer would wait for whatever was started before it."""
    layout, pp = mesh.layout, mesh["pp"]
    for link in links(stage_rank(layout.schedule, layout.pp, layout.vp)):
        if pp.index not in (link.source, link.target):
            continue
        ends = pp.ranks[link.source], pp.ranks[link.target]
        group = make_group("pp", tuple(sorted(ends)), mesh, purpose=f"{link.kind} from {ends[0]}")
        mesh.links[link] = group
        if _uses_nccl(group):
            start = dist.isend if mesh.rank == ends[0] else dist.irecv
            message = dist.P2POp(
                start, torch.zeros(1, device="cuda"), group.ranks[1 - group.index], group.process_group
            )
            dist.batch_isend_irecv([message])[0].wait()


def _uses_nccl(group: Group) -> bool:
    """NCCL connects a group at its first call, which must not be one that other ranks wait for. Gloo connects when a
    group is made."""
    return group.size > 1 and torch.cuda.is_available() and "nccl" in dist.get_backend_config(group.process_group)


def make_group(axis: str, ranks: tuple[int, ...], mesh: Mesh, purpose: str = "") -> Group:
    """One more group, of ranks of `mesh`; every one of them calls this at the same place."""
    key = purpose if len(ranks) > 1 else "", ranks
    new = key not in mesh.made
    if new:
        mesh.made[key] = _process_group(ranks, mesh.layout.world, purpose)
    group = Group(axis, ranks, ranks.index(mesh.rank), mesh.made[key], mesh.traffic)
    if new and _uses_nccl(group):  # Gloo answers for GPUs, too, and keeps the world's limit
        compat.limit_gpu_collectives(group.process_group, GPU_LIMIT)
    return group


def saving_group(mesh: Mesh) -> Group:
    """All ranks once more, over Gloo: for a thread that works beside the training, whose collectives would meet those
    of the training in a group that both use. Every rank calls this at the same place."""
    world = mesh["world"]
    if world.size == 1:
        return Group("saving", world.ranks, world.index)
    process_group = dist.new_group(timeout=compat.time_limit(dist.group.WORLD), backend="gloo")
    return Group("saving", world.ranks, world.index, process_group)


def _process_group(ranks: tuple[int, ...], world: int, purpose: str) -> dist.ProcessGroup | None:
    if world == 1:
        return None
    if len(ranks) == world and not purpose:
        return dist.group.WORLD
    limit = compat.time_limit(dist.group.WORLD)
    return compat.named_group(ranks, limit, purpose)


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
