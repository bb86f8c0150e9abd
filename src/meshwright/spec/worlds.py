"""Layouts and numbers of processes: which of either is nearest, where the two that were given do not go together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legal import divisors
from meshwright.spec.plan import Plan
from meshwright.spec.units import many

PROPOSED = 2
CHANGED_FIRST = ("dp_shard", "dp_replicate", "pp", "cp", "tp")
FARTHEST = 64
"""Numbers of processes are looked for so far up and down."""


def world_violation(plan: Plan, processes: int, nodes: int = 1) -> str | None:
    """Why a plan cannot run on so many processes of so many nodes, with the nearest layouts and numbers that can;
    None = it can."""
    layout, found = plan.layout, plan.violations()
    if layout.world == processes:
        return _illegal(plan, found, processes) if found else None
    factors = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    ranks = many(layout.world, "rank")
    apart = f"the layout has {factors} = {ranks} and {processes} {'was' if processes == 1 else 'were'} started"
    if not found:
        start = f"start {many(layout.world, 'process', 'processes')} ({_torchrun(plan, nodes)})"
        return f"{apart}: {start}{_instead(plan, processes, ', or take ')}"
    # So many processes would not help: the next refusal would be that of the plan.
    instead = _instead(plan, processes, ": take ")
    return apart + instead if instead else _illegal(plan, found, processes)


def _torchrun(plan: Plan, nodes: int) -> str:
    """The torchrun command that starts one process per rank of the layout; it takes the count of one node."""
    world, cluster = plan.layout.world, plan.cluster
    if cluster.devices == world:
        nodes = cluster.nodes
    if nodes == 1:
        return f"torchrun --nproc_per_node {world}"
    if world % nodes:
        return f"torchrun --nproc_per_node, the same on each node: {world} is no multiple of {nodes} nodes"
    return f"torchrun --nnodes {nodes} --nproc_per_node {world // nodes}, on each node"


def _illegal(plan: Plan, found: Sequence[str], processes: int) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        found[0] + more + (_instead(plan, processes, f"; legal with {processes} processes: ") if processes > 1 else "")
    )


def nearest_layouts(plan: Plan, processes: int) -> list[Layout]:
    """The legal layouts of so many processes, those first whose degrees are nearest to the plan's."""
    found = []
    for degrees in _products(processes, len(AXES)):
        layout = _adapted(plan, dict(zip(AXES, degrees, strict=True)))
        if not replace(plan, layout=layout).violations():
            found.append(layout)
    return sorted(found, key=lambda layout: _distance(plan.layout, layout))


def _instead(plan: Plan, processes: int, lead: str) -> str:
    """`LEAD layout.dp_shard=2, or layout.tp=2 layout.dp_shard=1`; or the numbers of processes that would do."""
    layouts = nearest_layouts(plan, processes)[:PROPOSED]
    if layouts:
        return lead + ", or ".join(differences(plan.layout, layout) for layout in layouts)
    numbers = [
        next(
            (n for n in range(processes + way, processes + way * FARTHEST, way) if n > 0 and nearest_layouts(plan, n)),
            0,
        )
        for way in (-1, 1)
    ]
    legal = " or ".join(str(number) for number in numbers if number)
    started = many(processes, "process", "processes")
    return f"; no layout of {started} is legal for this plan, one of {legal} is" if legal else ""


def differences(old: Layout, new: Layout) -> str:
    """What makes one layout the other, as `key=value` words for the command line."""
    changed = [field.name for field in fields(Layout) if getattr(old, field.name) != getattr(new, field.name)]
    return " ".join(f"layout.{name}={_written(getattr(new, name))}" for name in changed)


def _written(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value).lower()


def _distance(old: Layout, new: Layout) -> tuple[float, int, int]:
    """In doublings of degrees; then few changes, then those that cost least to communicate."""
    apart = sum(abs(math.log2(getattr(new, axis) / getattr(old, axis))) for axis in AXES)
    changed = [field.name for field in fields(Layout) if getattr(old, field.name) != getattr(new, field.name)]
    return round(apart, 6), len(changed), sum(CHANGED_FIRST.index(axis) for axis in changed if axis in AXES)


def _adapted(plan: Plan, degrees: dict[str, int]) -> Layout:
    """With these degrees; what has no meaning with them any more is put back to its default."""
    changes: dict[str, Any] = dict(degrees)
    if degrees["dp_shard"] * degrees["cp"] == 1:
        changes["zero"] = 0
    if degrees["tp"] == 1:
        changes["sp"] = False
    if degrees["pp"] == 1:
        changes |= {"vp": 1, "schedule": "1f1b"}
    if degrees["pp"] != plan.layout.pp:
        changes["stages"] = ()
    if plan.model.moe is not None:
        ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        changes["ep"] = math.gcd(plan.layout.ep, plan.model.moe.experts, ranks)
    return replace(plan.layout, **changes)


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as so many factors, in order."""
    if factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)
