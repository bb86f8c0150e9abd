"""Engine's thread: commands arrive in a queue, and one message leaves after each step.

A message has the new tokens of all answers that grew. The HTTP process makes text, stop strings, JSON and metrics of it
(engine_link.py), so none of these delays a step.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import final

from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedAnswer, ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.channel.channel import Channel, FrameKind
from meshwright.serving.http.channel.engine_messages import (
    AddedPrompt,
    CancelledAnswers,
    EngineFigures,
    StepNews,
    encode_scores,
)
from meshwright.serving.http.host.hosted_model import HostedModel, OpenModel
from meshwright.spec.errors import MeshwrightError, RunError

EngineChange = Callable[[ServingEngine | None], None]
"""Function called between two steps, with None after the engine has failed. An exception in it ends the engine."""
Command = AddedPrompt | CancelledAnswers | EngineChange
"""Request of another thread."""


@dataclass(slots=True)
class _SentAnswer:
    """Growing answer, with the number of tokens already sent to the HTTP process."""

    number: int
    request: "_FollowedRequest"
    tokens: int = 0


@dataclass(slots=True)
class _FollowedRequest:
    """Request that grows."""

    added: AddedPrompt
    request: ServedRequest
    cached_sent: bool = False


@final
class EngineThread:
    """Thread that opens a model and answers prompts with it until stopped."""

    def __init__(self, open_model: OpenModel, options: EngineOptions, channel: Channel) -> None:
        self.hosted: HostedModel | None = None
        self.engine: ServingEngine | None = None
        """Engine for inspection. Only its own thread may call it."""
        self.failure: BaseException | None = None
        """Reason why the model cannot be opened, or the engine has failed."""
        self._open, self._options, self._channel = open_model, options, channel
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._sent: dict[ServedAnswer, _SentAnswer] = {}
        self._requests: dict[int, _FollowedRequest] = {}
        self._waiting: list[_FollowedRequest] = []
        self._figures, self._adapter_bytes, self._changed = EngineFigures(), 0, False
        self._thread = threading.Thread(target=self._main, name="meshwright-engine", daemon=True)

    def start(self) -> None:
        """Start to open the model."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queue a command for the time before the next step."""
        self._commands.put(command)

    def stop(self, wait_s: float) -> None:
        """End the thread after its step. Ranks in a longer step are abandoned: they would not read a message."""
        self._commands.put(None)
        self._thread.join(wait_s)
        if self._thread.is_alive() and self.hosted is not None and self.hosted.ranks is not None:
            self.hosted.ranks.broken = True

    # Methods that run in the thread.

    def _main(self) -> None:
        try:
            self.hosted = hosted = self._open()
            self.engine = engine = hosted.engine(self._options)
            self._channel.send(FrameKind.MODEL, [hosted.card(engine).encode()])
            self._run(engine)
        except BaseException as error:
            # A model that cannot be opened is reported by its caller; a defect of the engine has only this traceback.
            if self.engine is not None:
                traceback.print_exc()
            self.failure = error
            self._channel.send(FrameKind.FAILED)
            self._fail_changes()

    def _run(self, engine: ServingEngine) -> None:
        while True:
            news = StepNews()
            # Commands come between steps only, so no lock guards the engine. An idle thread sleeps in the queue.
            for command in self._pending_commands(wait=engine.idle):
                if command is None:
                    return
                if isinstance(command, AddedPrompt):
                    self._add(engine, command, news)
                elif isinstance(command, CancelledAnswers):
                    self._cancel(engine, command, news)
                else:
                    self._changed = True
                    command(engine)
            if not engine.idle:
                self._step(engine, news)
            self._send(engine, news)

    def _send(self, engine: ServingEngine, news: StepNews) -> None:
        figures = self._engine_figures(engine)
        # Without news there is no message, so an idle server sends nothing.
        if news.tokens or figures != self._figures or news.rare:
            news.at, news.figures = monotonic(), figures
            self._figures = figures
            self._channel.send(FrameKind.STEP, news.encode())

    def _pending_commands(self, *, wait: bool) -> Iterator[Command | None]:
        """Yield the queued commands. With `wait`, block for the first one."""
        if wait:
            yield self._commands.get()
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def _add(self, engine: ServingEngine, added: AddedPrompt, news: StepNews) -> None:
        try:
            if added.scored is not None:
                scores = engine.score(added.prompt, added.scored, added.options.adapter)
                parts = [str(added.task).encode(), *encode_scores(scores.logprobs, scores.top)]
                self._channel.send(FrameKind.SCORES, parts)
            request = engine.add(added.prompt, added.options)
        except MeshwrightError as error:
            reason = "engine" if isinstance(error, RunError) else "request"
            news.refused.append((added.task, reason, str(error)))
            return
        except Exception as error:  # a library that fails with one request must not end the others
            traceback.print_exc()
            news.refused.append((added.task, "defect", str(error)))
            return
        followed = self._requests[added.task] = _FollowedRequest(added, request)
        for number, answer in enumerate(request.answers, added.first_answer):
            self._sent[answer] = _SentAnswer(number, followed)
        self._waiting.append(followed)
        for answer in request.answers:
            if answer.ending:
                self._end(answer, news)

    def _cancel(self, engine: ServingEngine, cancelled: CancelledAnswers, news: StepNews) -> None:
        followed = self._requests.get(cancelled.task)
        if followed is None:
            return
        request, first = followed.request, followed.added.first_answer
        numbers = range(first, first + len(request.answers)) if cancelled.answers is None else cancelled.answers
        growing = [answer for number in numbers if not (answer := request.answers[number - first]).ending]
        engine.cancel(request, growing)
        for answer in growing:
            self._end(answer, news)

    def _step(self, engine: ServingEngine, news: StepNews) -> None:
        grown = engine.step()
        if self._waiting:
            self._note_started(news)
        sent, answers, tokens = self._sent, news.answers, news.tokens
        for answer in grown:
            known, ids = sent[answer], answer.ids
            new = len(ids) - known.tokens
            # One token is by far the most frequent case; it skips two slices.
            if new == 1:
                answers.append(known.number)
                tokens.append(ids[-1])
            else:
                answers += [known.number] * new
                tokens += ids[known.tokens :]
            known.tokens += new
            if not known.request.cached_sent and new:
                self._note_cached(known.request, news)
            if known.request.added.with_logprobs:
                news.scored += range(len(tokens) - new, len(tokens))
                news.logprobs += answer.logprobs[-new:] if new else ()
                news.top += answer.top[-new:] if new else ()
            if answer.ending:
                self._end(answer, news)

    def _note_started(self, news: StepNews) -> None:
        started = [followed for followed in self._waiting if followed.request.has_started]
        news.started += [followed.added.task for followed in started]
        self._waiting = [followed for followed in self._waiting if not followed.request.has_started]

    def _note_cached(self, followed: _FollowedRequest, news: StepNews) -> None:
        followed.cached_sent = True
        news.cached.append((followed.added.task, followed.request.cached))

    def _end(self, answer: ServedAnswer, news: StepNews) -> None:
        known = self._sent.pop(answer)
        news.ended.append((known.number, answer.ending))
        followed = known.request
        if followed.request.ended:
            self._requests.pop(followed.added.task, None)  # several of its answers may end in the same step
            if followed in self._waiting:
                self._waiting.remove(followed)

    def _fail_changes(self) -> None:
        """Answer callers of changes after the engine has failed. The HTTP process refuses prompts."""
        while (command := self._commands.get()) is not None:
            if not isinstance(command, AddedPrompt | CancelledAnswers):
                command(None)

    def _engine_figures(self, engine: ServingEngine) -> EngineFigures:
        tables, scheduler, guesses, adapters = engine.tables, engine.scheduler, engine.guesses, engine.adapters
        pool, host = tables.pool, tables.pool.host
        if adapters.held != self._figures.adapters or self._changed:  # counting their bytes sums over all layers
            self._adapter_bytes, self._changed = adapters.bytes, False
        return EngineFigures(
            len(scheduler.running), len(self._waiting), pool.size, pool.free, adapters.held, self._adapter_bytes,
            scheduler.preemptions, tables.asked, tables.hits, tables.host_hits, host.saved if host else 0,
            guesses.guessed if guesses else 0, guesses.accepted if guesses else 0,
        )  # fmt: skip
