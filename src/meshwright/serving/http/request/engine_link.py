"""Engine as the HTTP process sees it: prompts go to its process, and one message comes back after each step.

All methods belong to the event loop. Messages that arrive while the loop is busy are read at once: answers then grow by
several tokens, and each listener is notified once. So a slow loop has less to do per token.

Counters and histograms for Prometheus have vLLM's names behind another prefix.
"""

import asyncio
import itertools
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from time import monotonic
from typing import Literal, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from meshwright.serving.http.channel import (
    AdapterCall,
    AdapterReply,
    AddedPrompt,
    ApiError,
    CancelledAnswers,
    EngineFigures,
    Frame,
    FrameKind,
    FrameReader,
    ModelCard,
    StepNews,
    decode_scores,
    encode_frame,
    internal_error,
)
from meshwright.serving.http.request.engine_task import EngineTask, GrowingAnswer, TaskListener, TokenScores
from meshwright.spec.errors import ArgumentError, RunError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
PREFIX = "meshwright:"
State = Literal["loading", "ready", "failed"]
NUMBERS = 2**32
"""Limit of the numbers of answers in messages. After it they start again."""
FAILED = "the engine has failed: restart the server, and see its log"


@final
class CountedHistogram:
    """Histogram that takes many equal observations at once, such as the tokens of one step."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], model: str) -> None:
        self._name, self._help, self._model = name, help, model
        self._buckets, self._counts, self._sum = tuple(buckets), [0] * (len(buckets) + 1), 0.0

    def observe(self, amount: float, times: int) -> None:
        """Count an amount `times` times."""
        # Prometheus' own histogram would be called once for each token.
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


@final
class EngineLink(asyncio.Protocol):
    """HTTP process's end of the channel."""

    def __init__(self, metrics: ServerMetrics, on_stop: Callable[[], None]) -> None:
        """Wait for a connection. `on_stop` is called when the server is told to end."""
        self.state: State = "loading"
        self.card: ModelCard | None = None
        """Card of the model, once it is open."""
        self.adapters: Sequence[str] = ()
        """Names of the adapters that are loaded now."""
        self.opening_done = asyncio.Event()
        """Set when the model is open, or cannot be opened."""
        self.gone = asyncio.Event()
        """Set when the engine's process is gone."""
        self.defect: Exception | None = None
        """Error of this process that ended reading from the channel."""
        self.figures = EngineFigures()
        self._metrics, self._on_stop = metrics, on_stop
        self._reader, self._transport = FrameReader(), asyncio.Transport()
        self._number, self._calls = 0, itertools.count()
        self._tasks: dict[int, EngineTask] = {}
        self._growing: dict[int, GrowingAnswer] = {}
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._touched: dict[TaskListener, bool] = {}  # True: one of its answers, or a task, has ended
        self._rank_is_gone = False
        self._moved_at = monotonic()

    def _free_numbers(self, count: int) -> int:
        """Return the first of `count` consecutive numbers that no task and no growing answer has."""
        first, taken = self._number, (self._growing, self._tasks)
        # Numbers start again after 2**32 answers, when those of long answers may still be in use.
        while first + count > NUMBERS or any(n in names for names in taken for n in range(first, first + count)):
            first = 0 if first + count > NUMBERS else first + 1
        self._number = first + count
        return first

    # Calls of the routes.

    def submit(self, task: EngineTask) -> None:
        """Submit a task. Its listener is notified of all news."""
        first = self._free_numbers(task.options.n)
        task.open(first, range(first, first + task.options.n))
        if self.state != "ready":
            self._fail(task, RunError(FAILED))
            self._notify_listeners()
            return
        # An idle engine makes no steps, so the time until a step counts from the first task.
        if not self._tasks:
            self._moved_at = monotonic()
        self._tasks[task.number] = task
        self._growing.update({answer.number: answer for answer in task.answers})
        added = AddedPrompt(
            task=task.number, first_answer=first, prompt=task.prompt, options=task.options,
            with_logprobs=task.with_logprobs, scored=task.scored,
        )  # fmt: skip
        self._send(FrameKind.ADD, added.encode())

    def cancel(self, task: EngineTask) -> None:
        """Cancel a task. Its memory is free before the next step."""
        # It has ended, and its number may belong to another task by now.
        if self._tasks.get(task.number) is not task:
            return
        self._send(FrameKind.CANCEL, CancelledAnswers(task.number).encode())
        for answer in task.answers:
            if not answer.ending:
                self._end(answer, "cancelled")

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Load an adapter from a folder, or unload it if `path` is None, before the next step. Raises ApiError."""
        call = AdapterCall(next(self._calls), name, path)
        self._changes[call.call] = done = asyncio.get_running_loop().create_future()
        self._send(FrameKind.ADAPTER, call.encode())
        try:
            await done
        finally:
            del self._changes[call.call]

    def report_ready(self) -> None:
        """Tell the engine's process that requests may come."""
        self._send(FrameKind.READY)

    def report_ended(self) -> None:
        """Tell the engine's process that no other frame follows."""
        self._send(FrameKind.ENDED)

    def is_stuck(self, step_s: float) -> bool:
        """Return True if a rank is gone, or if there is work and no step has ended for `step_s` seconds."""
        return self._rank_is_gone or (bool(self._tasks) and monotonic() - self._moved_at > step_s)

    # Messages of the other process.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the open channel."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all tasks: the engine's process is gone, or its frames cannot be read."""
        self.defect = exc
        self._fail_all()
        self.gone.set()
        self._notify_listeners()

    def data_received(self, data: bytes) -> None:
        """Handle all received frames, then notify each listener once."""
        for frame in self._reader.feed(data):
            self._handle_frame(frame)
        self._notify_listeners()

    def _handle_frame(self, frame: Frame) -> None:
        kind, parts = frame
        if kind is FrameKind.STEP:
            self._handle_step(StepNews.decode(parts))
        elif kind is FrameKind.MODEL:
            self.card, self.state = ModelCard.decode(parts[0]), "ready"
            self.adapters = self.card.adapters
            self.opening_done.set()
        elif kind is FrameKind.FAILED:
            self._fail_all()
        elif kind is FrameKind.BROKEN:
            self._rank_is_gone = True
        elif kind is FrameKind.SCORES:
            task = self._tasks.get(int(parts[0]))
            if task is not None:
                task.scores = TokenScores(*decode_scores(parts[1:]))
        elif kind is FrameKind.CHANGED:
            self._finish_change(AdapterReply.decode(parts))
        elif kind is FrameKind.STOP:
            self._on_stop()

    def _handle_step(self, news: StepNews) -> None:
        self._moved_at = now = monotonic()
        growing, new_tokens = self._growing, dict[GrowingAnswer, int]()
        for number, token in zip(news.answers, news.tokens, strict=True):
            answer = growing.get(number)
            if answer is not None and not answer.ending:
                answer.take(token)
                new_tokens[answer] = new_tokens.get(answer, 0) + 1
        # An answer that a stop string ended takes no more scores than tokens.
        for index, logprob, top in zip(news.scored, news.logprobs, news.top, strict=True):
            scored = growing.get(news.answers[index])
            if scored is not None and len(scored.logprobs) < len(scored.ids):
                scored.logprobs.append(logprob)
                scored.top.append(top)
        for number in news.started:
            if (task := self._tasks.get(number)) is not None:
                task.started = True
                self._metrics.queued.observe(news.at - task.arrived)
        for number, cached in news.cached:
            if (task := self._tasks.get(number)) is not None:
                task.cached = cached
        self._record_growth(new_tokens, news.at, now)
        # Endings come last, so an answer has all its tokens when it ends.
        for number, ending in news.ended:
            if (answer := growing.get(number)) is not None:
                answer.end(ending)
                self._end(answer, answer.ending)
        for number, reason, message in news.refused:
            if (task := self._tasks.get(number)) is not None:
                kinds = {"engine": RunError, "request": ArgumentError}
                self._fail(task, kinds.get(reason, RuntimeError)(message))
        self.figures = news.figures
        self._metrics.count(news.figures, self.adapters)

    def _record_growth(self, new_tokens: dict[GrowingAnswer, int], at: float, now: float) -> None:
        """Mark the listeners of answers that grew, and count the times between tokens, equal ones together."""
        # Answers of one step have few different times, so metrics are counted in groups.
        since, touched = dict[tuple[float, int], int](), self._touched
        for answer, new in new_tokens.items():
            task = answer.task
            if answer.at:
                since[answer.at, new] = since.get((answer.at, new), 0) + 1
            # Several answers of a prompt share its first token, which counts once.
            elif answer is task.answers[0]:
                self._metrics.first_token.observe(at - task.arrived)
                self._metrics.prompt_tokens.inc(len(task.prompt))
            if task.first_token_at is None:
                task.first_token_at = now
            answer.at = at
            # A stop string ended it here: the engine, which knows no text, would go on.
            if answer.ending:
                self._cancel_rest(answer)
            elif task.listener is not None:
                touched.setdefault(task.listener, False)
        for (before, new), answers in since.items():
            self._metrics.between.observe((at - before) / new, answers * new)
        self._metrics.generation_tokens.inc(sum(new_tokens.values()))

    def _cancel_rest(self, answer: GrowingAnswer) -> None:
        """Cancel an answer after a stop string. Further tokens of it are dropped."""
        self._send(FrameKind.CANCEL, CancelledAnswers(answer.task.number, [answer.number]).encode())
        self._end(answer, answer.ending)

    def _end(self, answer: GrowingAnswer, ending: str) -> None:
        task, answer.ending = answer.task, ending
        self._growing.pop(answer.number, None)
        self._metrics.count_ended("abort" if ending == "cancelled" else ending, task.options.adapter)
        if task.listener is not None:
            self._touched[task.listener] = True
        if task.ended:
            self._forget(task)

    def _forget(self, task: EngineTask) -> None:
        if self._tasks.pop(task.number, None) is not None:  # its last answers may end in the same step
            self._metrics.whole.observe(monotonic() - task.arrived)

    def _fail(self, task: EngineTask, error: Exception) -> None:
        task.failure = error
        self._tasks.pop(task.number, None)
        for answer in task.answers:
            self._growing.pop(answer.number, None)
        if task.listener is not None:
            self._touched[task.listener] = True

    def _fail_all(self) -> None:
        """Fail all tasks and adapter calls: the engine is gone."""
        self.state = "failed"
        self.opening_done.set()
        for task in list(self._tasks.values()):
            self._fail(task, RunError(FAILED))
        for done in self._changes.values():
            if not done.done():
                done.set_exception(ApiError(503, FAILED, code="engine_failed", retry_seconds=30))

    def _finish_change(self, reply: AdapterReply) -> None:
        self.adapters = reply.names
        done = self._changes.get(reply.call)
        if done is None or done.done():  # the caller has gone
            return
        if reply.error is None:
            done.set_result(None)
        else:
            done.set_exception(reply.error)

    def _notify_listeners(self) -> None:
        touched, self._touched = self._touched, {}
        for listener, ended in touched.items():
            try:
                listener.notify(ended=ended)
            except Exception:  # a defect in one request ends that request, not the channel of all
                traceback.print_exc()
                listener.fail(internal_error())

    def _send(self, kind: FrameKind, parts: Sequence[bytes] = ()) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_frame(kind, parts))
