"""A plan for the nodes that are there: `train --elastic MIN:MAX`.

torchrun starts all ranks again when a node is lost or comes back. Every rank reads the same plan and chooses by the
same rules, so ranks need no exchange before they know how many of them train. Batch, recipe and order of rows stay.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.interface.planning.plan_reading import read_plan
from meshwright.interface.process import environment, launch
from meshwright.spec.errors import ArgumentError, IllegalLayout, RunError, argument
from meshwright.spec.plan.plan import Plan, differences, nearest_layouts, world_violation
from meshwright.spec.rules.legal import divisors
from meshwright.spec.units import duration, many

NO_RETURN = "a node that comes back cannot join: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes"
"""Note on torchrun with a shared store (2.11 to 2.13): it tells the address of the store in its first round alone."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """Fewest nodes that may train, and the number that the plan is for."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "NodeRange":
        """Parse `MIN:MAX`, as torchrun's --nnodes. Raises ArgumentError."""
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
        if match is None or int(match[1]) > int(match[2]):
            raise ArgumentError("elastic", text, "must be MIN:MAX nodes, as 3:4, the same as torchrun's --nnodes")
        return cls(int(match[1]), int(match[2]))


def read_elastic_plan(words: Sequence[str], elastic: str, notes: list[str]) -> tuple[Plan, str, range]:
    """Read a plan and fit it to the nodes that are there.

    Returns the plan, resume, and the ranks that only wait. From here on, this process counts the nodes that train.
    """
    nodes, present, started = NodeRange.parse(elastic), environment.nodes(), environment.processes()
    per_node = started // present
    # A degree `auto` is that of all nodes, and then changes with the rest of the layout.
    plan, resume = read_plan(words, {}, processes=nodes.most * per_node, notes=notes)
    if resume != "auto":
        raise ArgumentError("elastic", elastic, f"needs {argument('resume', 'auto')}: nodes change by a restart")
    # A variable that torchrun always sets.
    if "GROUP_WORLD_SIZE" not in os.environ:
        remedy = f"needs torchrun --nnodes {elastic}, which starts all ranks again when a node is lost or comes back"
        raise ArgumentError("elastic", elastic, remedy)
    if nodes.least == nodes.most:
        waits = "waits for a lost node and keeps the layout: take MIN below MAX to go on with fewer nodes"
        notes.append(f"--elastic {elastic} {waits}")
    plan, used, why = fit_to_nodes(plan, nodes, present, per_node)
    if why:
        notes.append(why)
    if launch.has_agent_store():
        notes.append(NO_RETURN)
    environment.use_nodes(used)
    return plan, resume, range(used * per_node, started)


def fit_to_nodes(plan: Plan, nodes: NodeRange, present: int, per_node: int) -> tuple[Plan, int, str]:
    """Return the plan for the nodes that are there, the number of nodes that it uses, and why. Empty = as it was.

    A plan that fits all nodes stays. Otherwise the planner's fastest layout is taken where it knows the device. Where
    it does not, it is the legal one nearest to the plan's, on as many nodes as have one.

    Args:
        plan: The plan for all nodes of the range.
        present: Number of nodes that are there.
        per_node: Processes of each.

    Raises:
        RunError: Too few nodes are there.
        IllegalLayout: No layout on at least the fewest nodes is legal, or fits.
    """
    there = f"{present} of {many(nodes.most, 'node')} {'is' if present == 1 else 'are'} there"
    if present < nodes.least:
        raise RunError(f"{there}, and --elastic {nodes.least}:{nodes.most} needs {nodes.least}: start the others")
    violation = world_violation(plan, present * per_node, present)
    if not violation:
        return plan, present, ""
    known = plan.cluster.device.half_flop_per_s
    chosen = _fastest(plan, nodes, present, per_node) if known else _nearest(plan, nodes, present, per_node)
    if chosen is None:
        what = "legal, and fits," if known else "legal"
        raise IllegalLayout(f"{there}, and no layout of {nodes.least} to {present} of them is {what}: {violation}")
    fitted, used, pace = chosen
    spare = f"; {many(present - used, 'node')} beyond that only wait" if used < present else ""
    batch = f"the global batch of {plan.recipe.global_batch} and the order of the rows stay"
    return fitted, used, f"{there}: {differences(plan.layout, fitted.layout)}{pace}{spare}; {batch}"


def _fastest(plan: Plan, nodes: NodeRange, present: int, per_node: int) -> tuple[Plan, int, str] | None:
    """Return the planner's fastest layout of any number of nodes, its nodes and its pace."""
    from meshwright.planner.rent.sweep import fastest
    from meshwright.planner.step.predict import build_estimator

    below_s, chosen = float("inf"), None
    for used in range(present, nodes.least - 1, -1):
        fewer = replace(plan, cluster=replace(plan.cluster, nodes=used, devices_per_node=per_node))
        prediction, _ = fastest(build_estimator(fewer), fewer, {}, below_s)
        if prediction is not None:
            below_s = prediction.step_s
            chosen = (prediction.plan, used, f", planned {duration(below_s)} a step")
    return chosen


def _nearest(plan: Plan, nodes: NodeRange, present: int, per_node: int) -> tuple[Plan, int, str] | None:
    """Return the legal layout nearest to the plan's, its nodes, and no pace.

    Other data parallelism goes before other degrees, which a user chose for their memory, and then more nodes go first.
    """
    axes, size = ("cp", "tp", "pp"), plan.layout.micro_batch
    # Smaller micro-batches cut the share of more ranks evenly.
    sizes = [size, *reversed(divisors(max(1, size))[:-1])]
    for is_kept in (True, False):
        for used in range(present, nodes.least - 1, -1):
            for smaller in (replace(plan, layout=replace(plan.layout, micro_batch=size)) for size in sizes):
                for layout in nearest_layouts(smaller, used * per_node):
                    if not is_kept or all(getattr(layout, axis) == getattr(plan.layout, axis) for axis in axes):
                        return replace(plan, layout=layout), used, ""
    return None
