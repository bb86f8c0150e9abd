"""What the HTTP process and the engine's process tell each other, as parts of frames.

Tokens are arrays of numbers, since there is one for each answer in each step. What is rare is JSON.
"""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.serve.request_options import RequestOptions
from meshwright.server.api_error import ApiError
from meshwright.server.server_options import ServerLimits, ServerOptions

Top = list[tuple[int, float]]
"""Likeliest tokens at one place, and their log-probabilities."""


class EngineFigures(NamedTuple):
    """What metrics say of the engine."""

    running: int = 0
    """Sequences that grow."""
    waiting: int = 0
    """Prompts that wait."""
    blocks: int = 1
    free_blocks: int = 1
    adapters: int = 0
    """That take memory."""
    adapter_bytes: int = 0
    preemptions: int = 0
    """Of all steps so far, as the following."""
    queries: int = 0
    hits: int = 0
    host_hits: int = 0
    host_saved: int = 0
    guessed: int = 0
    accepted: int = 0


_FIGURES = struct.Struct(f"<d{len(EngineFigures._fields)}q")


@dataclass(slots=True)
class StepNews:
    """What one step brought. Answers are named by numbers that the HTTP process gave them."""

    at: float = 0.0
    """When the step had ended, by the clock of the machine (`monotonic`)."""
    figures: EngineFigures = field(default_factory=EngineFigures)
    answers: list[int] = field(default_factory=list)
    """Of each new token the answer; one that has several new tokens stands here as often."""
    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Places of `tokens` that have log-probabilities, in order."""
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """Tasks that wait no longer."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Tasks whose first token this is: how many of the prompt's tokens were in the cache."""
    ended: list[tuple[int, str]] = field(default_factory=list)
    """Answers, and why they ended."""
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    """Tasks that the engine did not take: why in a word (`request`, `engine`, `defect`), and in a sentence."""

    @property
    def rare(self) -> dict[str, Any]:
        """Of what most steps have nothing, whatever there is."""
        names = ("begun", "cached", "ended", "refused")
        return {name: entries for name in names if (entries := getattr(self, name))}

    def encode(self) -> list[bytes]:
        """Parts of a frame."""
        rare = self.rare
        parts = [
            _FIGURES.pack(self.at, *self.figures),
            array("I", self.answers).tobytes(),
            array("I", self.tokens).tobytes(),
            json.dumps(rare).encode() if rare else b"",
        ]
        if self.scored:
            parts += [array("I", self.scored).tobytes(), *encode_scores(self.logprobs, self.top)]
        return parts

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "StepNews":
        """What `encode` wrote."""
        head, answers, tokens, rare, *scores = parts
        at, *figures = _FIGURES.unpack(head)
        news = cls(at, EngineFigures(*figures), _numbers("I", answers), _numbers("I", tokens))
        for name, entries in json.loads(rare).items() if rare else ():
            setattr(news, name, entries)
        if scores:
            news.scored = _numbers("I", scores[0])
            news.logprobs, news.top = decode_scores(scores[1:])
        return news


def encode_scores(logprobs: Sequence[float], top: Sequence[Top]) -> list[bytes]:
    """Log-probabilities of tokens, and the likeliest in the place of each, as four arrays."""
    pairs = [pair for row in top for pair in row]
    return [
        array("d", logprobs).tobytes(),
        array("I", map(len, top)).tobytes(),
        array("I", [token for token, _ in pairs]).tobytes(),
        array("d", [logprob for _, logprob in pairs]).tobytes(),
    ]


def decode_scores(parts: Sequence[bytes]) -> tuple[list[float], list[Top]]:
    """What `encode_scores` wrote."""
    pairs = zip(_numbers("I", parts[2]), _numbers("d", parts[3]), strict=True)
    top = [[next(pairs) for _ in range(count)] for count in _numbers("I", parts[1])]
    return _numbers("d", parts[0]), top


def _numbers(kind: str, content: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(content)
    return numbers.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPrompt:
    """A prompt for the engine."""

    task: int
    first_answer: int
    """Its answers have this number and those that follow."""
    prompt: Sequence[int]
    options: RequestOptions
    """Without stop strings: they are searched for where text is made, in the HTTP process."""
    with_logprobs: bool = False
    """Whether each token's log-probability is wanted."""
    scored: int | None = None
    """Likeliest tokens at each place of the prompt; None = the prompt is not scored."""

    def encode(self) -> list[bytes]:
        """Parts of a frame."""
        asked = {
            one.name: getattr(self.options, one.name)
            for one in fields(RequestOptions)
            if one.name != "stop" and getattr(self.options, one.name) != getattr(_PLAIN, one.name)
        }
        if "logit_bias" in asked:
            asked["logit_bias"] = list(asked["logit_bias"].items())
        rest = [self.task, self.first_answer, self.with_logprobs, self.scored, asked]
        return [json.dumps(rest).encode(), array("I", self.prompt).tobytes()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "AddedPrompt":
        """What `encode` wrote."""
        task, first, with_logprobs, scored, asked = json.loads(parts[0])
        if "logit_bias" in asked:
            asked["logit_bias"] = dict(asked["logit_bias"])
        if "stop_ids" in asked:
            asked["stop_ids"] = tuple(asked["stop_ids"])
        return cls(
            task=task, first_answer=first, prompt=_numbers("I", parts[1]), options=RequestOptions(**asked),
            with_logprobs=with_logprobs, scored=scored,
        )  # fmt: skip


_PLAIN = RequestOptions()


def encode_setup(name: str, options: ServerOptions) -> list[bytes]:
    """How the server runs, and what the model is called in metrics. Keys are never on a command line."""
    document = asdict(options) | {"adapter_folder": options.adapter_folder and str(options.adapter_folder)}
    return [json.dumps([name, document]).encode()]


def decode_setup(parts: Sequence[bytes]) -> tuple[str, ServerOptions]:
    """What `encode_setup` wrote."""
    name, document = json.loads(parts[0])
    limits, folder, keys = document.pop("limits"), document.pop("adapter_folder"), document.pop("keys")
    options = ServerOptions(
        limits=ServerLimits(**limits), adapter_folder=folder and Path(folder), keys=tuple(keys), **document
    )
    return name, options


@dataclass(frozen=True, slots=True)
class CancelledAnswers:
    """Answers of one task that nobody wants any more."""

    task: int
    answers: Sequence[int] | None = None
    """Their numbers; None = all that grow."""

    def encode(self) -> list[bytes]:
        """Parts of a frame."""
        return [json.dumps([self.task, self.answers]).encode()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "CancelledAnswers":
        """What `encode` wrote."""
        return cls(*json.loads(parts[0]))


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """An adapter that is loaded from a folder, or unloaded."""

    call: int
    name: str
    path: str | None
    """None = it is unloaded."""

    def encode(self) -> list[bytes]:
        """Parts of a frame."""
        return [json.dumps([self.call, self.name, self.path]).encode()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "AdapterCall":
        """What `encode` wrote."""
        return cls(*json.loads(parts[0]))


@dataclass(frozen=True, slots=True)
class AdapterReply:
    """What became of an AdapterCall."""

    call: int
    names: Sequence[str]
    """Of adapters that are loaded now."""
    error: ApiError | None = None

    def encode(self) -> list[bytes]:
        """Parts of a frame."""
        error = self.error
        words = error and [error.status, error.message, error.code, error.param, error.retry_seconds]
        return [json.dumps([self.call, list(self.names), words]).encode()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "AdapterReply":
        """What `encode` wrote."""
        call, names, words = json.loads(parts[0])
        error = None
        if words:
            status, message, code, param, retry = words
            error = ApiError(status, message, code=code, param=param, retry_seconds=retry)
        return cls(call, names, error)
