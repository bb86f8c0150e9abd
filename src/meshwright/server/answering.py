"""The answers to one HTTP request while they grow, and how many requests there may be."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.serve.served_request import Ending, ServedAnswer
from meshwright.server.access import Tenant
from meshwright.server.api_error import ApiError, refused, shutting_down
from meshwright.server.engine_thread import EngineTask, EngineThread
from meshwright.server.server_options import ServerLimits
from meshwright.spec.errors import RunError


class ClientGone(Exception):
    """Nobody reads the answers any more."""


class AnswerPart(NamedTuple):
    """What is new of one answer."""

    choice: int
    """Of all answers of the HTTP request."""
    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    ending: Ending


class Answering:
    """One HTTP request: a task for each of its prompts. Use `begun` around it, which cancels what is left over."""

    def __init__(self, engine: EngineThread, tasks: Sequence[EngineTask], news: asyncio.Event, limit_s: float) -> None:
        """`news`: the event of all tasks; `limit_s`: from now to the last token."""
        self.tasks = list(tasks)
        self._engine, self._news = engine, news
        self._until = asyncio.get_running_loop().time() + limit_s
        self._failure: Exception | None = None
        self._read: list[list[tuple[int, int] | None]] = [[(0, 0)] * task.options.n for task in tasks]

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Inside, the engine works on it."""
        for task in self.tasks:
            self._engine.submit(task)
        try:
            yield
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free what the engine has of it. It may be called again."""
        for task in self.tasks:
            if not task.ended:
                self._engine.cancel(task)

    def fail(self, error: Exception) -> None:
        """End it with an error, or without a word where that is ClientGone."""
        self.cancel()
        self._failure = self._failure or error
        self._news.set()

    @property
    def ended(self) -> bool:
        """Whether all answers are whole."""
        return all(task.ended for task in self.tasks)

    async def grown(self) -> AsyncIterator[None]:
        """Each time there is news, until all answers are whole. ApiError, ClientGone."""
        while True:
            try:
                async with asyncio.timeout_at(self._until):
                    await self._news.wait()
            except TimeoutError:
                self.cancel()
                raise ApiError(504, "the answer took longer than a request may", code="deadline_exceeded") from None
            self._news.clear()
            self._check()
            yield
            if self.ended:
                return

    def parts(self) -> Iterator[AnswerPart]:
        """What is new of each answer since the last call; one that has ended comes once more."""
        choice = 0
        for task, read in zip(self.tasks, self._read, strict=True):
            for number, progress in enumerate(task.progress):
                before, now = read[number], (progress.tokens, progress.characters)
                if before is not None and (before != now or progress.ending):
                    assert task.request is not None
                    read[number] = None if progress.ending else now
                    yield _part(choice + number, task.request.answers[number], before, now, progress.ending)
            choice += task.options.n

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        for task in self.tasks:
            if isinstance(task.failure, RunError):
                raise ApiError(503, str(task.failure), code="engine_failed", retry_seconds=30)
            if task.failure is not None:
                raise refused(str(task.failure))
            if any(one.ending == "grammar" for one in task.progress):
                raise refused(
                    "the answer cannot be continued by its schema or regular expression: take a simpler one",
                    "response_format", "grammar_failed",
                )  # fmt: skip
            if any(one.ending == "broken" for one in task.progress):
                raise ApiError(500, "the model's logits are no numbers: its weights are broken", code="broken_model")


def _part(
    choice: int, answer: ServedAnswer, read: tuple[int, int], now: tuple[int, int], ending: Ending
) -> AnswerPart:  # fmt: skip
    begin, end = read[0], now[0]
    return AnswerPart(
        choice, answer.text[read[1] : now[1]], answer.ids[begin:end], answer.logprobs[begin:end], answer.top[begin:end],
        ending,
    )  # fmt: skip


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
