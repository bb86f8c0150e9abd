"""Layouts of a served model on a cluster: engines of so many GPUs each, what they hold, and how fast they answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.planner.serving.cached_layers import ServedModel
from meshwright.planner.serving.closed_loop import Load, Served, serve
from meshwright.planner.serving.deployment import Deployment, EngineDegrees
from meshwright.planner.serving.frameworks import Framework
from meshwright.planner.serving.number_formats import WeightFormats
from meshwright.planner.serving.serving_memory import ServingMemory, serving_memory
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec.cluster import Cluster
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.lora import LoRAShape

SHARED: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
"""GPUs of an engine that are tried."""
SWEPT = tuple(2**power for power in range(11))
"""Requests in flight of the curve of throughput against latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAsked:
    """What is to be served, and where."""

    model: ServedModel
    cluster: Cluster
    formats: WeightFormats
    framework: Framework
    cache_width: float
    input_tokens: int
    output_tokens: int
    concurrency: int
    """Requests in flight on the whole cluster."""
    adapters: int = 0
    """As Deployment, which `adapter` is of, too."""
    adapter: LoRAShape | None = None

    @property
    def length(self) -> int:
        """Of a finished sequence."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """One way to split a cluster into engines, and what comes of it."""

    asked: ServingAsked
    deployment: Deployment
    engines: int
    memory: ServingMemory
    served: Served | None
    """At the asked load; None where not one sequence fits."""

    @property
    def degrees(self) -> EngineDegrees:
        """Of one engine."""
        return self.deployment.degrees

    @property
    def groups(self) -> int:
        """Attention ranks with requests of their own, on the whole cluster."""
        return self.engines * self.degrees.attention_dp

    @property
    def most_requests(self) -> float:
        """In flight on the whole cluster, at the asked length."""
        return self.memory.most_sequences * self.groups

    @property
    def fits(self) -> bool:
        """At least one sequence on each attention rank."""
        return self.served is not None

    @property
    def waits(self) -> bool:
        """Whether some of the asked requests wait for room."""
        return self.asked.concurrency > self.most_requests

    @property
    def tokens_per_s(self) -> float:
        """Of answers, by the whole cluster."""
        busy = min(self.groups, self.asked.concurrency)
        return self.served.output_tokens_per_s * busy if self.served else 0.0

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The same per GPU in use."""
        return self.tokens_per_s / (self.engines * self.degrees.gpus)

    @property
    def words(self) -> str:
        """`tp=8`, with experts and attention where they differ."""
        degrees = self.degrees
        words = [f"tp={degrees.tp}"]
        if degrees.attention_dp > 1:
            words.append(f"attention_dp={degrees.attention_dp}")
        if degrees.expert_ep > 1:
            words.append(f"ep={degrees.expert_ep}")
        return " ".join(words)


Timed = Callable[[Deployment], StepTimes]


def layouts(asked: ServingAsked, timed: Timed = StepTimes, tp: int = 0) -> list[ServingLayout]:
    """Those that fit, most tokens per second first; then those that do not, the smallest first. `tp`: that one
    alone; 0 = all."""
    found = [_planned(asked, one, timed) for one in _deployments(asked, tp)]
    fitting = [one for one in found if one.fits]
    return sorted(fitting, key=_order) + sorted((one for one in found if not one.fits), key=_size)


def _order(one: ServingLayout) -> tuple[float, float]:
    return -one.tokens_per_s, one.served.per_token_s if one.served else 0.0


def _size(one: ServingLayout) -> float:
    return -one.memory.cache_bytes


def _deployments(asked: ServingAsked, tp: int) -> Iterator[Deployment]:
    for degrees in _degrees(asked):
        if tp and degrees.tp != tp:
            continue
        try:
            yield Deployment(
                model=asked.model, device=asked.cluster.device, degrees=degrees, formats=asked.formats,
                framework=asked.framework, cache_width=asked.cache_width, per_node=asked.cluster.devices_per_node,
                adapters=asked.adapters, adapter=asked.adapter,
            )  # fmt: skip
        except IllegalLayout:
            continue


def _degrees(asked: ServingAsked) -> Iterator[EngineDegrees]:
    """Engines of a node or less share heads; with experts also by expert parallelism, with attention split or whole."""
    for gpus in SHARED:
        if gpus > asked.cluster.devices_per_node:
            return
        if asked.model.shape.moe is None:
            yield EngineDegrees(tp=gpus)
            continue
        yield EngineDegrees(tp=gpus, expert_tp=gpus)
        if gpus > 1:
            yield EngineDegrees(tp=gpus, expert_ep=gpus)
            yield EngineDegrees(attention_dp=gpus, expert_ep=gpus)


def _planned(asked: ServingAsked, of: Deployment, timed: Timed) -> ServingLayout:
    engines = asked.cluster.devices // of.degrees.gpus
    memory = serving_memory(of, asked.length)
    groups = engines * of.degrees.attention_dp
    served = None
    if memory.most_sequences >= 1:
        served = played(asked, timed(of), memory, asked.concurrency / groups)
    return ServingLayout(asked=asked, deployment=of, engines=engines, memory=memory, served=served)


def played(asked: ServingAsked, times: StepTimes, memory: ServingMemory, concurrency: float) -> Served:
    """One attention rank under its share of a load."""
    load = Load(
        input_tokens=asked.input_tokens, output_tokens=asked.output_tokens, concurrency=max(1.0, concurrency),
        spread=0.2,
    )  # fmt: skip
    return serve(times, load, memory.most_sequences * asked.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A layout under another load."""

    concurrency: int
    first_token_s: float
    per_token_s: float
    tokens_per_s: float
    """Of the whole cluster."""


def curve(best: ServingLayout, timed: Timed = StepTimes) -> list[CurvePoint]:
    """Throughput against latency: from one request of each attention rank to as many as fit, in powers of two."""
    times, found = timed(best.deployment), []
    for each in SWEPT:
        if each > best.memory.most_sequences:
            break
        served = played(best.asked, times, best.memory, each)
        found.append(
            CurvePoint(
                concurrency=each * best.groups,
                first_token_s=served.first_token_s,
                per_token_s=served.per_token_s,
                tokens_per_s=served.output_tokens_per_s * best.groups,
            )
        )
    return found


def smallest_format(asked: ServingAsked, others: list[tuple[str, WeightFormats]]) -> str:
    """The first of other formats, named, with which some layout fits; empty where none does."""
    for name, formats in others:
        if any(_fits(replace(asked, formats=formats))):
            return name
    return ""


def _fits(asked: ServingAsked) -> Iterator[bool]:
    for of in _deployments(asked, 0):
        yield serving_memory(of, asked.length).most_sequences >= 1
