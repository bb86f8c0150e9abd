"""Guesses of the next tokens, which the model then computes all at once (speculative decoding, arXiv:2211.17192).

A guess is looked up: if the last tokens occurred in the text before, what followed them there may follow again. Or a
small model makes it (step_loop.py). The model computes all guessed tokens in one step. Behind each row it draws the
token that it would have drawn without guesses, with the same random number. If that is the guessed one, the next row
counts too. So an answer is the same as without guesses, token by token, greedy or sampled.

This is rejection sampling: a looked-up token d is accepted with the model's own p(d), and its replacement has the
distribution of the rest. A small model draws its guess with the same random number, so both agree whenever they can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.spec.errors import ArgumentError, argument

SHORTEST = 2
"""Tokens of the shortest run that is looked up."""
LONGEST_PAUSE = 16
"""Most steps without a guess, for a sequence whose guesses are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Options for guesses of an engine."""

    tokens: int = 8
    """Most tokens that are guessed at once.

    A sequence's own number adapts: twice as many after all were accepted, else one more than were accepted. After all
    were wrong, some steps have no guess.
    """
    ngram: int = 4
    """Tokens of the longest run that is looked up in prompt and answer. Shorter ones follow, down to 2."""
    draft: Transformer | None = None
    """A small model of the same vocabulary that guesses, in place of the look-up."""

    def __post_init__(self) -> None:
        """Raise ArgumentError when there is nothing to guess, or to look up."""
        if self.tokens < 1 or self.ngram < SHORTEST:
            raise ArgumentError(
                "tokens",
                self.tokens,
                sentence=(
                    f"guesses have {argument('tokens', self.tokens)} and ngram={self.ngram}: they must be at least 1 "
                    f"and {SHORTEST}"
                ),
            )

    def check(self, model: Transformer, longest: int) -> None:
        """Raise ArgumentError when the draft model does not fit the model and sequences of that many tokens."""
        if self.draft is None:
            return
        if self.draft.shape.vocab != model.shape.vocab:
            raise ArgumentError(
                "draft",
                sentence=(
                    f"the draft model has {self.draft.shape.vocab:,} tokens in its vocabulary, and the model "
                    f"{model.shape.vocab:,}: take a draft model with the same tokenizer"
                ),
            )
        if self.draft.shape.max_positions < longest:
            raise ArgumentError(
                "longest",
                sentence=(
                    f"the draft model has {self.draft.shape.max_positions:,} positions: give the engine "
                    f"{argument('longest', self.draft.shape.max_positions)}"
                ),
            )


@final
class NgramIndex:
    """Last occurrence of each run of tokens in one text."""

    def __init__(self, longest: int) -> None:
        """Take the tokens of the `longest` run."""
        self._longest, self._known = longest, 0
        self._behind: dict[tuple[int, ...], int] = {}

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that followed an earlier occurrence of the text's last tokens."""
        for end in range(self._known, len(tokens)):  # the run that ends the text is not among them
            for length in range(SHORTEST, min(self._longest, end) + 1):
                self._behind[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)
        for length in range(min(self._longest, len(tokens)), SHORTEST - 1, -1):
            position = self._behind.get(tuple(tokens[-length:]))
            if position is not None:
                continuation = list(tokens[position : position + count])
                while len(continuation) < count:  # it follows itself
                    continuation += continuation[: count - len(continuation)]
                return continuation
        return []


@dataclass(slots=True)
class _Record:
    """Statistics of one sequence."""

    index: NgramIndex
    length: int
    """Tokens of the next guess."""
    pause: int = 0
    """Steps without a guess after the next wrong one."""
    waits: int = 0
    """Steps without a guess from now on."""


@dataclass(slots=True)
class GuessCounts:
    """Counts over all sequences so far."""

    guessed: int = 0
    accepted: int = 0
    steps: int = 0
    """Rows whose next token was computed together with guesses."""


@final
class Guesser:
    """Chooser of the tokens that sequences guess.

    A guess stands at the end of `sequence.tokens` while it is computed.
    """

    def __init__(self, options: Speculation) -> None:
        self._options = options
        self._records: dict[CachedSequence, _Record] = {}
        self.counts = GuessCounts()

    def propose(self, running: Sequence[CachedSequence]) -> None:
        """Let decoding sequences guess. With a draft model zeros stand for its guesses until it has made them."""
        for sequence in running:
            # Only decoding sequences: a prompt's next tokens are known.
            if len(sequence.tokens) - sequence.computed != 1 or len(sequence.tokens) == sequence.prompt:
                continue
            record = self._records.get(sequence)
            if record is None:
                record = self._records[sequence] = _Record(NgramIndex(self._options.ngram), self._options.tokens)
            record.waits = max(0, record.waits - 1)
            # The last token is drawn, never guessed: nothing follows it.
            most = min(record.length, sequence.limit - len(sequence.tokens) - 1)
            if record.waits or most < 1:
                continue
            guess = [0] * most if self._options.draft else record.index.guess(sequence.tokens, most)
            sequence.tokens += guess
            sequence.guessed = len(guess)

    def trim_guesses(self, plan: StepPlan) -> dict[CachedSequence, int]:
        """Drop guesses that the step does not compute, and return {sequence: number of the rest}, without zeros."""
        counts = {}
        for sequence, count in plan.chunks.items():
            if sequence.guessed:
                sequence.drop_guesses(keep=count - 1)
                if sequence.guessed:
                    counts[sequence] = sequence.guessed
        return counts

    def learn(self, sequence: CachedSequence, guessed: int, accepted: int) -> None:
        """Note how many of a sequence's guesses were right."""
        record = self._records[sequence]
        self.counts.guessed += guessed
        self.counts.accepted += accepted
        self.counts.steps += 1
        if accepted == guessed:
            record.length = min(self._options.tokens, 2 * max(guessed, record.length))
        else:
            # One more than was right, so that a sequence finds back to longer guesses.
            record.length = accepted + 1
        record.pause = 0 if accepted else min(LONGEST_PAUSE, 2 * record.pause + 1)
        record.waits = record.pause + bool(record.pause)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop the statistics of an ended sequence."""
        self._records.pop(sequence, None)


@dataclass(slots=True)
class Refuted:
    """Tracker of the rows of a step that count, as its tokens are drawn in order."""

    guesses: dict[CachedSequence, list[int]]
    taken: dict[CachedSequence, int] = field(default_factory=dict)
    _ended: set[CachedSequence] = field(default_factory=set)

    def counts(self, sequence: CachedSequence) -> bool:
        """Return whether the next row of a sequence counts: all guesses before it were right."""
        return sequence not in self._ended

    def take(self, sequence: CachedSequence, token: int, *, ended: bool) -> None:
        """Note the token of a row. `ended`: nothing may follow it."""
        index = self.taken.get(sequence, 0)
        self.taken[sequence] = index + 1
        guess = self.guesses.get(sequence, [])
        if ended or index >= len(guess) or guess[index] != token:
            self._ended.add(sequence)
