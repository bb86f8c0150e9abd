"""A request and its answers, as they grow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.model.generate import broken
from meshwright.serve.answer_text import AnswerText
from meshwright.serve.cached_sequence import CachedSequence, Phase
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.sampler import SampledRow
from meshwright.spec.errors import RunError

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
Ending = Literal["", "stop", "length", "cancelled", "broken", "grammar"]
"""Why an answer ended: a token or string that ends it or the end of its grammar, max_new_tokens or the model's last
position, nobody wanted it, its logits were no numbers, or its grammar went beyond a limit. Empty while it grows."""


@dataclass(slots=True, eq=False)
class ServedAnswer:
    """One continuation of a prompt."""

    options: RequestOptions
    row: SampledRow
    end_ids: frozenset[int]
    """Tokens that end it; they are kept."""
    stream: AnswerText | None
    """Makes its text; None = there is no tokenizer."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """That the model's own logits gave each."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each, the likeliest tokens and their log-probabilities."""
    text: str = ""
    """What is certain: whole characters, and nothing that a stop string may begin with."""
    ending: Ending = ""
    score: float = 0.0
    """Of an answer that beams found: its log-probabilities by the length penalty."""

    def take(self, token: int, logprob: float, top: list[tuple[int, float]], room: int) -> None:
        """One more token; `room`: how many the answer may have."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.top.append(top)
        if token in self.end_ids or self._complete(token):
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

    def _complete(self, token: int) -> bool:
        """Whether its grammar allows nothing more."""
        if self.row.grammar is None:
            return False
        self.row.grammar.take(token)
        return self.row.grammar.ended


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A prompt, what is asked for, and the answers."""

    prompt: tuple[int, ...]
    options: RequestOptions
    answers: list[ServedAnswer]
    cached: int = 0
    """Tokens of the prompt whose keys and values were in the cache."""
    sequence: CachedSequence | None = None
    """What the scheduler sees of it; None = there is nothing to compute."""

    @property
    def begun(self) -> bool:
        """Whether it no longer waits for its first step."""
        sequence = self.sequence
        return sequence is None or sequence.phase is not Phase.WAITING or bool(sequence.preemptions)

    @property
    def ended(self) -> bool:
        """Whether all answers are whole."""
        return all(answer.ending for answer in self.answers)

    def check(self) -> None:
        """RunError: an answer's logits were no numbers, or its grammar was too much."""
        for answer in self.answers:
            if answer.ending == "broken":
                raise broken()
            if answer.ending == "grammar" and answer.row.grammar is not None:
                raise RunError(f"an answer cannot be continued by its schema or regex: {answer.row.grammar.failure}")
