"""Options of a request in addition to its prompt. Each field is honoured; senseless values are refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from meshwright.spec.errors import ArgumentError

MOST_STOPS, LONGEST_STOP = 16, 256
"""Most stop strings of a request, and most characters of one: each is searched for after every token."""
MOST_LOGPROBS = 20
SEEDS = 2**63
NOT_WITH_BEAMS: Final[Mapping[str, Any]] = {
    "temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
    "stop": (), "logprobs": 0, "json_schema": None, "regex": None,
}  # fmt: skip
"""Options that choose the next token, or where one answer ends. Beams compare whole answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options for the continuation of a prompt.

    The steps come in this order: penalties and bias, grammar, temperature, top_k, top_p, min_p.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 = always the likeliest token; of equal ones that with the lowest id."""
    top_k: int = 0
    """Only the k likeliest tokens. 0 = all."""
    top_p: float = 1.0
    """Only the likeliest that together reach p of what top_k leaves (Holtzman et al. 2020, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer, and multiplies negative ones (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, times their number."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    seed: int = 0
    """Seed of the sampling. An answer depends on its own request's seed alone."""
    n: int = 1
    """Answers to the prompt, which is computed once. Answer i is sampled with seed + i."""
    beams: int = 1
    """More than one: beam search over so many beginnings, which returns the `n` answers of the best scores.

    The score is the sum of log-probabilities / number of tokens ** `length_penalty`.
    """
    length_penalty: float = 1.0
    """Above 0 it favours long answers of beams, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """Beams end when there are as many complete answers.

    False also waits until none is likely to become better, "never" until none can.
    """
    stop: tuple[str, ...] = ()
    """An answer ends before the first of these strings."""
    stop_ids: tuple[int, ...] = ()
    """An answer ends with any of these tokens, as well as with those that end a text of the model."""
    ignore_end: bool = False
    """Tokens that end a text of the model do not end the answer."""
    json_schema: Mapping[str, Any] | None = None
    """The answer is JSON of this schema, or any object for the empty one.

    Tokens that end a text are allowed once it is complete.
    """
    regex: str | None = None
    """The answer matches this regular expression from its first letter to its last."""
    logprobs: int = 0
    """Number of likeliest tokens whose log-probabilities are returned for each new token."""
    priority: int = 0
    """Lower is served first."""
    adapter: str | None = None
    """Name of an adapter that the engine has. None = the model alone."""
    salt: str | None = ""
    """Requests with one salt share prefixes in the cache. None = with nobody."""

    def __post_init__(self) -> None:
        """Raise ArgumentError, naming the field, for values without meaning."""
        self._check("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above")
        self._check("max_new_tokens", self.max_new_tokens >= 0, "0 or more")
        self._check("top_k", self.top_k >= 0, "0 (all) or more")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0")
        self._check("presence_penalty", math.isfinite(self.presence_penalty), "a number")
        self._check("frequency_penalty", math.isfinite(self.frequency_penalty), "a number")
        self._check("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "numbers by token")
        self._check("n", self.n >= 1, "at least 1")
        self._check("seed", 0 <= self.seed <= SEEDS - self.n, "between 0 and 2**63 - n")
        self._check("logprobs", 0 <= self.logprobs <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}")
        self._check("beams", self.beams >= 1, "at least 1")
        self._check("length_penalty", math.isfinite(self.length_penalty), "a number")
        self._check("early_stopping", self.early_stopping in (True, False, "never"), "True, False or 'never'")
        if self.beams > 1:
            self._check("n", self.n <= self.beams, f"at most beams={self.beams}")
            for name, plain in NOT_WITH_BEAMS.items():
                self._check(name, getattr(self, name) == plain, f"{plain!r} together with beams={self.beams}")
        self._check("regex", self.regex is None or self.json_schema is None, "left out where json_schema is given")
        self._check("ignore_end", not (self.ignore_end and self.is_constrained), "False with json_schema or regex")
        self._check("stop", len(self.stop) <= MOST_STOPS, f"at most {MOST_STOPS} strings")
        self._check(
            "stop", all(1 <= len(text) <= LONGEST_STOP for text in self.stop), f"of 1 to {LONGEST_STOP} letters"
        )

    def _check(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ArgumentError(name, getattr(self, name), f"must be {must}")

    @property
    def penalizes(self) -> bool:
        """True when the tokens so far change the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def is_constrained(self) -> bool:
        """True when the answer must follow a grammar."""
        return self.json_schema is not None or self.regex is not None
