"""Layouts and numbers of processes: the nearest of either when the given two do not match."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.legal import divisors
from meshwright.spec.units import many

PROPOSED = 2
CHANGED_FIRST = ("dp_shard", "dp_replicate", "pp", "cp", "tp")
FARTHEST = 64
"""Largest distance, up and down, at which other numbers of processes are tried."""


def world_violation(plan: Plan, processes: int, nodes: int = 1) -> str | None:
    """Return why a plan cannot run on these processes and nodes, with the nearest layouts and numbers that can.

    None = it can.
    """
    layout, violations = plan.layout, plan.violations()
    if layout.world == processes:
        return _report_violation(plan, violations, processes) if violations else None
    factors = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    ranks = many(layout.world, "rank")
    apart = f"the layout has {factors} = {ranks} and {processes} {'was' if processes == 1 else 'were'} started"
    if not violations:
        start = f"start {many(layout.world, 'process', 'processes')} ({_torchrun(plan, nodes)})"
        return f"{apart}: {start}{_suggest_alternative(plan, processes, ', or take ')}"
    # So many processes would not help: the next refusal would be that of the plan.
    instead = _suggest_alternative(plan, processes, ": take ")
    return apart + instead if instead else _report_violation(plan, violations, processes)


def _torchrun(plan: Plan, nodes: int) -> str:
    """Return the torchrun command that starts one process per rank of the layout. It takes the count of one node."""
    world, cluster = plan.layout.world, plan.cluster
    if cluster.devices == world:  # the plan itself says how many nodes its ranks take
        nodes = cluster.nodes
    if nodes == 1:
        return f"torchrun --nproc_per_node {world}"
    if world % nodes:
        return f"torchrun --nproc_per_node, the same on each node: {world} is no multiple of {nodes} nodes"
    return f"torchrun --nnodes {nodes} --nproc_per_node {world // nodes}, on each node"


def _report_violation(plan: Plan, violations: Sequence[str], processes: int) -> str:
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    alternative = (
        _suggest_alternative(plan, processes, f"; legal with {processes} processes: ") if processes > 1 else ""
    )
    return violations[0] + more + alternative


def nearest_layouts(plan: Plan, processes: int) -> list[Layout]:
    """Return the legal layouts for this number of processes, nearest to the plan's degrees first."""
    layouts = []
    for degrees in _products(processes, len(AXES)):
        layout = _adapt_layout(plan, dict(zip(AXES, degrees, strict=True)))
        if not replace(plan, layout=layout).violations():
            layouts.append(layout)
    return sorted(layouts, key=lambda layout: _distance(plan.layout, layout))


def _suggest_alternative(plan: Plan, processes: int, lead: str) -> str:
    """Return `lead` and the nearest legal layouts for this number of processes, such as `layout.dp_shard=2`.

    If none is legal, return a clause that names nearby numbers of processes that work, or an empty string.
    """
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
    """Return the changes from one layout to another, as `key=value` words of the command line."""

    def write(setting: object) -> str:
        return str(list(setting)) if isinstance(setting, tuple) else str(setting).lower()

    return " ".join(f"layout.{name}={write(getattr(new, name))}" for name in _changed_fields(old, new))


def _changed_fields(old: Layout, new: Layout) -> list[str]:
    return [field.name for field in fields(Layout) if getattr(old, field.name) != getattr(new, field.name)]


def _distance(old: Layout, new: Layout) -> tuple[float, int, int]:
    """Return (doublings of degrees, number of changes, cost of communication), to sort by."""
    apart = sum(abs(math.log2(getattr(new, axis) / getattr(old, axis))) for axis in AXES)
    changed = _changed_fields(old, new)
    return round(apart, 6), len(changed), sum(CHANGED_FIRST.index(axis) for axis in changed if axis in AXES)


def _adapt_layout(plan: Plan, degrees: dict[str, int]) -> Layout:
    """Return the layout with these degrees. Settings without meaning under them get their default."""
    changes: dict[str, Any] = dict(degrees)
    # ZeRO, sp and virtual stages are refused without ranks to share with.
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
    """Yield all ways to write a number as an ordered product of `factors` factors."""
    if factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)
