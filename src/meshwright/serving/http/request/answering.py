"""Answers to one HTTP request as they grow, and limits on the number of requests."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.serving.http.channel import ApiError, Top, bad_request, shutdown_error
from meshwright.serving.http.request.engine_link import EngineLink
from meshwright.serving.http.request.engine_task import EngineTask, GrowingAnswer
from meshwright.serving.http.server_options import ServerLimits, Tenant
from meshwright.spec.errors import MeshwrightError, RunError

FAULTS = ("broken", "grammar")
"""Endings of an answer that end its whole request with an error."""


class ClientGone(Exception):
    """Client has left: nobody reads the answers."""


class AnswerPart(NamedTuple):
    """New part of one answer."""

    choice: int
    """Index among all answers of the HTTP request."""
    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[Top]
    ending: str


class Answering:
    """HTTP request with a task for each of its prompts. Use inside `run_tasks`, which cancels what remains."""

    def __init__(self, engine: EngineLink, tasks: Sequence[EngineTask], limit_s: float) -> None:
        """Prepare the tasks. `limit_s` is the time from now to the last token."""
        self.tasks = list(tasks)
        self.on_growth: Callable[[], None] | None = None
        """Called when answers have grown and more follows. None = wake `wait_for_news`."""
        self._engine, self._news = engine, asyncio.Event()
        self._until = asyncio.get_running_loop().time() + limit_s
        self._failure: Exception | None = None
        self.unread: dict[int, GrowingAnswer] = {}
        """Answers that have not been read to their end, by index in the whole request."""

    @contextmanager
    def run_tasks(self) -> Iterator[None]:
        """Submit the tasks, and cancel what remains of them at the end."""
        for task in self.tasks:
            task.listener = self
            self._engine.submit(task)
        self.unread = dict(enumerate(answer for task in self.tasks for answer in task.answers))
        try:
            yield
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free the engine's memory of the request. May be called again."""
        for task in self.tasks:
            # First, so that ending the task does not notify a request that is over.
            task.listener = None
            self._engine.cancel(task)

    def fail(self, error: Exception) -> None:
        """End the request with an error. ClientGone ends it silently."""
        self.cancel()
        # The first error is the cause; cancelling may lead to others.
        self._failure = self._failure or error
        self._news.set()

    def notify(self, *, ended: bool) -> None:
        """Take notice of news of the tasks. `ended`: an answer or a task has ended."""
        # Growth is written at once by its callback; the task that waits is woken only at the end.
        if self.on_growth is None or (ended and self._is_done):
            self._news.set()
        else:
            self.on_growth()

    @property
    def ended(self) -> bool:
        """True if all answers are complete."""
        return all(task.ended for task in self.tasks)

    @property
    def _is_done(self) -> bool:
        """True if nothing more is read: all answers are complete, or one has failed."""
        growing = False
        for task in self.tasks:
            if task.failure is not None:
                return True
            for answer in task.answers:
                if answer.ending in FAULTS:
                    return True
                growing = growing or not answer.ending
        return not growing

    async def wait_for_news(self) -> None:
        """Wait for news or, with `on_growth`, for the end of all answers. Raises ApiError, ClientGone."""
        try:
            async with asyncio.timeout_at(self._until):
                await self._news.wait()
        except TimeoutError:
            self.cancel()
            raise ApiError(504, "the answer took longer than a request may", code="deadline_exceeded") from None
        self._news.clear()
        self.check()

    def parts(self) -> Iterator[AnswerPart]:
        """Yield what is new of each answer since it was read. One that has ended comes once more."""
        for choice, answer in list(self.unread.items()):
            if answer.pieces or answer.ids or answer.ending:
                yield self.part(choice, answer)

    def part(self, choice: int, answer: GrowingAnswer) -> AnswerPart:
        """Return what is new of one answer of `unread`."""
        if answer.ending:
            del self.unread[choice]
        part = AnswerPart(choice, "".join(answer.pieces), answer.ids, answer.logprobs, answer.top, answer.ending)
        # New lists, not cleared ones: the part now owns the old ones.
        answer.pieces, answer.ids, answer.logprobs, answer.top = [], [], [], []
        return part

    def check(self) -> None:
        """Raise the error that ended the request early: ApiError, ClientGone."""
        if self._failure is not None:
            raise self._failure
        for task in self.tasks:
            if isinstance(task.failure, RunError):
                raise ApiError(503, str(task.failure), code="engine_failed", retry_seconds=30)
            if isinstance(task.failure, MeshwrightError):
                raise bad_request(str(task.failure))
            if task.failure is not None:
                raise ApiError(500, "the engine failed on this request: see its log", code="internal_error")
            if any(answer.ending == "grammar" for answer in task.answers):
                raise bad_request(
                    "the answer cannot be continued by its schema or regular expression: take a simpler one",
                    "response_format", "grammar_failed",
                )  # fmt: skip
            if any(answer.ending == "broken" for answer in task.answers):
                raise ApiError(500, "the model's logits are no numbers: its weights are broken", code="broken_model")


class Admission:
    """Limits on waiting prompts and on requests per key."""

    def __init__(self, limits: ServerLimits) -> None:
        self.closed = False
        """True if the server takes no more requests."""
        self._limits = limits
        self._open: dict[Answering, None] = {}
        self._open_by_key: Counter[str] = Counter()

    @property
    def idle(self) -> bool:
        """True if no request is being answered."""
        return not self._open_by_key

    @property
    def open(self) -> int:
        """Number of requests that are being answered."""
        return self._open_by_key.total()

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for the engine."""
        return sum(task.waits for answering in self._open for task in answering.tasks)

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[None]:
        """Count one more request of a key inside. Raises ApiError."""
        if self.closed:
            raise shutdown_error()
        if self._open_by_key[tenant.name] >= self._limits.max_requests_per_key:
            raise ApiError(
                429, f"this key has {self._limits.max_requests_per_key} requests at once: wait for one of them",
                code="too_many_requests", retry_seconds=1,
            )  # fmt: skip
        self._open_by_key[tenant.name] += 1
        try:
            yield
        finally:
            self._open_by_key[tenant.name] -= 1
            self._open_by_key += Counter()  # drops keys with 0 requests

    @contextmanager
    def run(self, answering: Answering) -> Iterator[None]:
        """Run the tasks of a request inside. Raises ApiError when too many prompts wait."""
        if self.closed:
            raise shutdown_error()
        # A request with more prompts than the limit is taken when nothing else waits.
        if self.waiting + len(answering.tasks) > max(self._limits.max_queue, len(answering.tasks)):
            raise ApiError(
                429,
                f"{self._limits.max_queue} prompts wait already: ask again later",
                code="queue_full",
                retry_seconds=2,
            )
        self._open[answering] = None
        try:
            with answering.run_tasks():
                yield
        finally:
            del self._open[answering]

    def abort(self) -> None:
        """End all requests that are being answered."""
        for answering in list(self._open):
            answering.fail(shutdown_error())
