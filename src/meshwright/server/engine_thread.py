"""The engine's own thread. Tasks go in by a queue; how far their answers are comes out, after each step.

The engine is for one thread, and so is the event loop: they share no lock but that of the news. An answer's tokens and
text only ever grow, so the loop may read of them whatever the news say there is. News of a task replace older ones: a
reader that is slow costs no memory beyond the answer itself.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal, NamedTuple

from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.prompt_scores import PromptScores
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.served_request import Ending, ServedAnswer, ServedRequest
from meshwright.serve.serving_engine import ServingEngine
from meshwright.server.hosted_model import HostedModel, OpenModel
from meshwright.server.server_metrics import ServerMetrics
from meshwright.spec.errors import MeshwrightError, RunError

State = Literal["loading", "ready", "failed"]


class AnswerProgress(NamedTuple):
    """How far one answer is."""

    tokens: int
    characters: int
    ending: Ending


@dataclass(slots=True, eq=False, kw_only=True)
class EngineTask:
    """One prompt for the engine."""

    prompt: list[int]
    options: RequestOptions
    changed: asyncio.Event
    """Set in the loop whenever there is news."""
    scored: int | None = None
    """Likeliest tokens at each place of the prompt; None = the prompt is not scored."""
    arrived: float = field(default_factory=monotonic)
    request: ServedRequest | None = None
    """Written by the engine's thread."""
    scores: PromptScores | None = None
    progress: tuple[AnswerProgress, ...] = ()
    """Written by the loop, as the following."""
    failure: Exception | None = None
    began: float | None = None
    """When the first token came."""

    @property
    def waits(self) -> bool:
        """Whether the engine has not begun with it."""
        request = self.request
        return self.failure is None and (request is None or not (request.begun or request.ended))

    @property
    def ended(self) -> bool:
        """Whether no more news come."""
        return self.failure is not None or (bool(self.progress) and all(one.ending for one in self.progress))


@dataclass(slots=True)
class _Followed:
    """What the thread knows of an answer that grows."""

    task: EngineTask
    last: float = 0.0
    """When its last token came."""
    tokens: int = 0
    """How many came."""


@dataclass(slots=True, eq=False)
class EngineChange:
    """What is done to the engine between two steps."""

    apply: Callable[[ServingEngine], None]
    done: "asyncio.Future[None]"


Command = tuple[str, EngineTask | EngineChange | None]
News = tuple[tuple[AnswerProgress, ...], Exception | None]


class EngineThread:
    """Opens a model and answers tasks with it, until it is stopped. All methods are for the loop's thread."""

    def __init__(self, open_model: OpenModel, options: EngineOptions, metrics: ServerMetrics) -> None:
        self.state: State = "loading"
        self.hosted: HostedModel | None = None
        self.engine: ServingEngine | None = None
        """To be looked at; only its own thread may call it."""
        self.failure: BaseException | None = None
        self.settled = asyncio.Event()
        """The model is open, or cannot be opened."""
        self._open, self._options, self._metrics = open_model, options, metrics
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._owners: dict[ServedAnswer, _Followed] = {}
        self._waiting: list[EngineTask] = []
        self._news: dict[EngineTask, News] = {}
        self._lock = threading.Lock()
        self._moved_at = monotonic()
        self._thread = threading.Thread(target=self._main, name="meshwright-engine", daemon=True)

    def start(self) -> None:
        """Begin to open the model."""
        self._thread.start()

    def submit(self, task: EngineTask) -> None:
        """Let a task be answered; it is changed when there is news."""
        self._commands.put(("add", task))

    def cancel(self, task: EngineTask) -> None:
        """Nobody wants a task's answers: before the next step its memory is free."""
        self._commands.put(("cancel", task))

    async def change(self, apply: Callable[[ServingEngine], None]) -> None:
        """Do something to the engine before its next step. What `apply` raises; RunError: the engine has failed."""
        done = self._loop.create_future()
        self._commands.put(("change", EngineChange(apply, done)))
        await done

    def stop(self, wait_s: float) -> None:
        """End the thread behind its step. Ranks whose step takes longer are given up: a word beside it would not reach
        them, and be waited for without end."""
        self._commands.put(("stop", None))
        self._thread.join(wait_s)
        if self._thread.is_alive() and self.hosted is not None and self.hosted.ranks is not None:
            self.hosted.ranks.broken = True

    def stuck(self, step_s: float) -> bool:
        """Whether there is work and no step has ended for so long, or a rank of the model is gone."""
        if self.hosted is not None and self.hosted.ranks is not None and self.hosted.ranks.broken:
            return True
        return bool(self._owners) and monotonic() - self._moved_at > step_s

    # In the thread.

    def _main(self) -> None:
        try:
            self.hosted = self._open()
            self.engine = self.hosted.engine(self._options)
            self._metrics.watch(self.engine, lambda: len(self._waiting))
            self._metrics.count(self.engine)
            self._settle("ready")
            self._run(self.engine, self.hosted)
        except BaseException as error:
            opened = self.state == "ready"
            if opened:
                traceback.print_exc()
            self.failure = error
            self._settle("failed")
            self._fail_all()

    def _settle(self, state: State) -> None:
        self.state = state
        self._call(self.settled.set)

    def _run(self, engine: ServingEngine, hosted: HostedModel) -> None:
        while True:
            for command, task in self._taken(wait=engine.idle):
                if task is None:
                    return
                if isinstance(task, EngineChange):
                    self._change(engine, task)
                elif command == "add":
                    self._add(engine, hosted, task)
                elif task.request is not None:
                    self._cancel(engine, task, task.request)
            if not engine.idle:
                self._step(engine)
            self._metrics.count(engine)
            self._moved_at = monotonic()

    def _change(self, engine: ServingEngine, change: EngineChange) -> None:
        try:
            change.apply(engine)
        except Exception as error:
            self._settle_change(change, error)
            if isinstance(error, RunError):
                raise
            return
        self._settle_change(change)

    def _settle_change(self, change: EngineChange, error: Exception | None = None) -> None:
        def settle() -> None:
            if change.done.done():  # who asked for it has gone
                return
            if error is None:
                change.done.set_result(None)
            else:
                change.done.set_exception(error)

        self._call(settle)

    def _taken(self, *, wait: bool) -> Iterable[Command]:
        """Commands that came; waits for one where there is nothing else to do."""
        if wait:
            found = self._commands.get()
            self._moved_at = monotonic()
            yield found
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def _add(self, engine: ServingEngine, hosted: HostedModel, task: EngineTask) -> None:
        try:
            if task.scored is not None:
                task.scores = engine.score(task.prompt, task.scored, task.options.adapter)
            request = engine.add(task.prompt, task.options)
        except MeshwrightError as error:
            self._publish({task: ((), error)})
            return
        except Exception as error:  # a library that fails with one request must not end all
            traceback.print_exc()
            self._publish({task: ((), error)})
            return
        task.request = request
        if request.ended:
            self._end(task, request)
            return
        self._owners.update({answer: _Followed(task) for answer in request.answers})
        self._waiting.append(task)

    def _cancel(self, engine: ServingEngine, task: EngineTask, request: ServedRequest) -> None:
        if request.ended:
            return
        engine.cancel(request)
        self._end(task, request)

    def _step(self, engine: ServingEngine) -> None:
        grown, now = engine.step(), monotonic()
        for task in [one for one in self._waiting if not one.waits]:
            self._waiting.remove(task)
            self._metrics.queued.observe(now - task.arrived)
        touched = dict[EngineTask, None]()
        for answer in grown:
            followed = self._owners[answer]
            touched[followed.task] = None
            self._observe(followed, answer, now)
        ended = [task for task in touched if task.request is not None and task.request.ended]
        self._publish({task: (_progress(task.request), None) for task in touched if task.request is not None})
        for task in ended:
            assert task.request is not None
            self._forget(task, task.request)

    def _observe(self, followed: _Followed, answer: ServedAnswer, now: float) -> None:
        """Right guesses bring several tokens at once: each has its part of the time."""
        task, new = followed.task, len(answer.ids) - followed.tokens
        self._metrics.generation_tokens.inc(new)
        if followed.last:
            for _ in range(new):
                self._metrics.between.observe((now - followed.last) / new)
        elif task.request is not None and answer is task.request.answers[0]:
            self._metrics.first_token.observe(now - task.arrived)
            self._metrics.prompt_tokens.inc(len(task.prompt))
        followed.last, followed.tokens = now, len(answer.ids)

    def _end(self, task: EngineTask, request: ServedRequest) -> None:
        self._publish({task: (_progress(request), None)})
        self._forget(task, request)

    def _forget(self, task: EngineTask, request: ServedRequest) -> None:
        for answer in request.answers:
            self._owners.pop(answer, None)
            self._metrics.ended("abort" if answer.ending == "cancelled" else answer.ending, task.options.adapter)
        if task in self._waiting:
            self._waiting.remove(task)
        self._metrics.whole.observe(monotonic() - task.arrived)

    def _fail_all(self) -> None:
        """Whoever waits learns that the engine is gone, and so does who comes later."""
        error = RunError("the engine has failed: restart the server, and see its log")
        self._publish({followed.task: ((), error) for followed in self._owners.values()})
        self._owners.clear()
        while True:
            command, task = self._commands.get()
            if task is None:
                return
            if isinstance(task, EngineChange):
                self._settle_change(task, error)
            elif command == "add":
                self._publish({task: ((), error)})

    def _publish(self, news: dict[EngineTask, News]) -> None:
        if not news:
            return
        with self._lock:
            first = not self._news
            self._news.update(news)
        if first:
            self._call(self._deliver)

    def _call(self, function: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function)  # type: ignore[arg-type]  # a bound method without arguments
        except RuntimeError:  # the loop is closed: nobody listens
            return

    # In the loop.

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        now = monotonic()
        for task, (progress, failure) in news.items():
            task.progress, task.failure = progress, failure
            task.began = now if task.began is None else task.began
            task.changed.set()


def _progress(request: ServedRequest) -> tuple[AnswerProgress, ...]:
    return tuple(AnswerProgress(len(one.ids), len(one.text), one.ending) for one in request.answers)
