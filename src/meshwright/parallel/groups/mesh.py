"""Ranks of a layout and their groups, all made before the first step.

Ranks are numbered with tp innermost (spec/layout/layout.py). Neighbours in number are neighbours in a node, where the
collectives of tensor parallelism need the fast links. Pipeline stages lie farthest apart, since they send least
(Narayanan et al. 2021, arXiv:2104.04473, section 3.2).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright import compat
from meshwright.parallel.groups.group import Group, Traffic
from meshwright.spec.layout.layout import AXES, Layout, expert_ranks, expert_replicas, place_of, ranks_along
from meshwright.spec.layout.replay import StageLink, links
from meshwright.spec.layout.schedule import stage_rank

ProcessGroups = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]
"""Process groups by (purpose, ranks). Another purpose makes another group of the same ranks."""
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
"""Axes of each group.
shard: ranks that share one replica's gradients. data: ranks that hold the same parameters. losses: ranks whose parts of
the loss are summed (those of tp ranks are equal). Only groups that are used are made: with NCCL each costs memory and
time at the start.
"""

GPU_LIMIT = timedelta(hours=2)
"""Time after which a collective on GPUs ends the process by itself.
It is a second line behind the watchdog, for a process whose threads no longer run.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mesh:
    """Groups of one rank by name: those of GROUPS, and four more.

    `pp` only lists its ranks. With ep > 1, `ep` shares the experts; `expert_shard` (in one replica) and `expert_data`
    (in all) hold the same ones. `alone` is this rank.
    """

    layout: Layout
    rank: int
    groups: dict[str, Group]
    traffic: Traffic
    """Counter of the collectives of all groups."""
    links: dict[StageLink, Group]
    """Groups of two ranks, in order of rank, for each link of the pipeline that this rank sends or receives on."""
    process_groups: ProcessGroups
    """Process groups, for other meshes of the same process to reuse."""

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    @property
    def places(self) -> dict[str, int]:
        """This rank's index on each axis."""
        return place_of(self.layout, self.rank)

    @property
    def reader(self) -> int:
        """Index of this rank among the layout.dp readers of different sequences."""
        return self.places["dp_replicate"] * self.layout.dp_shard + self.places["dp_shard"]


def make_mesh(
    layout: Layout, rank: int | None = None, traffic: Traffic | None = None, process_groups: ProcessGroups | None = None
) -> Mesh:
    """Make all groups of a layout for a rank. None = the rank in the initialised process group.

    Every rank makes them in the same order, and only members take part in making one. So the cost is the number of
    groups of a rank, not of the world. A process that makes several meshes passes `process_groups` of the first to the
    next, which reuses them. `traffic`: an existing counter, already being watched.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = {name: ranks_along(layout, axes, rank) for name, axes in GROUPS.items()}
    # Without ep the expert groups are this rank alone, so callers need not ask for the degree.
    ranks |= dict.fromkeys(("alone", "ep", "expert_shard", "expert_data"), (rank,))
    if layout.ep > 1:
        ranks["ep"], ranks["expert_shard"] = expert_ranks(layout, rank)
        ranks["expert_data"] = expert_replicas(layout, rank)
    traffic = Traffic() if traffic is None else traffic
    mesh = Mesh(
        layout=layout,
        rank=rank,
        groups={},
        traffic=traffic,
        links={},
        process_groups={} if process_groups is None else process_groups,
    )
    # Stages only send to each other, over `links`, so the axis itself needs no process group.
    along = ranks.pop("pp")
    mesh.groups["pp"] = Group("pp", along, along.index(rank), None, traffic)
    for name, members in ranks.items():
        mesh.groups[name] = make_group(name, members, mesh)
        if _uses_nccl(mesh.groups[name]):  # connect now, when no rank waits for another
            dist.all_reduce(torch.zeros(1, device="cuda"), group=mesh.groups[name].process_group)
    if layout.pp > 1:
        _make_links(mesh)
    return mesh


def _make_links(mesh: Mesh) -> None:
    """Make a group for each link of this rank: in a shared one, a transfer would wait for earlier collectives."""
    layout, pp = mesh.layout, mesh["pp"]
    # Both ends reach a link at the same point, because all ranks go through the links in one order.
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
    """Return whether a group runs on NCCL, which connects at its first call. Gloo connects when it is made."""
    return group.size > 1 and torch.cuda.is_available() and "nccl" in dist.get_backend_config(group.process_group)


def make_group(axis: str, ranks: tuple[int, ...], mesh: Mesh, purpose: str = "") -> Group:
    """Make one more group of ranks of `mesh`. All its ranks make this call at the same point."""
    # A rank alone has no collectives that could be mixed up, so one group of it serves all purposes.
    key = purpose if len(ranks) > 1 else "", ranks
    new = key not in mesh.process_groups
    if new:
        world = mesh.layout.world
        if world == 1:
            mesh.process_groups[key] = None
        # The world group exists already. With a purpose it must not be shared: collectives are matched by their order.
        elif len(ranks) == world and not purpose:
            mesh.process_groups[key] = dist.group.WORLD
        else:
            mesh.process_groups[key] = compat.create_named_group(
                ranks, compat.time_limit(dist.group.WORLD), purpose, axis
            )
    overlaps = mesh.layout.overlap == "on"
    group = Group(axis, ranks, ranks.index(mesh.rank), mesh.process_groups[key], mesh.traffic, overlaps)
    if new and _uses_nccl(group):  # Gloo also serves GPU tensors, and keeps the world's limit
        compat.limit_gpu_collectives(group.process_group, GPU_LIMIT)
    return group


def saving_group(mesh: Mesh) -> Group:
    """Make a Gloo group of all ranks, for a thread that works during the training.

    In a shared group its collectives would be matched with those of the training. Every rank makes this call at the
    same point.
    """
    world = mesh["world"]
    if world.size == 1:
        return Group("saving", world.ranks, world.index)
    process_group = dist.new_group(timeout=compat.time_limit(dist.group.WORLD), backend="gloo")
    return Group("saving", world.ranks, world.index, process_group)


def device_mesh(mesh: Mesh, outer: Group, inner: Group, device_type: str) -> DeviceMesh:
    """Make the device mesh for fully_shard from existing groups: (replicate, shard), or (shard,) without replicas."""
    if outer.size == 1:
        return DeviceMesh.from_group(_real(mesh, inner), device_type, mesh_dim_names=("shard",))
    this_rank = inner.ranks[inner.index]
    # One row per replica. Ranks are numbered regularly, so each row is this rank's shard group, shifted.
    table = [[rank + other - this_rank for other in inner.ranks] for rank in outer.ranks]
    groups = [_real(mesh, outer), _real(mesh, inner)]
    return DeviceMesh.from_group(groups, device_type, mesh=table, mesh_dim_names=("replicate", "shard"))


def _real(mesh: Mesh, group: Group) -> dist.ProcessGroup:
    """Return the process group that fully_shard needs even for one rank."""
    process_group = group.process_group or mesh["alone"].process_group
    assert process_group is not None
    return process_group
