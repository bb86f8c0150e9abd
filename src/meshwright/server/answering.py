"""The answers to one HTTP request while they grow, and how many requests there may be."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.server.access import Tenant
from meshwright.server.api_error import ApiError, refused, shutting_down
from meshwright.server.engine_link import EngineLink
from meshwright.server.engine_messages import Top
from meshwright.server.engine_task import EngineTask, GrowingAnswer
from meshwright.server.server_options import ServerLimits
from meshwright.spec.errors import MeshwrightError, RunError

FAULTS = ("broken", "grammar")
"""Endings of an answer that end its whole request with an error."""


class ClientGone(Exception):
    """Nobody reads the answers any more."""


class AnswerPart(NamedTuple):
    """What is new of one answer."""

    choice: int
    """Of all answers of the HTTP request."""
    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[Top]
    ending: str


class Answering:
    """One HTTP request: a task for each of its prompts. Use `begun` around it, which cancels what is left over."""

    def __init__(self, engine: EngineLink, tasks: Sequence[EngineTask], limit_s: float) -> None:
        """`limit_s`: from now to the last token."""
        self.tasks = list(tasks)
        self.on_growth: Callable[[], None] | None = None
        """Is called when answers have grown, and more follows. None = whoever waits in `grown` is woken."""
        self._engine, self._news = engine, asyncio.Event()
        self._until = asyncio.get_running_loop().time() + limit_s
        self._failure: Exception | None = None
        self.unread: dict[int, GrowingAnswer] = {}
        """Answers that have not been read to their end, by their places in the whole request."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Inside, the engine works on it."""
        for task in self.tasks:
            task.listener = self
            self._engine.submit(task)
        self.unread = dict(enumerate(answer for task in self.tasks for answer in task.answers))
        try:
            yield
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free what the engine has of it. It may be called again."""
        for task in self.tasks:
            task.listener = None
            self._engine.cancel(task)

    def fail(self, error: Exception) -> None:
        """End it with an error, or without a word where that is ClientGone."""
        self.cancel()
        self._failure = self._failure or error
        self._news.set()

    def changed(self, *, ended: bool) -> None:
        """There is news of its tasks; `ended`: an answer or a task has ended."""
        if self.on_growth is None or (ended and self._settled):
            self._news.set()
        else:
            self.on_growth()

    @property
    def ended(self) -> bool:
        """Whether all answers are whole."""
        return all(task.ended for task in self.tasks)

    @property
    def _settled(self) -> bool:
        """Whether no more is read: all are whole, or one has failed."""
        growing = False
        for task in self.tasks:
            if task.failure is not None:
                return True
            for answer in task.answers:
                if answer.ending in FAULTS:
                    return True
                growing = growing or not answer.ending
        return not growing

    async def grown(self) -> None:
        """Until there is news, or, with `on_growth`, until all answers are whole. ApiError, ClientGone."""
        try:
            async with asyncio.timeout_at(self._until):
                await self._news.wait()
        except TimeoutError:
            self.cancel()
            raise ApiError(504, "the answer took longer than a request may", code="deadline_exceeded") from None
        self._news.clear()
        self.check()

    def parts(self) -> Iterator[AnswerPart]:
        """What is new of each answer since it was read; one that has ended comes once more."""
        for choice, answer in list(self.unread.items()):
            if answer.pieces or answer.ids or answer.ending:
                yield self.part(choice, answer)

    def part(self, choice: int, answer: GrowingAnswer) -> AnswerPart:
        """What is new of one of `unread`."""
        if answer.ending:
            del self.unread[choice]
        part = AnswerPart(choice, "".join(answer.pieces), answer.ids, answer.logprobs, answer.top, answer.ending)
        answer.pieces, answer.ids, answer.logprobs, answer.top = [], [], [], []
        return part

    def check(self) -> None:
        """Raise what ended the request early: ApiError, ClientGone."""
        if self._failure is not None:
            raise self._failure
        for task in self.tasks:
            if isinstance(task.failure, RunError):
                raise ApiError(503, str(task.failure), code="engine_failed", retry_seconds=30)
            if isinstance(task.failure, MeshwrightError):
                raise refused(str(task.failure))
            if task.failure is not None:
                raise ApiError(500, "the engine cannot take this request, as its log describes", code="internal_error")
            if any(answer.ending == "grammar" for answer in task.answers):
                raise refused(
                    "the answer cannot be continued by its schema or regular expression: take a simpler one",
                    "response_format", "grammar_failed",
                )  # fmt: skip
            if any(answer.ending == "broken" for answer in task.answers):
                raise ApiError(500, "the model's logits are no numbers: its weights are broken", code="broken_model")


class Admission:
    """Who is let in: counts of what waits and of what each key has at once."""

    def __init__(self, limits: ServerLimits) -> None:
        self.closed = False
        """The server takes no more requests."""
        self._limits = limits
        self._open: dict[Answering, None] = {}
        self._of_key: Counter[str] = Counter()

    @property
    def idle(self) -> bool:
        """Whether nobody is being answered."""
        return not self._of_key

    @property
    def open(self) -> int:
        """Requests that are being answered."""
        return self._of_key.total()

    @property
    def waiting(self) -> int:
        """Prompts that wait for the engine."""
        return sum(task.waits for answering in self._open for task in answering.tasks)

    @contextmanager
    def request_of(self, tenant: Tenant) -> Iterator[None]:
        """Inside, a key has one request more. ApiError."""
        if self.closed:
            raise shutting_down()
        if self._of_key[tenant.name] >= self._limits.max_requests_per_key:
            raise ApiError(
                429, f"this key has {self._limits.max_requests_per_key} requests at once: wait for one of them",
                code="too_many_requests", retry_seconds=1,
            )  # fmt: skip
        self._of_key[tenant.name] += 1
        try:
            yield
        finally:
            self._of_key[tenant.name] -= 1
            self._of_key += Counter()  # drops what is 0

    @contextmanager
    def answering(self, one: Answering) -> Iterator[None]:
        """Inside, its prompts wait or are answered. ApiError where too many wait."""
        if self.closed:
            raise shutting_down()
        if self.waiting + len(one.tasks) > max(self._limits.max_queue, len(one.tasks)):
            raise ApiError(
                429,
                f"{self._limits.max_queue} prompts wait already: ask again later",
                code="queue_full",
                retry_seconds=2,
            )
        self._open[one] = None
        try:
            with one.begun():
                yield
        finally:
            del self._open[one]

    def abort(self) -> None:
        """End whatever is still being answered."""
        for one in list(self._open):
            one.fail(shutting_down())
