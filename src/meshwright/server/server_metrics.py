"""Counters and histograms for Prometheus, named as vLLM names them, behind another prefix."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshwright.serve.serving_engine import ServingEngine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
PREFIX = "meshwright:"


class ServerMetrics:
    """What one server counts. Its methods are called in the engine's thread, `text` in any."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._reasons = Counter(
            f"{PREFIX}request_success", "Answers that ended, by reason", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts whose first new token came")
        self.generation_tokens = self._counter("generation_tokens", "New tokens")
        preemptions = self._counter("num_preemptions", "Sequences that gave their blocks back and wait again")
        queries = self._counter("prefix_cache_queries", "Tokens that were looked for in the cache")
        hits = self._counter("prefix_cache_hits", "Tokens that were found there")
        hosted = self._counter("host_cache_hits", "Of these, tokens that were found in host memory")
        saved = self._counter("host_cache_saved_blocks", "Blocks whose content went to host memory")
        guessed = self._counter("spec_decode_num_draft_tokens", "Tokens that were guessed")
        right = self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right")
        self.refusals = self._counter("requests_refused", "Requests that were answered with an error")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens of an answer", TOKEN_SECONDS)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the first step", SECONDS)
        self._counted = (preemptions, queries, hits, hosted, saved, guessed, right)
        self._seen = [0] * len(self._counted)
        self._of_adapters = set[tuple[str, str]]()

    def ended(self, reason: str, adapter: str | None = None) -> None:
        """An answer of the model, or of one of its adapters, has ended."""
        self._reasons.labels(adapter or self._model, reason).inc()
        if adapter is not None:
            self._of_adapters.add((adapter, reason))

    def watch(self, engine: ServingEngine, waiting: Callable[[], int]) -> None:
        """Read these figures whenever somebody asks."""
        pool = engine.tables.pool
        self._gauge("num_requests_running", "Answers that grow", lambda: len(engine.scheduler.running))
        self._gauge("num_requests_waiting", "Prompts that wait", waiting)
        self._gauge("kv_cache_usage_perc", "Share of blocks that are held", lambda: 1 - pool.free / pool.size)
        self._gauge("num_adapters", "Adapters that take memory", lambda: engine.adapters.held)
        self._gauge("adapter_bytes", "Their bytes, on the first rank", lambda: engine.adapters.bytes)

    def count(self, engine: ServingEngine) -> None:
        """Add what the engine has counted since the last call. Counters of unloaded adapters are removed, so that
        names that come and go do not fill memory."""
        guesses = engine.guesses
        guessed = (guesses.guessed, guesses.accepted) if guesses else (0, 0)
        tables, host = engine.tables, engine.tables.pool.host
        of_host = (tables.host_hits, host.saved if host else 0)
        now = [engine.scheduler.preemptions, tables.asked, tables.hits, *of_host, *guessed]
        for counter, new, old in zip(self._counted, now, self._seen, strict=True):
            if new > old:
                counter.inc(new - old)
        self._seen = now
        for gone in [one for one in self._of_adapters if one[0] not in engine.adapters.names]:
            self._reasons.remove(*gone)
            self._of_adapters.remove(gone)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, help, ["model_name"], registry=self._registry, buckets=buckets
        ).labels(self._model)  # fmt: skip

    def _gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        Gauge(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model).set_function(read)
