"""Layouts of a served model on a cluster: GPUs of each engine, memory, and speed of the answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.planner.serving.cached_layers import ServedModel
from meshwright.planner.serving.closed_loop import Load, Served, serve
from meshwright.planner.serving.deployment import Deployment, EngineDegrees, Framework, WeightFormats
from meshwright.planner.serving.serving_memory import ServingMemory, serving_memory
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.model.shape import LoRAShape

SHARED: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
"""GPUs of an engine that are tried."""
SWEPT = tuple(2**power for power in range(11))
"""Requests in flight of the curve of throughput against latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """The model to serve, where, and under which load."""

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
    """Number of adapters on top of the model, each of shape `adapter`, as in Deployment."""
    adapter: LoRAShape | None = None

    @property
    def length(self) -> int:
        """Tokens of a finished sequence."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """One way to split a cluster into engines, and its predicted outcome."""

    request: ServingRequest
    deployment: Deployment
    engines: int
    memory: ServingMemory
    served: Served | None
    """Outcome at the requested load. None = not one sequence fits."""

    @property
    def degrees(self) -> EngineDegrees:
        """Degrees of one engine."""
        return self.deployment.degrees

    @property
    def groups(self) -> int:
        """Attention ranks with their own requests, on the whole cluster."""
        return self.engines * self.degrees.attention_dp

    @property
    def most_requests(self) -> float:
        """Most requests in flight on the whole cluster, at the requested length."""
        return self.memory.most_sequences * self.groups

    @property
    def fits(self) -> bool:
        """True if at least one sequence fits on each attention rank."""
        return self.served is not None

    @property
    def waits(self) -> bool:
        """True if some of the requests wait for room."""
        return self.request.concurrency > self.most_requests

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second, by the whole cluster."""
        busy = min(self.groups, self.request.concurrency)
        return self.served.output_tokens_per_s * busy if self.served else 0.0

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens of answers per second and GPU in use."""
        return self.tokens_per_s / (self.engines * self.degrees.gpus)

    @property
    def words(self) -> str:
        """`tp=8`, with experts and attention if they differ."""
        degrees = self.degrees
        words = [f"tp={degrees.tp}"]
        if degrees.attention_dp > 1:
            words.append(f"attention_dp={degrees.attention_dp}")
        if degrees.expert_ep > 1:
            words.append(f"ep={degrees.expert_ep}")
        return " ".join(words)


Timed = Callable[[Deployment], StepTimes]


def layouts(request: ServingRequest, timed: Timed = StepTimes, tp: int = 0) -> list[ServingLayout]:
    """Return the layouts that fit, the fastest first, then the others, the smallest first. `tp`: 0 = all."""
    planned = [_planned(request, deployment, timed) for deployment in _deployments(request, tp)]
    fitting = [layout for layout in planned if layout.fits]
    too_large = [layout for layout in planned if not layout.fits]
    return sorted(fitting, key=_order) + sorted(too_large, key=lambda layout: -layout.memory.cache_bytes)


def _order(layout: ServingLayout) -> tuple[float, float]:
    return -layout.tokens_per_s, layout.served.per_token_s if layout.served else 0.0


def _deployments(request: ServingRequest, tp: int) -> Iterator[Deployment]:
    for degrees in _degrees(request):
        if tp and degrees.tp != tp:
            continue
        try:
            yield Deployment(
                model=request.model, device=request.cluster.device, degrees=degrees, formats=request.formats,
                framework=request.framework, cache_width=request.cache_width, per_node=request.cluster.devices_per_node,
                adapters=request.adapters, adapter=request.adapter,
            )  # fmt: skip
        except IllegalLayout:
            continue


def _degrees(request: ServingRequest) -> Iterator[EngineDegrees]:
    """Yield the parallel degrees of engines that fit in a node.

    These are degrees of tensor parallelism, and with experts also of expert parallelism with split or replicated
    attention.
    """
    for gpus in SHARED:
        if gpus > request.cluster.devices_per_node:
            return
        if request.model.shape.moe is None:
            yield EngineDegrees(tp=gpus)
            continue
        yield EngineDegrees(tp=gpus, expert_tp=gpus)
        if gpus > 1:
            yield EngineDegrees(tp=gpus, expert_ep=gpus)
            yield EngineDegrees(attention_dp=gpus, expert_ep=gpus)


def _planned(request: ServingRequest, deployment: Deployment, timed: Timed) -> ServingLayout:
    engines = request.cluster.devices // deployment.degrees.gpus
    memory = serving_memory(deployment, request.length)
    groups = engines * deployment.degrees.attention_dp
    served = None
    if memory.most_sequences >= 1:
        served = played(request, timed(deployment), memory, request.concurrency / groups)
    return ServingLayout(request=request, deployment=deployment, engines=engines, memory=memory, served=served)


def played(request: ServingRequest, times: StepTimes, memory: ServingMemory, concurrency: float) -> Served:
    """Simulate one attention rank under its share of a load."""
    load = Load(
        input_tokens=request.input_tokens, output_tokens=request.output_tokens, concurrency=max(1.0, concurrency),
        spread=0.2,
    )  # fmt: skip
    return serve(times, load, memory.most_sequences * request.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A layout under another load."""

    concurrency: int
    first_token_s: float
    per_token_s: float
    tokens_per_s: float
    """Rate of the whole cluster."""


def curve(best: ServingLayout, timed: Timed = StepTimes) -> list[CurvePoint]:
    """Return throughput against latency, from one request of each attention rank to as many as fit."""
    times, points = timed(best.deployment), []
    for each in SWEPT:
        if each > best.memory.most_sequences:
            break
        served = played(best.request, times, best.memory, each)
        points.append(
            CurvePoint(
                concurrency=each * best.groups,
                first_token_s=served.first_token_s,
                per_token_s=served.per_token_s,
                tokens_per_s=served.output_tokens_per_s * best.groups,
            )
        )
    return points


def smallest_format(request: ServingRequest, others: list[tuple[str, WeightFormats]]) -> str:
    """Return the name of the first of other formats with which some layout fits. Empty = none."""
    for name, formats in others:
        deployments = _deployments(replace(request, formats=formats), 0)
        if any(serving_memory(each, request.length).most_sequences >= 1 for each in deployments):
            return name
    return ""
