"""Cache of an estimator. Layouts share most of what it counts.

A key contains everything that its entry depends on. A test changes each field of a layout and compares entries of equal
keys.
"""

from dataclasses import dataclass, field

from meshwright.planner.cost.local_shape import LocalShape
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.stage_costs import CostsByPolicy, FirstHalves, Policies, StageKind
from meshwright.planner.cost.states import ElementCounts
from meshwright.planner.memory.engine_peak import MomentBytes
from meshwright.planner.memory.gather_units import GatherUnits
from meshwright.planner.time.collectives import Sharing, StageContents
from meshwright.planner.time.timeline import Edges


@dataclass(slots=True)
class Memo:
    """Results by what they depend on: degrees, micro-batch, recomputation, kind of rank."""

    stacks: dict[tuple[object, ...], Stack] = field(default_factory=dict)
    parts: dict[tuple[object, ...], tuple[LocalShape, CostsByPolicy]] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], Policies] = field(default_factory=dict)
    halves: FirstHalves = field(default_factory=FirstHalves)
    counts: dict[tuple[object, ...], ElementCounts] = field(default_factory=dict)
    units: dict[tuple[object, ...], GatherUnits] = field(default_factory=dict)
    contents: dict[tuple[object, ...], tuple[StageContents, tuple[tuple[str, int], ...]]] = field(default_factory=dict)
    """Layers of a pipeline rank, and how many of them are of each kind."""
    sums: dict[tuple[object, ...], Sharing] = field(default_factory=dict)
    shares: dict[tuple[object, ...], Edges] = field(default_factory=dict)
    stages: dict[tuple[object, ...], list[MicroBatchCost]] = field(default_factory=dict)
    moments: dict[tuple[object, ...], tuple[MomentBytes, ...]] = field(default_factory=dict)
    kinds: dict[tuple[object, ...], list[tuple[int, int, bool, bool, tuple[int, ...]]]] = field(default_factory=dict)
    played: dict[tuple[object, ...], float] = field(default_factory=dict)
    splits: dict[tuple[object, ...], list[range]] = field(default_factory=dict)
    stage_kinds: dict[tuple[object, ...], tuple[list[tuple[StageKind, ...]], list[int]]] = field(default_factory=dict)
    least: dict[tuple[object, ...], float] = field(default_factory=dict)
    busy: tuple[tuple[object, ...], tuple[float, ...]] = ((), ())
    """Seconds per rank of the most recent layout."""
