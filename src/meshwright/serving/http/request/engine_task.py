"""Prompt that the engine answers, as the HTTP process sees it. Its answers become text here, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol, final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.answer_text import AnswerText
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.http.channel.engine_messages import Top


class TokenScores(NamedTuple):
    """Scores of a prompt's tokens except the first."""

    logprobs: list[float]
    top: list[Top]


class TaskListener(Protocol):
    """Listener to news of a task."""

    def notify(self, *, ended: bool) -> None:
        """Take notice of news. `ended`: the task or one of its answers has ended."""

    def fail(self, error: Exception) -> None:
        """End what waits for the task with an error."""


@final
class GrowingAnswer:
    """Answer that grows, with the part of it that is still unread."""

    __slots__ = ("at", "end_ids", "ending", "ids", "logprobs", "number", "pieces", "task", "text", "tokens", "top")

    def __init__(self, task: "EngineTask", number: int, text: AnswerText | None) -> None:
        """Start empty. `number` identifies it to the engine's process. `text` is None without a tokenizer."""
        self.task, self.number, self.text, self.end_ids = task, number, text, task.end_ids
        self.ending = ""
        """Reason as in `served_request.Ending`. Empty while it grows."""
        self.tokens = 0
        """Number of tokens so far."""
        self.at = 0.0
        """Time of the last token, by the engine's clock."""
        self.pieces: list[str] = []
        """Unread text."""
        self.ids: list[int] = []
        """Unread ids, if the task keeps ids. Likewise the log-probabilities below."""
        self.logprobs: list[float] = []
        self.top: list[Top] = []

    def take(self, token: int) -> None:
        """Add one token. A stop string ends the answer."""
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
        """End it: no token follows. Text that was held back is released, unless the answer was cancelled."""
        if self.text is not None and ending in ("stop", "length"):
            self.pieces.append(self.text.finish())
            ending = "stop" if self.text.stopped else ending
        self.ending = ending


@dataclass(slots=True, eq=False, kw_only=True)
class EngineTask:
    """Prompt for the engine, with its answers."""

    prompt: list[int]
    options: RequestOptions
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    """Tokens that end an answer and are not part of its text."""
    scored: int | None = None
    """Likeliest tokens per position of the prompt. None = the prompt is not scored."""
    with_logprobs: bool = False
    """True if log-probabilities of new tokens are needed."""
    keeps_ids: bool = False
    """True if the ids of new tokens are needed."""
    with_special: bool = False
    """True if special tokens appear in the text."""
    arrived: float = field(default_factory=monotonic)
    listener: TaskListener | None = None
    number: int = -1
    """Number that identifies it to the engine's process."""
    answers: tuple[GrowingAnswer, ...] = ()
    started: bool = False
    """True once the engine works on it."""
    cached: int = 0
    """Tokens of the prompt whose keys and values were cached."""
    scores: TokenScores | None = None
    failure: Exception | None = None
    first_token_at: float | None = None
    """Time of its first new token."""

    def open(self, number: int, answers: Iterable[int]) -> None:
        """Create its answers under these numbers."""
        self.number = number
        self.answers = tuple(GrowingAnswer(self, answer_number, self._text()) for answer_number in answers)

    def _text(self) -> AnswerText | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        hidden = frozenset[int]() if self.with_special else tokenizer.special_ids
        return AnswerText(tokenizer.decode, self.prompt, self.options.stop, tokenizer, hidden)

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def waits(self) -> bool:
        """True while the engine has not started it."""
        return not self.started and not self.ended

    @property
    def ended(self) -> bool:
        """True if no more news come."""
        if self.failure is not None:
            return True
        return bool(self.answers) and all(answer.ending for answer in self.answers)
