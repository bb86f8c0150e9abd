"""Random operations on the scheduler and the cache of the serving engine: is any block lost, owned twice, or wrong?

    python -m benchmarks.serve_operations [--json] [--operations 100000] [--seed 0]

A cache without a model stands in for the real one: each slot of a block keeps the tokens that lead to it, so a block
that is read at the wrong place, before it is written, or after it was given away shows at once. The next token is a
function of all tokens before it: what a sequence becomes must not depend on others, on chunks, or on preemption.
After each operation the books are checked: who holds a block is counted from the tables, free and held blocks are all
blocks, keys lead to what they name. It prints how many operations were made and how many faults were found.
"""

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from meshwright.serving.engine.cache.blocks import (
    GONE,
    BlockPool,
    BlockTables,
    CachedSequence,
    HostTier,
    Move,
    Phase,
)
from meshwright.serving.engine.scheduler import Scheduler, StepPlan

WORDS = 3
"""Tokens there are: few, so that beginnings are often equal."""


def follows(tokens: list[int], voice: int) -> int:
    """The token behind tokens, for a sequence of a voice."""
    return blake2b(bytes([voice, *tokens]), digest_size=2).digest()[0] % WORDS


def right(prompt: list[int], voice: int, limit: int) -> list[int]:
    """What becomes of a prompt."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(follows(tokens, voice))
    return tokens


@dataclass(slots=True)
class Simulation:
    """A scheduler over a cache that keeps, in place of keys and values, the tokens that lead to each position."""

    size: int
    block: int = 4
    window: int = 0
    most_tokens: int = 12
    most_sequences: int = 5
    prompt_tokens: int | None = None
    host: int = 0
    """Slots of host memory."""
    scheduler: Scheduler = field(init=False)
    slots: dict[tuple[int, int], tuple[bytes | None, ...] | None] = field(init=False, default_factory=dict)
    hosted: dict[tuple[int, int], tuple[bytes | None, ...] | None] = field(init=False, default_factory=dict)
    """The same of slots of host memory."""
    open: dict[CachedSequence, tuple[list[int], int]] = field(init=False, default_factory=dict)
    """Sequences that are not ended, with prompt and voice."""
    salts: dict[CachedSequence, bytes] = field(init=False, default_factory=dict)
    prompts: list[list[int]] = field(init=False, default_factory=list)
    ended: int = field(init=False, default=0)
    guesses: random.Random = field(init=False, default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        pool = BlockPool(self.size, HostTier(self.host) if self.host else None)
        tables = BlockTables(pool, self.block, self.window)
        self.scheduler = Scheduler(
            tables, most_tokens=self.most_tokens, most_sequences=self.most_sequences, prompt_tokens=self.prompt_tokens
        )

    @property
    def longest(self) -> int:
        """Tokens of a sequence that the cache can hold."""
        return (self.size if not self.window else 4 * self.size) * self.block

    def add(
        self, prompt: list[int], more: int, priority: int = 0, salt: bytes = b"", copies: int = 1, adapter: int = 0
    ) -> CachedSequence:
        """A new sequence, in voice 0; the copies have the next ones."""
        limit = len(prompt) + more
        sequence = self.scheduler.add(prompt, limit, priority=priority, salt=salt, copies=copies, adapter=adapter)
        self.open[sequence], self.salts[sequence] = (list(prompt), 0), salt
        return sequence

    def step(self) -> StepPlan:
        """One step: blocks are copied, positions written, all that a window reaches read, and tokens made."""
        first = self.scheduler.running[0] if self.scheduler.running else None
        self._guess()
        plan = self.scheduler.plan()
        if first is not None and first.phase is Phase.RUNNING:
            leader = self.scheduler.running[0]
            assert leader in plan.chunks, "the first in the order makes progress"
        assert plan.chunks or self.scheduler.idle, "a step computes something while somebody waits"
        assert all(count >= 1 for count in plan.chunks.values()), "logits come from a token that is computed"
        assert sum(plan.chunks.values()) <= self.most_tokens
        for move in plan.moves:
            self._move(move)
        for sequence, count in plan.chunks.items():
            sequence.drop_guesses(keep=count - 1)
            self._write(sequence, count)
        for sequence, count in plan.chunks.items():
            self._read(sequence, count)
        guessing = {scheduled: scheduled.guessed for scheduled in plan.chunks if scheduled.guessed}
        self.scheduler.advance(
            StepPlan({scheduled: count for scheduled, count in plan.chunks.items() if scheduled not in guessing})
        )
        for sequence in list(plan.chunks):
            if sequence in guessing:
                self._continue_guessed(sequence)
            elif sequence.computed == len(sequence.tokens):
                self._continue(sequence)
        return plan

    def _guess(self) -> None:
        """Let some sequences guess some tokens, of which some are right (speculation.py)."""
        for sequence in self.scheduler.running:
            room = sequence.limit - len(sequence.tokens) - 1
            decodes = len(sequence.tokens) - sequence.computed == 1 and len(sequence.tokens) > sequence.prompt
            if not decodes or room < 1 or self.guesses.random() < 0.5:
                continue
            sequence.guessed = self.guesses.randint(1, min(room, 9))
            for _ in range(sequence.guessed):
                likely = self.guesses.random() < 0.8
                voice = self.open[sequence][1]
                sequence.tokens.append(follows(sequence.tokens, voice) if likely else self.guesses.randrange(WORDS))

    def _continue_guessed(self, sequence: CachedSequence) -> None:
        """Take what was guessed right, and the token behind it."""
        guess = sequence.tokens[-sequence.guessed :]
        sequence.drop_guesses()
        taken, voice = 0, self.open[sequence][1]
        for token in [*guess, None]:
            taken += 1
            sequence.tokens.append(follows(sequence.tokens, voice))
            if sequence.tokens[-1] != token:
                break
        self.scheduler.advance(StepPlan({sequence: taken}))
        self._end_at_limit(sequence)

    def cancel(self, sequence: CachedSequence) -> None:
        """Nobody wants it any more."""
        self.scheduler.end(sequence)
        del self.open[sequence]

    def check(self) -> None:
        """The books."""
        pool, running = self.scheduler.tables.pool, self.scheduler.running
        holders = Counter(block for sequence in running for block in sequence.table if block != GONE)
        assert [holders[block] for block in range(pool.size)] == pool.holders, "holders are those of the tables"
        free = pool.free_blocks()
        assert len(free) == len(set(free)) == pool.free, "a free block is free once"
        assert sorted(free) == [block for block, count in enumerate(pool.holders) if not count]
        keys = [pool.key_of(block) is not None for block in free]
        assert all(sequence <= other for sequence, other in pairwise(keys)), (
            "blocks without content are given away first"
        )
        for block in range(pool.size):
            key = pool.key_of(block)
            assert key is None or pool.find(key) == block
        if pool.host is not None:
            assert sorted(pool.host.slots) == list(range(self.host)), "a slot has content or is free"
            twice = [key for block in range(pool.size) if (key := pool.key_of(block)) and key in pool.host]
            assert not twice, "content is in one tier"
        assert not pool.moves, "what is to be moved belongs to a step"
        assert [sequence.rank for sequence in running] == sorted(sequence.rank for sequence in running)
        assert all(sequence.phase is Phase.RUNNING for sequence in running)
        assert sum(sequence.copies for sequence in running) <= self.most_sequences
        if not running:
            assert pool.free == pool.size, "who does not run holds nothing"

    def _move(self, move: Move) -> None:
        """As host memory and device do, one after the other."""
        source = self.hosted if move.kind == "load" else self.slots
        target = self.hosted if move.kind == "save" else self.slots
        for offset in range(self.block):
            target[move.target, offset] = source.get((move.source, offset))

    def _write(self, sequence: CachedSequence, count: int) -> None:
        for position in range(sequence.computed, sequence.computed + count):
            block = sequence.table[position // self.block]
            assert self.scheduler.tables.pool.holders[block] == 1, "nobody else holds what is written to"
            self.slots[block, position % self.block] = self._content(sequence, position)

    def _read(self, sequence: CachedSequence, count: int) -> None:
        end = sequence.computed + count
        begin = max(0, sequence.computed - self.window + 1) if self.window else 0
        for position in range(begin, end):
            content = self.slots.get((sequence.table[position // self.block], position % self.block))
            assert content == self._content(sequence, position), f"position {position} is not what it should be"

    def _content(self, sequence: CachedSequence, position: int) -> tuple[bytes | None, ...]:
        beside = self.salts[sequence] + b"/%d" % sequence.adapter
        return beside, bytes(sequence.tokens[: position + 1])

    def _continue(self, sequence: CachedSequence) -> None:
        voices = [sequence, *(self.scheduler.fork(sequence) if sequence.copies > 1 else [])]
        prompt, first = self.open[sequence]
        for voice, voice_sequence in enumerate(voices, first):
            self.open[voice_sequence], self.salts[voice_sequence] = (prompt, voice), self.salts[sequence]
            voice_sequence.tokens.append(follows(voice_sequence.tokens, voice))
            self._end_at_limit(voice_sequence)

    def _end_at_limit(self, sequence: CachedSequence) -> None:
        if len(sequence.tokens) == sequence.limit:
            prompt, voice = self.open[sequence]
            assert sequence.tokens == right(prompt, voice, sequence.limit), "what a sequence becomes is its own affair"
            self.cancel(sequence)
            self.ended += 1


def random_operation(simulation: Simulation, chance: random.Random) -> None:
    """A request, a step, or one that is given up."""
    what = chance.random()
    if what < 0.15 and len(simulation.open) < 12:
        prompt = [chance.randrange(WORDS) for _ in range(chance.randint(1, simulation.longest - 1))]
        if simulation.prompts and chance.random() < 0.7:  # as long, and begun as another one
            begun = chance.choice(simulation.prompts[-8:])[: chance.randint(1, len(prompt))]
            prompt[: len(begun)] = begun
        simulation.prompts.append(prompt)
        more = chance.randint(1, simulation.longest + 1 - len(prompt))
        salt, copies = chance.choice([b"", b"", b"other"]), chance.choice([1, 1, 1, 2, 3])
        if (len(prompt) + more) * copies <= 255:
            adapter = chance.choice([0, 0, 1])
            simulation.add(prompt, more, chance.choice([0, 0, 0, 1, -1]), salt, copies, adapter)
    elif what < 0.18 and simulation.open:
        simulation.cancel(chance.choice(list(simulation.open)))
    else:
        simulation.step()


def run(operations: int, seed: int) -> dict[str, int]:
    """So many random operations on simulations of several sizes, each drained at its end."""
    chance = random.Random(seed)
    made, faults = 0, Counter[str]()
    while made < operations:
        window = chance.choice([0, 0, 5, 9])
        simulation = Simulation(chance.randint(8, 20), window=window, host=chance.choice([0, 1, 3, 12]))
        for _ in range(min(2000, operations - made)):
            random_operation(simulation, chance)
            simulation.check()
            made += 1
        while not simulation.scheduler.idle:
            simulation.step()
        simulation.check()
        faults["ended"] += simulation.ended
        faults["preempted"] += simulation.scheduler.preemptions
        faults["hit_tokens"] += simulation.scheduler.tables.hits
        faults["host_hit_tokens"] += simulation.scheduler.tables.host_hits
        faults["left"] += simulation.size - simulation.scheduler.tables.pool.free + len(simulation.open)
    return {"operations": made, "faults": faults.pop("left"), **faults}


def main() -> None:
    """As the module says. An assertion that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    figures = run(asked.operations, asked.seed)
    print(json.dumps(figures) if asked.json else "\n".join(f"{name:12} {count:,}" for name, count in figures.items()))


if __name__ == "__main__":
    main()
