"""The engine as the HTTP process sees it: prompts go to its process, and one message comes back after each step.

All methods are for the event loop. What has come while the loop was busy is read at once: answers then grow by several
tokens, and whoever listens to them hears of it once. So a slow loop has less to do per token.
"""

import asyncio
import itertools
import traceback
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Literal, final

from meshwright.server.api_error import ApiError, mistake
from meshwright.server.channel import Frame, FrameKind, FrameReader, encode_frame
from meshwright.server.engine_messages import (
    AdapterCall,
    AdapterReply,
    AddedPrompt,
    CancelledAnswers,
    EngineFigures,
    StepNews,
    decode_scores,
)
from meshwright.server.engine_task import EngineTask, GrowingAnswer, TaskListener, TokenScores
from meshwright.server.model_card import ModelCard
from meshwright.server.server_metrics import ServerMetrics
from meshwright.spec.errors import ArgumentError, RunError

State = Literal["loading", "ready", "failed"]
NUMBERS = 2**32
"""Answers have numbers below this, as messages hold them; then they begin anew."""
FAILED = "the engine has failed: restart the server, and see its log"


@final
class EngineLink(asyncio.Protocol):
    """One end of the channel."""

    def __init__(self, metrics: ServerMetrics, on_stop: Callable[[], None]) -> None:
        """`on_stop`: is called when the server is asked to end."""
        self.state: State = "loading"
        self.card: ModelCard | None = None
        """Of the model, when it is open."""
        self.adapters: Sequence[str] = ()
        """Names of those that are loaded now."""
        self.settled = asyncio.Event()
        """The model is open, or cannot be opened."""
        self.lost = asyncio.Event()
        """The engine's process is gone."""
        self.defect: Exception | None = None
        """Why nothing more is read of it, where that is a mistake of this process."""
        self.figures = EngineFigures()
        self._metrics, self._on_stop = metrics, on_stop
        self._reader, self._transport = FrameReader(), asyncio.Transport()
        self._number, self._calls = 0, itertools.count()
        self._tasks: dict[int, EngineTask] = {}
        self._growing: dict[int, GrowingAnswer] = {}
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._touched: dict[TaskListener, bool] = {}  # True: something of it has ended
        self._rank_is_gone = False
        self._moved_at = monotonic()

    def _free_numbers(self, count: int) -> int:
        """The first of so many numbers in a row that no task has, and no answer which grows."""
        first, taken = self._number, (self._growing, self._tasks)
        while first + count > NUMBERS or any(n in names for names in taken for n in range(first, first + count)):
            first = 0 if first + count > NUMBERS else first + 1
        self._number = first + count
        return first

    # What routes ask for.

    def submit(self, task: EngineTask) -> None:
        """Let a task be answered; its listener hears of all news."""
        first = self._free_numbers(task.options.n)
        task.open(first, range(first, first + task.options.n))
        if self.state != "ready":
            self._fail(task, RunError(FAILED))
            self._tell()
            return
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
        """Nobody wants a task's answers: before the next step its memory is free."""
        if self._tasks.get(task.number) is not task:
            return
        self._send(FrameKind.CANCEL, CancelledAnswers(task.number).encode())
        for answer in task.answers:
            if not answer.ending:
                self._end(answer, "cancelled")

    async def change(self, name: str, path: str | None) -> None:
        """Load an adapter from a folder, or with None unload it, before the next step. ApiError."""
        call = AdapterCall(next(self._calls), name, path)
        self._changes[call.call] = done = asyncio.get_running_loop().create_future()
        self._send(FrameKind.ADAPTER, call.encode())
        try:
            await done
        finally:
            del self._changes[call.call]

    def ready(self) -> None:
        """Tell the engine's process that requests may come."""
        self._send(FrameKind.READY)

    def ended(self) -> None:
        """Tell it that no other word follows."""
        self._send(FrameKind.ENDED)

    def stuck(self, step_s: float) -> bool:
        """Whether there is work and no step has ended for so long, or a rank of the model is gone."""
        return self._rank_is_gone or (bool(self._tasks) and monotonic() - self._moved_at > step_s)

    # What the other process says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The channel is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's process has ended, or what it says cannot be read."""
        self.defect = exc
        self._fail_all()
        self.lost.set()
        self._tell()

    def data_received(self, data: bytes) -> None:
        """Take whatever has come, then let each listener know once."""
        for frame in self._reader.feed(data):
            self._take(frame)
        self._tell()

    def _take(self, frame: Frame) -> None:
        kind, parts = frame
        if kind is FrameKind.STEP:
            self._step(StepNews.decode(parts))
        elif kind is FrameKind.MODEL:
            self.card, self.state = ModelCard.decode(parts[0]), "ready"
            self.adapters = self.card.adapters
            self.settled.set()
        elif kind is FrameKind.FAILED:
            self._fail_all()
        elif kind is FrameKind.BROKEN:
            self._rank_is_gone = True
        elif kind is FrameKind.SCORES:
            task = self._tasks.get(int(parts[0]))
            if task is not None:
                task.scores = TokenScores(*decode_scores(parts[1:]))
        elif kind is FrameKind.CHANGED:
            self._settle(AdapterReply.decode(parts))
        elif kind is FrameKind.STOP:
            self._on_stop()

    def _step(self, news: StepNews) -> None:
        self._moved_at = now = monotonic()
        growing, fresh = self._growing, dict[GrowingAnswer, int]()
        for number, token in zip(news.answers, news.tokens, strict=True):
            answer = growing.get(number)
            if answer is not None and not answer.ending:
                answer.take(token)
                fresh[answer] = fresh.get(answer, 0) + 1
        for place, logprob, top in zip(news.scored, news.logprobs, news.top, strict=True):
            scored = growing.get(news.answers[place])
            if scored is not None and len(scored.logprobs) < len(scored.ids):
                scored.logprobs.append(logprob)
                scored.top.append(top)
        for number in news.begun:
            if (task := self._tasks.get(number)) is not None:
                task.begun = True
                self._metrics.queued.observe(news.at - task.arrived)
        for number, cached in news.cached:
            if (task := self._tasks.get(number)) is not None:
                task.cached = cached
        self._note_fresh(fresh, news.at, now)
        for number, ending in news.ended:
            if (answer := growing.get(number)) is not None:
                answer.end(ending)
                self._end(answer, answer.ending)
        for number, why, message in news.refused:
            if (task := self._tasks.get(number)) is not None:
                kinds = {"engine": RunError, "request": ArgumentError}
                self._fail(task, kinds.get(why, RuntimeError)(message))
        self.figures = news.figures
        self._metrics.count(news.figures, self.adapters)

    def _note_fresh(self, fresh: dict[GrowingAnswer, int], at: float, now: float) -> None:
        """Tell listeners of answers that grew, and metrics of the time between tokens. Most answers grew in the step
        before, so these are counted together."""
        since, touched = dict[tuple[float, int], int](), self._touched
        for answer, new in fresh.items():
            task = answer.task
            if answer.at:
                since[answer.at, new] = since.get((answer.at, new), 0) + 1
            elif answer is task.answers[0]:
                self._metrics.first_token.observe(at - task.arrived)
                self._metrics.prompt_tokens.inc(len(task.prompt))
            if task.began is None:
                task.began = now
            answer.at = at
            if answer.ending:
                self._stop(answer)
            elif task.listener is not None:
                touched.setdefault(task.listener, False)
        for (before, new), answers in since.items():
            self._metrics.between.observe((at - before) / new, answers * new)
        self._metrics.generation_tokens.inc(sum(fresh.values()))

    def _stop(self, answer: GrowingAnswer) -> None:
        """A stop string came: what the engine makes behind it is dropped."""
        self._send(FrameKind.CANCEL, CancelledAnswers(answer.task.number, [answer.number]).encode())
        self._end(answer, answer.ending)

    def _end(self, answer: GrowingAnswer, ending: str) -> None:
        task, answer.ending = answer.task, ending
        self._growing.pop(answer.number, None)
        self._metrics.ended("abort" if ending == "cancelled" else ending, task.options.adapter)
        if task.listener is not None:
            self._touched[task.listener] = True
        if task.ended:
            self._forget(task)

    def _forget(self, task: EngineTask) -> None:
        if self._tasks.pop(task.number, None) is not None:  # its last answers may end in one step
            self._metrics.whole.observe(monotonic() - task.arrived)

    def _fail(self, task: EngineTask, error: Exception) -> None:
        task.failure = error
        self._tasks.pop(task.number, None)
        for answer in task.answers:
            self._growing.pop(answer.number, None)
        if task.listener is not None:
            self._touched[task.listener] = True

    def _fail_all(self) -> None:
        """Whoever waits learns that the engine is gone."""
        self.state = "failed"
        self.settled.set()
        for task in list(self._tasks.values()):
            self._fail(task, RunError(FAILED))
        for done in self._changes.values():
            if not done.done():
                done.set_exception(ApiError(503, FAILED, code="engine_failed", retry_seconds=30))

    def _settle(self, reply: AdapterReply) -> None:
        self.adapters = reply.names
        done = self._changes.get(reply.call)
        if done is None or done.done():  # who asked for it has gone
            return
        if reply.error is None:
            done.set_result(None)
        else:
            done.set_exception(reply.error)

    def _tell(self) -> None:
        touched, self._touched = self._touched, {}
        for listener, ended in touched.items():
            try:
                listener.changed(ended=ended)
            except Exception:  # a mistake about one request ends that request, not the channel of all
                traceback.print_exc()
                listener.fail(mistake())

    def _send(self, kind: FrameKind, parts: Sequence[bytes] = ()) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_frame(kind, parts))
