"""Predicted memory, traffic and time of a plan, and the figures that follow from them."""

from dataclasses import dataclass, replace

from meshwright.planner.cost.stack import Stack
from meshwright.planner.memory.rank_memory import DRIVER_BYTES, RankMemory
from meshwright.planner.step.execution import Executions
from meshwright.planner.time.collectives import SentCalls, traffic
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.plan.plan import Plan
from meshwright.spec.weights.inventory import token_flop


def usable_bytes(plan: Plan) -> float:
    """Return the memory that a program can use on a device. Without a known size it is unlimited."""
    memory = plan.cluster.device.memory_bytes
    return max(0.0, memory - DRIVER_BYTES) if memory else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted cost of a plan: seconds of a step, bytes at the peak of each pipeline rank."""

    plan: Plan
    stack: Stack
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    peak_flop_per_s: float
    """Peak of a device by its data sheet."""
    document_tokens: float = 0.0
    """Mean length of the document of a token. 0 = unknown, and documents are assumed to fill their rows."""
    executions: Executions | None = None
    """Chosen and alternative executions on a GPU by Meshwright's engine. Time and memory are of the chosen one."""

    @property
    def settled(self) -> Plan:
        """The plan with `on` or `off` for auto, as a GPU runs it. Kernel by kernel if the device is not described."""
        if self.executions is not None:
            return replace(self.plan, layout=self.executions.best.layout)
        return replace(self.plan, layout=self.plan.layout.plain)

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.memory, key=lambda rank: rank.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest pipeline rank."""
        return self.worst.total_bytes

    @property
    def host_bytes(self) -> float:
        """Host memory of the rank that uses most."""
        return max(rank.host_bytes for rank in self.memory)

    @property
    def node_bytes(self) -> float:
        """Upper bound of a node's host memory: each rank uses as much as that one."""
        return self.host_bytes * min(self.plan.layout.world, self.plan.cluster.devices_per_node)

    @property
    def reported_bytes(self) -> float:
        """Peak as the software itself would report it.

        Some print that of their first rank, and none reports more than a device has.
        """
        reported = self.memory[0] if self.stack.reports == "first" else self.worst
        return min(reported.total_bytes, usable_bytes(self.plan))

    @property
    def fits(self) -> bool:
        """True if every rank's device has room, apart from what the allocator reserves for later."""
        later = self.worst.kinds["reserve"] - self.stack.reserve_bytes
        return self.peak_bytes - later <= usable_bytes(self.plan)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.total_s

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.plan.recipe.global_batch * self.plan.recipe.sequence

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput, the figure to compare with others."""
        return self.tokens_per_step / self.step_s / self.plan.layout.world

    def mfu(self, *, causal: bool) -> float:
        """Return the model FLOP utilization of the data sheet's peak."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal).training
        return flop * self.tokens_per_s_per_device / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: as mfu (causal), with recomputed FLOP."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=True)
        layout = self.plan.layout
        again = layout.acting_recompute if self.stack.drops_scores_alone else layout.recompute
        return flop.hardware(again, self.plan.recomputed_share) * self.tokens_per_s_per_device / self.peak_flop_per_s

    def traffic(self, pp_rank: int = 0) -> tuple[SentCalls, ...]:
        """Return what a rank of a pipeline rank sends in a step, by axis and collective."""
        return traffic(self.plan, pp_rank, self.stack)

    @property
    def bubble_fraction(self) -> float:
        """(pipeline - work of the busiest rank) / that work."""
        busy = self.time.compute_s + self.time.exchange_s + self.time.offload_s
        return self.time.bubble_s / busy if busy else 0.0
