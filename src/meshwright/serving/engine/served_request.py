"""A request and its growing answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.model.generate import broken_model_error
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.answers.tool_calls import AnswerText
from meshwright.serving.engine.cache.blocks import CachedSequence, Phase
from meshwright.serving.engine.sampler import SampledRow
from meshwright.spec.errors import RunError

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
Ending = Literal["", "stop", "length", "cancelled", "broken", "grammar"]
"""Why an answer ended. Empty = it grows.

stop: a token, a string or the end of its grammar. length: max_new_tokens or the model's last position. cancelled: by
its client. broken: logits that are not finite. grammar: a limit of its grammar.
"""


@dataclass(slots=True, eq=False)
class ServedAnswer:
    """One continuation of a prompt."""

    options: RequestOptions
    row: SampledRow
    end_ids: frozenset[int]
    """Tokens that end it. They are kept."""
    stream: AnswerText | None
    """Converter into text. None = there is no tokenizer."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities by the model's own logits."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens and log-probabilities at each token."""
    text: str = ""
    """Text that is certain: whole characters, and no beginning of a stop string."""
    ending: Ending = ""
    score: float = 0.0
    """Score of an answer of beams: log-probabilities by the length penalty."""

    def take(self, token: int, logprob: float, top: list[tuple[int, float]], room: int) -> None:
        """Add a token. `room`: tokens that the answer may have."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.top.append(top)
        if token in self.end_ids or self._completes_grammar(token):
            self.ending = "stop"
        elif len(self.ids) >= room:
            self.ending = "length"
        if self.stream is None:
            return
        if token not in self.end_ids:
            self.text += self.stream.push(token)
        if self.ending:
            self.text += self.stream.finish()
        if self.stream.stopped:
            self.ending = "stop"

    def _completes_grammar(self, token: int) -> bool:
        """Advance the grammar, and return whether it allows nothing more."""
        if self.row.grammar is None:
            return False
        self.row.grammar.take(token)
        return self.row.grammar.ended


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A prompt, its options, and the answers."""

    prompt: tuple[int, ...]
    options: RequestOptions
    answers: list[ServedAnswer]
    cached: int = 0
    """Prompt tokens whose keys and values were in the cache."""
    sequence: CachedSequence | None = None
    """Its sequence in the scheduler. None = there is nothing to compute."""

    @property
    def has_started(self) -> bool:
        """True once it no longer waits for its first step."""
        sequence = self.sequence
        return sequence is None or sequence.phase is not Phase.WAITING or bool(sequence.preemptions)

    @property
    def ended(self) -> bool:
        """True when all answers are complete."""
        return all(answer.ending for answer in self.answers)

    def check(self) -> None:
        """Raise RunError if an answer's logits were not finite, or its grammar exceeded a limit."""
        for answer in self.answers:
            if answer.ending == "broken":
                raise broken_model_error()
            if answer.ending == "grammar" and answer.row.grammar is not None:
                raise RunError(f"an answer cannot be continued by its schema or regex: {answer.row.grammar.failure}")
