"""Choice of the sequences and numbers of tokens of the next step.

Continuous batching: a step has one new token of every running sequence that decodes, and the rest of its budget goes to
chunks of prompts. Sequences are served by priority, then in order of arrival.

When blocks run out, the running sequence that is last in this order releases its own and waits again. It is computed
once more later, or found in the cache. The first in the order is never preempted, can have every block (`add` refuses
what would not fit alone), and computes at least one token per step. So it ends, and then the next one is first.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

from meshwright.serving.engine.cache.blocks import HOSTED, BlockTables, CachedSequence, Move, Phase, first_key
from meshwright.spec.errors import ArgumentError, argument

WATERMARK = 0.01
"""Share of blocks that stays free when a sequence begins, so that running ones can grow."""


@dataclass(slots=True)
class StepPlan:
    """Work of the next step."""

    chunks: dict[CachedSequence, int] = field(default_factory=dict)
    """Number of tokens per sequence, behind those that are computed."""
    moves: list[Move] = field(default_factory=list)
    """Moves to carry out before, in this order."""


class Scheduler:
    """Sequences that wait and run over one pool of blocks."""

    def __init__(
        self, tables: BlockTables, *, most_tokens: int, most_sequences: int, prompt_tokens: int | None = None
    ) -> None:
        """Create an empty scheduler. Raises ArgumentError.

        Args:
            most_tokens: Tokens of a step, more than `most_sequences`.
            most_sequences: Sequences that run at once.
            prompt_tokens: Prompt tokens in a step in which others decode. None = all that is left of it.
        """
        check_budget(most_tokens, most_sequences)
        self.tables, self.most_tokens, self.most_sequences = tables, most_tokens, most_sequences
        self.prompt_tokens = most_tokens if prompt_tokens is None else prompt_tokens
        self.running: list[CachedSequence] = []
        """In order of rank."""
        self.preemptions = 0
        self._waiting: list[tuple[tuple[int, int], CachedSequence]] = []
        self._refused: tuple[CachedSequence, int, int] | None = None  # who found no room: free blocks, and who ran
        self._number = 0
        self._watermark = int(tables.pool.size * WATERMARK)

    def add(
        self,
        tokens: Sequence[int],
        limit: int,
        *,
        priority: int = 0,
        salt: bytes | None = b"",
        adapter: int = 0,
        copies: int = 1,
        together: bool = False,
    ) -> CachedSequence:
        """Add a sequence to be continued up to `limit` tokens.

        Args:
            salt: Salt of its prefix. None = nobody finds it.
            adapter: Its number, 0 = none.
            together: The cache must hold all copies at once.

        Raises:
            ArgumentError: The cache could never hold it.
        """
        most, size = self.tables.most_blocks(limit - 1, self.most_tokens), self.tables.pool.size
        if most > size:
            raise ArgumentError(
                "max_tokens",
                sentence=(
                    f"the cache is too small: {limit} tokens need {most} blocks, and it has {size}. Enlarge the "
                    "cache, or ask for fewer tokens"
                ),
            )
        if not 1 <= copies <= self.most_sequences:
            name = "beams" if together else "n"
            raise ArgumentError(name, copies, f"must lie between 1 and the {self.most_sequences} sequences of a step")
        if together and copies * most + self._watermark > size:
            raise ArgumentError(
                "beams",
                copies,
                f"of {limit} tokens need {copies * most} blocks, and the cache has {size}",
                "enlarge the cache, or ask for fewer beams or tokens",
            )
        sequence = CachedSequence(
            number=self._number, tokens=list(tokens), limit=limit, first=first_key(salt or b"", adapter),
            priority=priority, copies=copies, adapter=adapter, cacheable=salt is not None,
        )  # fmt: skip
        # Copies begin later, but are served in the order in which their request came.
        self._number += copies
        heappush(self._waiting, (sequence.rank, sequence))
        return sequence

    def end(self, sequence: CachedSequence) -> None:
        """End a sequence. Its blocks are free at once."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self.tables.give_back(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting.remove((sequence.rank, sequence))
            heapify(self._waiting)
        sequence.phase = Phase.ENDED

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._waiting)

    @property
    def queue(self) -> list[CachedSequence]:
        """Waiting sequences, in no order."""
        return [sequence for _, sequence in self._waiting]

    @property
    def adapters(self) -> set[int]:
        """Numbers of the adapters in use."""
        return {sequence.adapter for sequence in chain(self.running, self.queue)}

    @property
    def idle(self) -> bool:
        """True when there is nothing to compute."""
        return not self.running and not self._waiting

    @property
    def fits_next(self) -> bool:
        """True when the next step has work for running sequences, and needs no preemption."""
        if self._waiting and self._outranks(self._waiting[0][1]):
            return False
        block = self.tables.block
        missing = [len(sequence.tokens) - sequence.computed for sequence in self.running]
        blocks = sum(2 + min(count, self.most_tokens) // block if count > 1 else count for count in missing)
        return any(missing) and blocks <= self.tables.pool.free

    def plan(self) -> StepPlan:
        """Plan the next step. Call `advance` once it is computed."""
        step, budget = StepPlan(), self.most_tokens
        prompts, block, holders = [], self.tables.block, self.tables.pool.holders
        # A copy: preemption takes sequences out of the list.
        for sequence in self.running.copy():
            missing = len(sequence.tokens) - sequence.computed - sequence.guessed
            if missing > 1:
                prompts.append(sequence)
            elif not missing:
                continue  # a beam that waits for its group; or an unread token is its last
            elif sequence.phase is Phase.RUNNING and sequence.computed % block and holders[sequence.table[-1]] == 1:
                step.chunks[sequence] = 1  # `_grow` inlined: it would take a third of the time of a step
                budget -= 1
            elif sequence.phase is Phase.RUNNING and self._grow(sequence, 1, step):
                budget -= 1
        spare = 0  # budget that prompts may not use next to decoding sequences, but guesses may
        if step.chunks and budget > self.prompt_tokens:
            budget, spare = self.prompt_tokens, budget - self.prompt_tokens
        for sequence in prompts:
            budget -= self._admit_before(sequence, budget, step)
            count = min(budget, len(sequence.tokens) - sequence.computed)
            if count and sequence.phase is Phase.RUNNING and self._grow(sequence, count, step):
                budget -= count
        while budget and self._waiting:
            count = self._admit(self._waiting[0][1], budget, step)
            if count:
                budget -= count
            elif step.chunks or not self.running:
                break
            else:  # waiting beams hold all blocks: the last in order makes way
                self._preempt(self.running[-1], step)
        budget += spare
        for sequence in [planned for planned in step.chunks if planned.guessed]:
            budget -= self._grow_guesses(sequence, budget, step)
        pool = self.tables.pool
        # Planning made these moves, also for sequences that were preempted again since.
        step.moves, pool.moves = pool.moves, []
        return step

    def _grow_guesses(self, sequence: CachedSequence, budget: int, step: StepPlan) -> int:
        """Make room for guesses in free blocks, without preemption, and return their number."""
        count, tables = min(sequence.guessed, budget), self.tables
        if count < 1 or tables.needs(sequence, 1 + count) > tables.pool.free:
            return 0
        tables.grow(sequence, 1 + count)
        step.chunks[sequence] = 1 + count
        return count

    def advance(self, step: StepPlan) -> None:
        """Note that a planned step is computed."""
        block, tables = self.tables.block, self.tables
        for sequence, count in step.chunks.items():
            # The usual case, inlined: no block is full, and none leaves a window.
            if count == 1 and (sequence.computed + 1) % block and not tables.window:
                sequence.computed += 1
            else:
                tables.advance(sequence, count)

    def fork(self, sequence: CachedSequence) -> list[CachedSequence]:
        """Return the other sequences that continue a computed prompt."""
        children = [self.branch(sequence, sequence.number + offset) for offset in range(1, sequence.copies)]
        sequence.copies = 1
        return children

    def branch(self, sequence: CachedSequence, number: int) -> CachedSequence:
        """Return another sequence that continues a running one. `number`: one reserved for its copies."""
        child = CachedSequence(
            number=number, tokens=list(sequence.tokens), limit=sequence.limit, first=sequence.first,
            priority=sequence.priority, adapter=sequence.adapter, cacheable=sequence.cacheable, phase=Phase.RUNNING,
        )  # fmt: skip
        child.prompt = sequence.prompt
        self.tables.fork(sequence, child)
        insort(self.running, child, key=_rank)
        return child

    def _grow(self, sequence: CachedSequence, count: int, step: StepPlan) -> bool:
        """Make room for tokens, preempting later sequences if needed. Return False if it was preempted itself."""
        tables = self.tables
        while tables.needs(sequence, count) > tables.pool.free:
            last = self.running[-1]
            self._preempt(last, step)
            if last is sequence:
                return False
        tables.grow(sequence, count)
        step.chunks[sequence] = count
        return True

    def _admit_before(self, prompt: CachedSequence, budget: int, step: StepPlan) -> int:
        """Admit waiting sequences of a higher priority than a running prompt, and return their tokens."""
        taken = 0
        while taken < budget and self._waiting and self._waiting[0][1].priority < prompt.priority:
            count = self._admit(self._waiting[0][1], budget - taken, step)
            if not count:
                break
            taken += count
        return taken

    def _admit(self, sequence: CachedSequence, budget: int, step: StepPlan) -> int:
        """Admit a waiting sequence, preempting those it outranks.

        Returns how many of its tokens the step computes, or 0 if it keeps waiting.
        """
        # Looking for a prefix hashes the prompt: not again while nothing has changed.
        situation = sequence, self.tables.pool.free, len(self.running)
        if self._refused == situation and not self._outranks(sequence):
            return 0
        while (prefix := self._fitting_prefix(sequence)) is None:
            if not self._outranks(sequence):
                self._refused = situation
                return 0
            self._preempt(self.running[-1], step)
        heappop(self._waiting)
        self.tables.begin(sequence, *prefix)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=_rank)
        count = min(budget, len(sequence.tokens) - sequence.computed)
        return count if self._grow(sequence, count, step) else 0

    def _fitting_prefix(self, sequence: CachedSequence) -> tuple[list[int], list[bytes]] | None:
        """Return the cached prefix of a sequence if all of its tokens fit together with the running ones, else None.

        Alone it may also take the blocks of the watermark.
        """
        if sequence.copies + sum(running.copies for running in self.running) > self.most_sequences:
            return None
        pool, tables = self.tables.pool, self.tables
        blocks, keys = tables.prefix(sequence)
        cached_blocks = [block for block in blocks if block != HOSTED]
        # Cached blocks that nobody holds are free, and are about to be held.
        free = pool.free - sum(not pool.holders[block] for block in cached_blocks)
        tokens = len(sequence.tokens)
        needs = min(tables.blocks_of(tokens) - len(cached_blocks), tables.most_blocks(tokens, self.most_tokens))
        return (blocks, keys) if not self.running or free - self._watermark >= needs else None

    def _outranks(self, sequence: CachedSequence) -> bool:
        return bool(self.running) and self.running[-1].priority > sequence.priority

    def _preempt(self, sequence: CachedSequence, step: StepPlan) -> None:
        step.chunks.pop(sequence, None)
        self.running.remove(sequence)
        self.tables.give_back(sequence)
        sequence.drop_guesses()
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        heappush(self._waiting, (sequence.rank, sequence))


def _rank(sequence: CachedSequence) -> tuple[int, int]:
    return sequence.rank


def check_budget(most_tokens: int, most_sequences: int) -> None:
    """Raise ArgumentError when a step has no room for prompts in addition to the sequences that run at once."""
    if not 1 <= most_sequences < most_tokens:
        raise ArgumentError(
            "most_tokens",
            most_tokens,
            f"must exceed {argument('most_sequences', most_sequences)}, which is at least 1",
            "each sequence takes a token of a step, and prompts take the rest",
        )
