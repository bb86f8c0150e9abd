"""The loop of an engine's steps: planned, launched, and read once the device has drawn their tokens.

On a GPU a step is launched before the tokens of the one before it are read (`run_ahead`). Its rows take these tokens on
the device; meanwhile -1 - r in a sequence stands for the token of row r. So the device computes while the host reads,
plans and hands out tokens, as with vLLM's asynchronous scheduling and SGLang's overlap.

The host then learns one step late that a token or a stop string ends an answer, that logits are not finite, or that the
device examined too few tokens. That sequence's row in the step launched meanwhile is dropped: the position that it
wrote is unused, or computed again. Lengths end an answer without delay.

A step waits for earlier tokens if something on the host depends on them: grammars, penalties, guesses, beams, other
ranks. It also waits if sequences would have to release blocks, which must not be reused before their numbers are known
to be finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from meshwright.serving.engine.beams import BeamGroups, BeamSearch
from meshwright.serving.engine.cache.blocks import CachedSequence, Phase
from meshwright.serving.engine.cache.paged_cache import to_device
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.sampler import DrawnTokens, SampledRow, draw, sample
from meshwright.serving.engine.scheduler import Scheduler, StepPlan
from meshwright.serving.engine.served_request import ServedAnswer, ServedRequest
from meshwright.serving.engine.serving_record import ServingRecorder
from meshwright.serving.engine.speculation import Guesser, Refuted


@final
class DraftModel:
    """Source of guesses. Use under `torch.no_grad`."""

    def __init__(self, runner: Runner) -> None:
        """Take the runner of the small model, over a cache of as many blocks of the same size."""
        self.runner = runner

    def fill(
        self, plan: StepPlan, guessed: Mapping[CachedSequence, int], rows: Mapping[CachedSequence, SampledRow]
    ) -> None:  # fmt: skip
        """Compute what the step computes, and replace each guess by a token.

        A guess is drawn with the random number that the large model will use, so both draw the same token where they
        agree.
        """
        guesses: dict[CachedSequence, list[int]] = {sequence: [] for sequence in guessed}
        first = {sequence: count - guessed.get(sequence, 0) for sequence, count in plan.chunks.items()}
        todo, step = first, 0
        self.runner.cache.carry_out(plan.moves)
        while todo:
            owners, logits = self.runner.run(StepPlan(todo), behind=step)
            drawing = [
                row for row, sequence in enumerate(owners) if len(guesses.get(sequence, ())) < guessed.get(sequence, 0)
            ]
            if drawing:
                self._draw(logits[drawing], [owners[row] for row in drawing], guesses, rows)
            step += 1
            todo = {sequence: 1 for sequence, count in guessed.items() if step <= count}

    def _draw(
        self, logits: torch.Tensor, owners: list[CachedSequence], guesses: dict[CachedSequence, list[int]],
        rows: Mapping[CachedSequence, SampledRow],
    ) -> None:  # fmt: skip
        sampled = sample(logits, [extend_row(rows[owner], guesses[owner]) for owner in owners])
        for sequence, token in zip(owners, sampled.tokens, strict=True):
            position = len(sequence.tokens) - sequence.guessed + len(guesses[sequence])
            sequence.tokens[position] = token
            guesses[sequence].append(token)


def extend_row(row: SampledRow, guess: list[int]) -> SampledRow:
    """Return a row as it is after further guesses."""
    return SampledRow(row.options, row.seed, row.prompt, [*row.made, *guess]) if guess else row


@dataclass(slots=True, eq=False, kw_only=True)
class _Launched:
    """A step that the device computes."""

    plan: StepPlan
    owners: Sequence[CachedSequence]
    """Sequences of the rows that the runner computed."""
    logits: Tensor | None
    """(owners, V), only for beams."""
    guesses: dict[CachedSequence, list[int]]
    sequences: list[CachedSequence] = field(default_factory=list)
    """Sequences of the R drawn rows.

    Until `_commit`, further answers of a prompt have the sequence of the first.
    """
    grown: list[tuple[ServedRequest, ServedAnswer]] = field(default_factory=list)
    """Requests and answers of these rows."""
    forked: list[tuple[CachedSequence, int]] = field(default_factory=list)
    """Sequences that others continue, and the first row of these."""
    drawn: DrawnTokens | None = None
    dropped: set[CachedSequence] = field(default_factory=set)
    """Sequences whose row was computed from a wrong token."""


@final
class StepLoop:
    """Answers that grow, step by step. Use under `torch.no_grad`."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, draft: DraftModel | None, guesser: Guesser | None,
        run_ahead: bool,
    ) -> None:  # fmt: skip
        """Set `run_ahead` to launch steps before the tokens of the one before are read, if nothing forbids it."""
        self.runner, self.draft, self.guesser, self.run_ahead = runner, draft, guesser, run_ahead
        self.recorder: ServingRecorder | None = None
        self.ahead = 0
        """Steps that were launched before the tokens of the one before were read."""
        self._scheduler = scheduler
        self._growing: dict[CachedSequence, tuple[ServedRequest, ServedAnswer]] = {}
        self._waiting: dict[CachedSequence, ServedRequest] = {}  # further answers begin once the prompt is computed
        # Not a method of the loop, which would hold itself, and so the cache.
        self._drop_broken = partial(_drop_broken, runner, scheduler)
        self._beams = BeamGroups(scheduler, self._drop_broken)
        self._next: _Launched | None = None

    @property
    def idle(self) -> bool:
        """True when no answer grows."""
        return not self._growing and self._beams.idle

    def begin(self, sequence: CachedSequence, request: ServedRequest) -> None:
        """Let a request's answers grow behind the scheduler's sequence of its prompt."""
        self._growing[sequence] = request, request.answers[0]
        if len(request.answers) > 1:
            self._waiting[sequence] = request

    def search(self, sequence: CachedSequence, request: ServedRequest, search: BeamSearch, room: int) -> None:
        """Let beams grow behind the sequence."""
        self._beams.begin(sequence, request, search, room)

    def cancel(self, request: ServedRequest, answers: Sequence[ServedAnswer]) -> None:
        """End these answers of a request, and its beams. Blocks are free at once."""
        for sequence, (_, answer) in list(self._growing.items()):
            if answer in answers:
                self._end(sequence)
        self._beams.cancel(request)
        if not self._growing:
            self._next = None

    def step(self) -> list[ServedAnswer]:
        """Compute one step, and return the answers with one more token, or several after right guesses.

        Answers of beams are returned when they are complete.
        """
        # The step may have been launched while the one before was read.
        step, self._next = self._next or self._launch(None), None
        self._commit(step)
        if self.recorder is not None:
            self.recorder.note_blocks(step.plan)
        if self._can_run_ahead():
            # The scheduler plans by lengths, so unread tokens must have a place in the text.
            self._append_placeholders(step)
            if self._scheduler.fits_next:
                try:
                    self._next = self._launch(step.drawn)
                except BaseException:  # the engine may go on, but never from placeholders
                    self._read(step)
                    raise
                self.ahead += 1
        whole = [] if step.logits is None else self._beams.take(step.owners, step.logits)
        grown = self._read(step)
        if self.recorder is not None:
            self.recorder.note_tokens()
        if not self._growing:
            self._next = None
        return [*whole, *grown]

    def _can_run_ahead(self) -> bool:
        """Return whether no growing answer needs its tokens on the host before the next is drawn."""
        if not self.run_ahead or self.guesser is not None or not self._beams.idle:
            return False
        return not any(answer.row.needs_host for _, answer in self._growing.values())

    def _launch(self, before: DrawnTokens | None) -> _Launched:
        """Plan the next step and give it to the device. `before`: unread tokens of the step before."""
        if self.guesser is not None:
            growing = self._growing
            decoding = [sequence for sequence in self._scheduler.running if sequence in growing]
            self.guesser.propose([each for each in decoding if growing[each][1].row.grammar is None])
        plan = self._scheduler.plan()
        guesses = self._guesses(plan)
        owners, logits = self.runner.run(plan, drawn=None if before is None else before.tokens)
        # Guesses were only input: tokens count once they are drawn.
        for sequence in guesses:
            sequence.drop_guesses()
        beams = not self._beams.idle
        step = _Launched(plan=plan, owners=owners, logits=logits if beams else None, guesses=guesses)
        rows = [row for row, each in enumerate(owners) if each in self._growing] if beams else list(range(len(owners)))
        step.sequences = [owners[row] for row in rows]
        step.grown = [self._growing[sequence] for sequence in step.sequences]
        for row, sequence in enumerate(step.sequences.copy()):
            request = self._waiting.get(sequence)
            if request is not None:
                step.forked.append((sequence, len(step.sequences)))
                step.grown += [(request, answer) for answer in request.answers[1:]]
                step.sequences += [sequence] * (len(request.answers) - 1)
                rows += [rows[row]] * (len(request.answers) - 1)
        if rows:
            step.drawn = draw(_select_rows(logits, rows), self._sampled_rows(step))
        return step

    def _guesses(self, plan: StepPlan) -> dict[CachedSequence, list[int]]:
        if self.guesser is None:
            return {}
        guessed = self.guesser.trim_guesses(plan)
        if self.draft is not None:
            self.draft.fill(plan, guessed, {owner: answer.row for owner, (_, answer) in self._growing.items()})
        return {sequence: sequence.tokens[-count:] for sequence, count in guessed.items()}

    def _sampled_rows(self, step: _Launched) -> list[SampledRow]:
        """Return the state of each drawn row. Rows of guesses follow those before them."""
        if not step.guesses:
            return [answer.row for _, answer in step.grown]
        behind, rows, before = 0, list[SampledRow](), None
        for sequence, (_, answer) in zip(step.sequences, step.grown, strict=True):
            behind = behind + 1 if sequence is before and sequence in step.guesses else 0
            before = sequence
            rows.append(extend_row(answer.row, step.guesses[sequence][:behind]) if behind else answer.row)
        return rows

    def _commit(self, step: _Launched) -> None:
        """Note that what a step computes is in the cache, for all that follows it on the device."""
        growing, left_out = self._growing, {*step.dropped, *step.guesses}
        chunks = {
            sequence: count for sequence, count in step.plan.chunks.items()
            if sequence not in left_out and sequence.phase is Phase.RUNNING
        }  # fmt: skip
        self._scheduler.advance(StepPlan(chunks))
        for sequence, first in step.forked:
            if sequence in growing:
                del self._waiting[sequence]
                for row, child in enumerate(self._scheduler.fork(sequence), first):
                    step.sequences[row] = child
                    growing[child] = step.grown[row]
        for sequence, (request, answer) in zip(step.sequences, step.grown, strict=True):
            if not answer.ids:
                request.cached = sequence.cached

    def _append_placeholders(self, step: _Launched) -> None:
        """Append placeholders for tokens that only the device knows, unless the length ends with them."""
        for row, sequence in enumerate(step.sequences):
            if sequence in self._growing and sequence not in step.dropped:
                self._growing[sequence][1].row.unread = 1
                if len(sequence.tokens) + 1 < sequence.limit:
                    sequence.tokens.append(-1 - row)

    def _read(self, step: _Launched) -> list[ServedAnswer]:
        """Wait for the tokens of a step, and give answers those that count."""
        if step.drawn is None:
            return []
        sampled, rows, grown = step.drawn.read(), Refuted(step.guesses), dict[ServedAnswer, CachedSequence]()
        for row, (sequence, (request, answer)) in enumerate(zip(step.sequences, step.grown, strict=True)):
            # It ended meanwhile, or this row was computed from a token that was drawn again.
            if sequence not in self._growing or sequence in step.dropped:
                continue
            if step.guesses and not rows.counts(sequence):
                continue
            grown[answer], token, tokens = sequence, sampled.tokens[row], sequence.tokens
            if answer.row.unread:
                answer.row.unread = 0
                if tokens[-1] < 0:
                    tokens.pop()
            if sampled.broken[row]:
                answer.ending = "broken"
                self._drop_broken(sequence)
            elif answer.row.grammar is not None and answer.row.grammar.failure:
                answer.ending = "grammar"
            else:
                tokens.append(token)
                room = sequence.limit - len(request.prompt)
                answer.take(token, sampled.logprobs[row], sampled.top[row], room)
                # The next step was computed behind the device's own token, which was not the right one.
                if row in sampled.redrawn and self._next is not None:
                    self._next.dropped.add(sequence)
            if step.guesses:
                rows.take(sequence, token, ended=bool(answer.ending))
        self._learn(step, rows)
        for answer, sequence in grown.items():
            if answer.ending:
                self._end(sequence)
        return list(grown)

    def _learn(self, step: _Launched, rows: Refuted) -> None:
        for sequence, guess in step.guesses.items():
            count = rows.taken[sequence]
            if self._growing[sequence][1].ending != "broken":  # its blocks must not be found
                self._scheduler.advance(StepPlan({sequence: count}))
            if self.guesser is not None:
                self.guesser.learn(sequence, len(guess), count - 1)

    def _end(self, sequence: CachedSequence) -> None:
        self._scheduler.end(sequence)
        if self.guesser is not None:
            self.guesser.forget(sequence)
        del self._growing[sequence]
        self._waiting.pop(sequence, None)


def _drop_broken(runner: Runner, scheduler: Scheduler, sequence: CachedSequence) -> None:
    """End a sequence whose logits are not finite. Blocks that only it held become zero."""
    runner.clear(scheduler.tables.withdraw(sequence))
    scheduler.end(sequence)


def _select_rows(logits: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, to_device(rows, logits.device))
