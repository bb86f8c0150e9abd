"""What an estimator has counted already; layouts share most of it."""

from dataclasses import dataclass, field

from meshwright.planner.local import Local
from meshwright.planner.peaks import Standing
from meshwright.planner.stages import Cost, Costs, Policies
from meshwright.planner.states import Counts
from meshwright.planner.timeline import Edges
from meshwright.planner.traffic import Sharing


@dataclass(slots=True)
class Known:
    """By what each depends on: degrees, micro-batch, recomputation, kind of rank."""

    parts: dict[tuple[object, ...], tuple[Local, dict[str, Costs]]] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], Policies] = field(default_factory=dict)
    counts: dict[tuple[object, ...], Counts] = field(default_factory=dict)
    sums: dict[tuple[object, ...], Sharing] = field(default_factory=dict)
    shares: dict[tuple[int, int], Edges] = field(default_factory=dict)
    stages: dict[tuple[object, ...], list[Cost]] = field(default_factory=dict)
    standing: dict[tuple[object, ...], tuple[Standing, ...]] = field(default_factory=dict)
    kinds: dict[tuple[object, ...], list[tuple[int, int, bool, bool]]] = field(default_factory=dict)
    played: dict[tuple[object, ...], float] = field(default_factory=dict)
    splits: dict[tuple[object, ...], list[range]] = field(default_factory=dict)
