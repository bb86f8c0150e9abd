"""Counters and histograms for Prometheus, with vLLM's names behind another prefix."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from meshwright.serving.http.channel import EngineFigures

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
PREFIX = "meshwright:"


@final
class CountedHistogram:
    """Histogram that takes many equal observations at once, such as the tokens of one step."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], model: str) -> None:
        self._name, self._help, self._model = name, help, model
        self._buckets, self._counts, self._sum = tuple(buckets), [0] * (len(buckets) + 1), 0.0

    def observe(self, amount: float, times: int) -> None:
        """Count an amount `times` times."""
        self._counts[bisect_left(self._buckets, amount)] += times
        self._sum += amount * times

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, as the registry expects."""
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class ServerMetrics:
    """Metrics of one server, in the HTTP process."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._reasons = Counter(
            f"{PREFIX}request_success", "Answers that ended, by reason", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts whose first new token came")
        self.generation_tokens = self._counter("generation_tokens", "New tokens")
        self._counted = {
            "preemptions": self._counter("num_preemptions", "Sequences that gave their blocks back and wait again"),
            "queries": self._counter("prefix_cache_queries", "Tokens that were looked for in the cache"),
            "hits": self._counter("prefix_cache_hits", "Tokens that were found there"),
            "host_hits": self._counter("host_cache_hits", "Of these, tokens that were found in host memory"),
            "host_saved": self._counter("host_cache_saved_blocks", "Blocks whose content went to host memory"),
            "guessed": self._counter("spec_decode_num_draft_tokens", "Tokens that were guessed"),
            "accepted": self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right"),
        }
        self.refusals = self._counter("requests_refused", "Requests that were answered with an error")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.between = CountedHistogram(
            f"{PREFIX}inter_token_latency_seconds", "Between tokens of an answer", TOKEN_SECONDS, model
        )
        self._registry.register(self.between)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the first step", SECONDS)
        self._gauge("num_requests_running", "Answers that grow", lambda: self._figures.running)
        self._gauge("num_requests_waiting", "Prompts that wait", lambda: self._figures.waiting)
        self._gauge("kv_cache_usage_perc", "Share of blocks that are held", self._block_usage)
        self._gauge("num_adapters", "Adapters that take memory", lambda: self._figures.adapters)
        self._gauge("adapter_bytes", "Their bytes, on the first rank", lambda: self._figures.adapter_bytes)
        self._figures = EngineFigures()
        self._adapter_labels = set[tuple[str, str]]()

    def watch_open(self, count: Callable[[], int]) -> None:
        """Read the number of HTTP requests at each scrape."""
        self._gauge("num_requests_open", "HTTP requests that are being answered", count)

    def count_ended(self, reason: str, adapter: str | None = None) -> None:
        """Count an ended answer of the model, or of one of its adapters."""
        self._reasons.labels(adapter or self._model, reason).inc()
        if adapter is not None:
            self._adapter_labels.add((adapter, reason))

    def count(self, figures: EngineFigures, adapters: Sequence[str]) -> None:
        """Add the figures of the engine. Counters of unloaded adapters go, so they do not fill memory."""
        before, self._figures = self._figures, figures
        if figures[-len(self._counted) :] != before[-len(self._counted) :]:  # counters are the last fields
            for name, counter in self._counted.items():
                counter.inc(getattr(figures, name) - getattr(before, name))
        for gone in [label for label in self._adapter_labels if label[0] not in adapters]:
            self._reasons.remove(*gone)
            self._adapter_labels.remove(gone)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def _block_usage(self) -> float:
        return 1 - self._figures.free_blocks / self._figures.blocks

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, help, ["model_name"], registry=self._registry, buckets=buckets
        ).labels(self._model)  # fmt: skip

    def _gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        Gauge(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model).set_function(read)
