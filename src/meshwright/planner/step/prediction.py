"""Predicted memory, traffic and time of a plan, with error ranges; what a plan leaves open on a GPU; prices of tokens.

Passes of a step run on a GPU kernel by kernel, by compiled blocks, or as a CUDA graph of either. The rule here is that
of layout.compile=auto and layout.cuda_graphs=auto. Among the choices that a plan leaves open, those likely to fit are
compared by their step time plus their start-up time, spread over the steps of the run. Graphs must gain GRAPHS_GAIN,
since host times were measured on another machine. Without a gain kernels run one by one: the start is quick, and errors
name their operation.

Error ranges hold nine runs of ten. Their quantiles are of measured over predicted on published rows (docs/accuracy.md),
grouped by software, dense or mixture of experts, and nodes. `evaluation/error_table.py` computes them, and
`python -m evaluation.leaderboard --write` writes the file. Software without rows, such as Meshwright's engine, uses the
rows of all others together.

A budget is given with the global batch and the critical one. Beyond the critical batch size, twice the batch no
longer halves the steps (McCandlish et al. 2018, arXiv:1812.06162). Kaplan et al. 2020 (arXiv:2001.08361), eq. 5.3:
B_crit(L) = 2e8 tokens / L^(1 / 0.21) for a loss of L nats per token. The loss that a model reaches: Hoffmann et al.
2022 (arXiv:2203.15556), eq. 10: L = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28. Both are fits on other texts and
tokenizers, so they give an order of magnitude.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any, NamedTuple

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.memory.rank_memory import DRIVER_BYTES, RankMemory
from meshwright.planner.time.collectives import SentCalls, traffic
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.passes import can_be_compiled, explain_auto_off, hindrances, leaves_compiler_out
from meshwright.spec.units import short_gib, step_time
from meshwright.spec.weights.inventory import num_active_parameters, token_flop

COMPILE_S = 40.0
"""Seconds at start-up for each kind of block.

20 to 60 s of Llama-3.2-1B and GPT-2 124M on one H200 (2026-11-27). A later start finds the code on disk, if the disk
still exists.
"""
GRAPHS_GAIN = 0.05
"""Least share of a step that graphs must gain."""

Measure = Callable[[Layout], tuple[StepTime, tuple[RankMemory, ...]]]
"""Layout -> time of its step, and memory of each pipeline rank."""
TOKENS_PER_PARAMETER = 20.0
"""Default budget (Hoffmann et al. 2022)."""
SECONDS_PER_DAY = 86_400.0
QUANTILES_FILE = "data/error_quantiles.json"
"""Path relative to this module."""
RANGE_LEVEL = 0.9
"""Share of the runs that a range is meant to hold."""
LIKELY = 0.95
"""Probability of fitting, among measured runs, that a recommended layout has."""
POOLED_GROUP = "any"
"""Group for software without rows."""
FEW_NODES = 8
"""Most nodes of the group between one node and many."""
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One way to run the passes of a layout."""

    layout: Layout
    """Layout with `on` or `off` for compile and cuda_graphs."""
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    start_s: float = 0.0
    """Seconds before the first step."""

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest rank."""
        return max(rank.total_bytes for rank in self.memory)

    @property
    def captured(self) -> bool:
        """True if passes are CUDA graphs."""
        return self.layout.cuda_graphs == "on"

    @property
    def plain(self) -> bool:
        """True if the host launches each kernel and nothing is compiled."""
        return not self.captured and self.layout.compile != "on"

    @property
    def name(self) -> str:
        """Name for people."""
        blocks = "compiled" if self.layout.compile == "on" else "uncompiled"
        return f"{blocks} in CUDA graphs" if self.captured else blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Executions:
    """Executions that a plan's layout leaves open."""

    best: Execution
    others: tuple[Execution, ...] = ()
    room_bytes: float = float("inf")
    """Usable memory of a device."""
    likely_bytes: float = float("inf")
    """Most bytes that are likely to fit (planner/step/prediction.py)."""
    uncompiled: str = ""
    """Reason why compile=auto does not compile, whatever the gain."""
    uncaptured: str = ""
    """Property of graphs that clashes with the plan, so that cuda_graphs=auto is off."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"compile": self.best.layout.compile, "cuda_graphs": self.best.layout.cuda_graphs, "why": list(self.why)}

    @property
    def why(self) -> tuple[str, ...]:
        """Sentences that say what runs, and what each alternative would take."""
        sentences = [f"Blocks run {self._words(self.best)}."]
        sentences += [f"As {self._words(way)}." for way in self.others]
        sentences += [f"No blocks are compiled: {self.uncompiled}."] if self.uncompiled else []
        sentences += [f"No CUDA graphs: a graph {self.uncaptured}."] if self.uncaptured else []
        return tuple(sentences)

    def _words(self, way: Execution) -> str:
        start = f", and about {way.start_s:.0f} s at the start" if way.start_s else ""
        over = way.peak_bytes > self.likely_bytes
        memory = f", with {short_gib(way.peak_bytes)} of {short_gib(self.room_bytes)}" if over else ""
        return f"{way.name}: {step_time(way.time.total_s)} per step{start}{memory}"


def executions(plan: Plan, measure: Measure, room_bytes: float, share: float, run_steps: int = 0) -> Executions:
    """Return the executions that a plan for a GPU leaves open, and the best of them.

    Args:
        room_bytes: Usable memory of a device. Up to `share` of it is likely to fit.
        run_steps: Steps of the whole run. 0 = as the recipe says. If it counts epochs, start-up time is ignored.
    """
    run_steps = run_steps or (0 if plan.recipe.epochs else plan.recipe.steps)
    uncompiled = uncompiled_because(plan)
    ways = list(_ways(plan, measure, compiles=not uncompiled))
    # The best is sought among what likely fits, else what just fits, else what needs least.
    limits = share * room_bytes, room_bytes, min(way.peak_bytes for way in ways)
    fitting = next(fit for limit in limits if (fit := [way for way in ways if way.peak_bytes <= limit]))
    best, *later = fitting
    # Start-up is paid once, and graphs must gain more than GRAPHS_GAIN to be worth it.
    for way in later:
        lost_s = (way.start_s - best.start_s) / run_steps if run_steps else 0.0
        lost_s += GRAPHS_GAIN * best.time.total_s if way.captured and not best.captured else 0.0
        if way.time.total_s + lost_s < best.time.total_s:
            best = way
    uncaptured = ""
    if plan.layout.cuda_graphs == "auto" and not best.captured:
        uncaptured = next(explain_auto_off(plan.model, plan.recipe, best.layout), "")
    return Executions(
        best=best, others=tuple(way for way in ways if way is not best), room_bytes=room_bytes,
        likely_bytes=share * room_bytes, uncompiled=uncompiled, uncaptured=uncaptured,
    )  # fmt: skip


def uncompiled_because(plan: Plan) -> str:
    """Return why compile=auto compiles nothing. Empty if it may compile."""
    if plan.layout.compile != "auto":
        return ""
    if not can_be_compiled(plan.model, plan.recipe.fake_quantize):
        return "matrices are restored or rounded in each product"
    if not plan.cluster.device.runs_triton:
        return f"{plan.cluster.device.name} is not known to run Triton"
    return "recipe.deterministic has it try no kernels" if leaves_compiler_out(plan.recipe) else ""


def _ways(plan: Plan, measure: Measure, *, compiles: bool) -> Iterator[Execution]:
    """Yield each execution with its time and memory, the plainest first."""
    asked = plan.layout
    choices = {"auto": ("off", "on") if compiles else ("off",)}
    for graphs in ("off", "on") if asked.cuda_graphs == "auto" else (asked.cuda_graphs,):
        for compiled in choices.get(asked.compile, (asked.compile,)):
            layout = replace(asked, compile=compiled, cuda_graphs=graphs)  # type: ignore[arg-type]  # two of its words
            if graphs == "on" and _is_left_out(plan, layout):
                continue
            time, memory = measure(layout)
            start_s = COMPILE_S * _compiled_kinds(plan) if compiled == "on" else 0.0
            yield Execution(layout=layout, time=time, memory=memory, start_s=start_s)


def _is_left_out(plan: Plan, layout: Layout) -> bool:
    """Return True if a layout with graphs is not considered.

    Explicit graphs are tried with compiled blocks and without, and one of both is legal.
    """
    if plan.layout.cuda_graphs == "auto":
        return any(explain_auto_off(plan.model, plan.recipe, layout))
    return plan.layout.compile == "auto" and layout.compile == "on" and any(hindrances(plan.model, plan.recipe, layout))


def _compiled_kinds(plan: Plan) -> int:
    """Return the number of kinds of blocks to compile: dense and routed, with and without recomputation."""
    routed = plan.model.routed_layers
    return (2 if 0 < routed < plan.model.layers else 1) * (2 if 0 < plan.recomputed_share < 1 else 1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """Critical batch at the end of training."""

    loss_nats: float
    batch_tokens: float


def expected_loss(parameters: float, tokens: float) -> float:
    """Return nats per token after training on this number of tokens (Hoffmann et al. 2022)."""
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28)


def critical(shape: ModelShape, tokens: float = 0.0) -> Critical:
    """Return the critical batch at the end of training on `tokens`, by default 20 per parameter.

    Of a mixture of experts the active parameters count.
    """
    parameters = num_active_parameters(shape)
    loss = expected_loss(parameters, tokens or TOKENS_PER_PARAMETER * parameters)
    return Critical(loss_nats=loss, batch_tokens=2e8 / loss ** (1 / 0.21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Steps, time and money for a number of tokens."""

    steps: int
    days: float
    device_hours: float
    price: float
    """Price in the currency of a device hour. 0 = no price known."""


def budget(tokens: float, tokens_per_step: int, step_s: float, devices: int, price_per_hour: float = 0.0) -> Budget:
    """Return steps, days, device hours and money, without checkpoints, evaluation and failures."""
    steps = -(-int(tokens) // tokens_per_step)
    seconds = steps * step_s
    hours = seconds / 3600 * devices
    return Budget(steps=steps, days=seconds / SECONDS_PER_DAY, device_hours=hours, price=hours * price_per_hour)


class Range(NamedTuple):
    """Measured over predicted: factors of a prediction between which nine runs of ten lie."""

    low: float
    high: float
    pooled: bool
    """None of the rows behind it is of this software."""

    def scale(self, value: float) -> tuple[float, float]:
        """Return the range (low, high) of a figure proportional to the prediction."""
        return value * self.low, value * self.high

    def scale_inverse(self, value: float) -> tuple[float, float]:
        """Return the range (low, high) of a figure inversely proportional to the prediction, such as a rate."""
        return value / self.high, value / self.low


class Ranges(NamedTuple):
    """(low, high) of each figure of a prediction, and the probability that it fits."""

    step_seconds: Pair
    tokens_per_second_per_device: Pair
    mfu_causal: Pair
    mfu_full: Pair
    peak_bytes: Pair
    fit_probability: float
    pooled: bool
    """The rows are of other software."""

    def document(self) -> dict[str, Any]:
        """Return the entry in the document of `plan`."""
        pairs = {name: list(pair) for name, pair in zip(self._fields[:5], self[:5], strict=True)}
        pairs["peak_bytes"] = [round(size) for size in self.peak_bytes]
        return {"level": RANGE_LEVEL, "rows_of": "other software" if self.pooled else "this software", **pairs}


def ranges(prediction: Prediction) -> Ranges:
    """Return the ranges of a prediction."""
    time, memory = relative_range(prediction.plan, prediction.stack), memory_range(prediction.plan, prediction.stack)
    return Ranges(
        step_seconds=time.scale(prediction.step_s),
        tokens_per_second_per_device=time.scale_inverse(prediction.tokens_per_s_per_device),
        mfu_causal=time.scale_inverse(prediction.mfu(causal=True)),
        mfu_full=time.scale_inverse(prediction.mfu(causal=False)),
        peak_bytes=memory.scale(prediction.peak_bytes),
        fit_probability=fit_probability(prediction),
        pooled=time.pooled or memory.pooled,
    )


def row_groups(stack: str, *, routed: bool, nodes: int) -> tuple[str, ...]:
    """Return the groups of rows that a run belongs to, narrowest first."""
    kind = "experts" if routed else "dense"
    size = "one node" if nodes == 1 else f"to {FEW_NODES} nodes" if nodes <= FEW_NODES else "more nodes"
    narrow = () if stack == POOLED_GROUP else (f"{stack}, {kind}, {size}", f"{stack}, {kind}")
    return *narrow, f"{POOLED_GROUP}, {kind}, {size}", f"{POOLED_GROUP}, {kind}", POOLED_GROUP


def relative_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """Return the range of the step time of a plan under `stack`, and of everything proportional to it."""
    return _range("time", plan, stack)


def memory_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """Return the range of the peak memory."""
    return _range("memory", plan, stack)


def fit_probability(prediction: Prediction) -> float:
    """Return the probability that the fullest rank fits into the usable memory of its device."""
    room = usable_bytes(prediction.plan)
    if room == float("inf"):
        return 1.0
    if room <= 0:
        return 0.0
    _, quantiles = _quantiles("memory", prediction.plan, prediction.stack)
    return share_below(quantiles, log(room / prediction.peak_bytes))


def likely_share(stack: Stack, *, routed: bool, nodes: int, probability: float = LIKELY) -> float:
    """Return the largest predicted peak that fits with this probability, as a share of the usable memory."""
    groups = _table()["memory"]
    quantiles = groups[next(name for name in row_groups(stack.name, routed=routed, nodes=nodes) if name in groups)]
    last = len(quantiles) - 1
    position = min(probability * last, last - 1e-9)
    low, high = quantiles[int(position)], quantiles[int(position) + 1]
    return min(exp(-low - (high - low) * (position - int(position))), 1.0)


def share_below(quantiles: tuple[float, ...], error: float) -> float:
    """Return the share of a distribution below `error`, given its quantiles evenly spaced from 0 to 1.

    It is linear between them. The outermost are the worst that were seen, so the share stays half a step short of 0 and
    1.
    """
    last, index = len(quantiles) - 1, bisect_right(quantiles, error)
    if index == 0 or index > last:
        return 0.5 / last if index == 0 else 1 - 0.5 / last
    low, high = quantiles[index - 1], quantiles[index]
    share = (index - 1 + ((error - low) / (high - low) if high > low else 0.0)) / last
    return min(max(share, 0.5 / last), 1 - 0.5 / last)


def _range(what: str, plan: Plan, stack: Stack) -> Range:
    group, quantiles = _quantiles(what, plan, stack)
    steps = len(quantiles) - 1
    edge = round((1 - RANGE_LEVEL) / 2 * steps)
    return Range(exp(quantiles[edge]), exp(quantiles[steps - edge]), group.startswith(POOLED_GROUP))


def _quantiles(what: str, plan: Plan, stack: Stack) -> tuple[str, tuple[float, ...]]:
    known = _table()[what]
    groups = row_groups(stack.name, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
    group = next(name for name in groups if name in known)
    return group, known[group]


@cache
def _table() -> dict[str, dict[str, tuple[float, ...]]]:
    document = json.loads(files(__package__).joinpath(QUANTILES_FILE).read_text(encoding="utf-8"))
    return {
        what: {group: tuple(row["quantiles"]) for group, row in document[what].items()} for what in ("time", "memory")
    }
