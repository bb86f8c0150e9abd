"""What a plan would cost: memory, traffic and time, and the figures that follow from them."""

from dataclasses import dataclass, replace

from meshwright.planner.cost.stack import Stack
from meshwright.planner.memory.rank_memory import DRIVER_BYTES, RankMemory
from meshwright.planner.step.execution import Executions
from meshwright.planner.time.collectives import SentCalls, traffic
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.flop import token_flop
from meshwright.spec.plan import Plan


def usable_bytes(plan: Plan) -> float:
    """What a program can have of a device; unknown = without limit."""
    memory = plan.cluster.device.memory_bytes
    return max(0.0, memory - DRIVER_BYTES) if memory else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan would cost. Seconds of a step, bytes at the peak of each pipeline rank."""

    plan: Plan
    stack: Stack
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Of each pipeline rank."""
    peak_flop_per_s: float
    """Of a device, the datasheet's."""
    document_tokens: float = 0.0
    """Of the document that a token is in, on average; 0 = nobody said, and one was taken to fill its row."""
    executions: Executions | None = None
    """On a GPU, how this package's engine runs it, and how else it could; time and memory are of the first."""

    @property
    def settled(self) -> Plan:
        """The plan as a GPU runs it, with `on` or `off` for auto; plainly, where its device is not described."""
        if self.executions is not None:
            return replace(self.plan, layout=self.executions.best.layout)
        return replace(self.plan, layout=self.plan.layout.plain)

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.memory, key=lambda one: one.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """Its peak."""
        return self.worst.total_bytes

    @property
    def host_bytes(self) -> float:
        """In host memory, of the rank that has most there."""
        return max(one.host_bytes for one in self.memory)

    @property
    def node_bytes(self) -> float:
        """Of the ranks of a node in host memory, at the most: each as much as that one."""
        return self.host_bytes * min(self.plan.layout.world, self.plan.cluster.devices_per_node)

    @property
    def reported_bytes(self) -> float:
        """The peak as the software itself would report it: some print that of their first rank, and none more than a
        device has."""
        one = self.memory[0] if self.stack.reports == "first" else self.worst
        return min(one.total_bytes, usable_bytes(self.plan))

    @property
    def fits(self) -> bool:
        """Whether every rank's device has room, what the allocator holds for later left aside."""
        later = self.worst.kinds["reserve"] - self.stack.reserve_bytes
        return self.peak_bytes - later <= usable_bytes(self.plan)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.total_s

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.plan.recipe.global_batch * self.plan.recipe.sequence

    @property
    def tokens_per_s_per_device(self) -> float:
        """The figure to compare with others."""
        return self.tokens_per_step / self.step_s / self.plan.layout.world

    def mfu(self, *, causal: bool) -> float:
        """Model FLOP utilization of the datasheet's peak."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal).training
        return flop * self.tokens_per_s_per_device / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """As mfu (causal), with what recomputation repeats."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=True)
        layout = self.plan.layout
        again = layout.acting_recompute if self.stack.drops_scores_alone else layout.recompute
        return flop.hardware(again, self.plan.recomputed_share) * self.tokens_per_s_per_device / self.peak_flop_per_s

    def traffic(self, pp_rank: int = 0) -> tuple[SentCalls, ...]:
        """What a rank of a pipeline rank sends in a step, by axis and collective."""
        return traffic(self.plan, pp_rank, self.stack)

    @property
    def bubble_fraction(self) -> float:
        """(pipeline - work of the busiest rank) / that work."""
        busy = self.time.compute_s + self.time.exchange_s + self.time.offload_s
        return self.time.bubble_s / busy if busy else 0.0
