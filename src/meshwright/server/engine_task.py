"""One prompt that the engine answers, as the HTTP process sees it: its answers become text here, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol, final

from meshwright.data.tokenizer import Tokenizer
from meshwright.serve.answer_text import AnswerText
from meshwright.serve.request_options import RequestOptions
from meshwright.server.engine_messages import Top


class TokenScores(NamedTuple):
    """Of a prompt's tokens but the first."""

    logprobs: list[float]
    top: list[Top]


class TaskListener(Protocol):
    """Who waits for a task."""

    def changed(self, *, ended: bool) -> None:
        """There is news of it; `ended`: it or one of its answers has ended."""

    def fail(self, error: Exception) -> None:
        """End what waits for it with an error."""


@final
class GrowingAnswer:
    """One answer: how much of it came, and what of that nobody has read yet."""

    __slots__ = ("at", "end_ids", "ending", "ids", "logprobs", "number", "pieces", "task", "text", "tokens", "top")

    def __init__(self, task: "EngineTask", number: int, text: AnswerText | None) -> None:
        """`number`: by which the engine's process calls it; `text`: None = there is no tokenizer."""
        self.task, self.number, self.text, self.end_ids = task, number, text, task.end_ids
        self.ending = ""
        """As `served_request.Ending`; empty while it grows."""
        self.tokens = 0
        """How many came."""
        self.at = 0.0
        """When the last one came, by the engine's clock."""
        self.pieces: list[str] = []
        """Of text, unread."""
        self.ids: list[int] = []
        """Unread ones, if the task keeps ids; likewise what follows, if it keeps log-probabilities."""
        self.logprobs: list[float] = []
        self.top: list[Top] = []

    def take(self, token: int) -> None:
        """One more token. It ends where a stop string came."""
        self.tokens += 1
        if self.task.keeps_ids:
            self.ids.append(token)
        text = self.text
        if text is not None and token not in self.end_ids:
            piece = text.push(token)
            if piece:
                self.pieces.append(piece)
            if text.stopped:
                self.ending = "stop"

    def end(self, ending: str) -> None:
        """No token follows: what was held back is text, too, unless it was given up."""
        if self.text is not None and ending in ("stop", "length"):
            self.pieces.append(self.text.finish())
            ending = "stop" if self.text.stopped else ending
        self.ending = ending


@dataclass(slots=True, eq=False, kw_only=True)
class EngineTask:
    """One prompt for the engine."""

    prompt: list[int]
    options: RequestOptions
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    """Tokens that end an answer, and are no text."""
    scored: int | None = None
    """Likeliest tokens at each place of the prompt; None = the prompt is not scored."""
    with_logprobs: bool = False
    """Whether log-probabilities of new tokens are wanted."""
    keeps_ids: bool = False
    """Whether the ids of new tokens are wanted."""
    with_special: bool = False
    """Whether special tokens are spelled in the text."""
    arrived: float = field(default_factory=monotonic)
    listener: TaskListener | None = None
    number: int = -1
    """By which the engine's process calls it."""
    answers: tuple[GrowingAnswer, ...] = ()
    begun: bool = False
    """Whether the engine has begun with it."""
    cached: int = 0
    """Tokens of the prompt whose keys and values were in the cache."""
    scores: TokenScores | None = None
    failure: Exception | None = None
    began: float | None = None
    """When the first news came."""

    def open(self, number: int, answers: Iterable[int]) -> None:
        """Begin its answers, under these numbers."""
        self.number = number
        self.answers = tuple(GrowingAnswer(self, one, self._text()) for one in answers)

    def _text(self) -> AnswerText | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        hidden = frozenset[int]() if self.with_special else tokenizer.special_ids
        return AnswerText(tokenizer.decode, self.prompt, self.options.stop, tokenizer, hidden)

    @property
    def tokens(self) -> int:
        """New ones of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def waits(self) -> bool:
        """Whether the engine has not begun with it."""
        return not self.begun and not self.ended

    @property
    def ended(self) -> bool:
        """Whether no more news come."""
        if self.failure is not None:
            return True
        return bool(self.answers) and all(answer.ending for answer in self.answers)
