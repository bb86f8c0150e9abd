"""The scheduler as a state machine over a cache that keeps tokens: benchmarks/serve_operations.py has what is checked
in each step. `python -m benchmarks.serve_operations` makes 100,000 operations."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.serve_operations import Simulation, right, run
from meshwright.serving.engine.cache.blocks import BlockPool, BlockTables
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.spec.errors import ArgumentError


class Machine(RuleBasedStateMachine):
    """Requests come, go on, and are given up, in any order."""

    asked = Bundle("asked")
    simulation: Simulation

    @initialize(
        size=st.integers(8, 16), window=st.sampled_from([0, 0, 3, 9]), tokens=st.integers(3, 12), sequences=st.data(),
        host=st.sampled_from([0, 1, 2, 5, 16]), beside=st.sampled_from([None, 1, 2, 5]),
    )  # fmt: skip
    def begin(self, size: int, window: int, tokens: int, sequences: Any, host: int, beside: int | None) -> None:
        most = sequences.draw(st.integers(1, min(5, tokens - 1)))
        self.simulation = Simulation(
            size, window=window, most_tokens=tokens, most_sequences=most, host=host, prompt_tokens=beside
        )

    @rule(
        target=asked, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), more=st.integers(1, 12),
        priority=st.integers(-1, 1), salt=st.sampled_from([b"", b"other"]), copies=st.integers(1, 3),
    )  # fmt: skip
    def add(self, prompt: list[int], more: int, priority: int, salt: bytes, copies: int) -> Any:
        return self.simulation.add(prompt, more, priority, salt, min(copies, self.simulation.most_sequences))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()
            self.simulation.check()

    @rule(choice=asked)
    def cancel(self, choice: Any) -> None:
        if choice in self.simulation.open:
            self.simulation.cancel(choice)

    @invariant()
    def books(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        """All that is left ends, in a number of steps that the tokens bound."""
        if hasattr(self, "simulation"):
            bound = sum(sequence.limit * sequence.copies for sequence in self.simulation.open)
            steps = 0
            while not self.simulation.scheduler.idle:
                self.simulation.step()
                steps += 1
            assert steps <= bound and not self.simulation.open
            self.simulation.check()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestMachine = Machine.TestCase


def test_random_operations() -> None:
    outcome = run(4000, seed=1)
    assert outcome["faults"] == 0
    assert min(outcome["ended"], outcome["preempted"], outcome["hit_tokens"]) > 20, "what is rare was not met at all"


def scheduler(blocks: int = 8, tokens: int = 8, sequences: int = 3) -> Scheduler:
    return Scheduler(BlockTables(BlockPool(blocks), 4), most_tokens=tokens, most_sequences=sequences)


def test_a_prompt_is_cut_into_chunks_beside_tokens_of_others() -> None:
    planner = scheduler(blocks=20)
    first = planner.add([1, 2], 10)
    plan = planner.plan()
    planner.advance(plan)
    first.tokens.append(3)
    second = planner.add([0] * 20, 30)
    sizes = []
    for _ in range(3):
        plan = planner.plan()
        sizes.append((plan.chunks[first], plan.chunks[second]))
        planner.advance(plan)
        first.tokens.append(3)
    assert sizes == [(1, 7), (1, 7), (1, 6)]


def test_prompts_have_fewer_tokens_beside_those_that_grow() -> None:
    tables = BlockTables(BlockPool(40), 4)
    planner = Scheduler(tables, most_tokens=8, most_sequences=4, prompt_tokens=3)
    first, alone = planner.add([1] * 14, 30), []
    for _ in range(2):
        plan = planner.plan()
        alone.append(plan.chunks[first])
        planner.advance(plan)
    assert alone == [8, 6], "nobody waits for it"
    first.tokens.append(2)
    second, third = planner.add([3] * 4, 10), planner.add([4] * 9, 20)
    sizes = []
    for _ in range(5):
        plan = planner.plan()
        assert plan.chunks[first] == 1
        sizes.append((plan.chunks.get(second, 0), plan.chunks.get(third, 0)))
        planner.advance(plan)
        first.tokens.append(2)
        if second.computed == len(second.tokens):
            second.tokens.append(5)
    assert sizes == [(3, 0), (1, 3), (1, 3), (1, 3), (1, 0)], "the last token of a prompt is as one that grows"


def test_a_higher_priority_waits_for_no_prompt_that_is_read() -> None:
    tables = BlockTables(BlockPool(40), 4)
    planner = Scheduler(tables, most_tokens=8, most_sequences=4, prompt_tokens=3)
    first = planner.add([1] * 4, 30)
    planner.advance(planner.plan())
    first.tokens.append(2)
    long = planner.add([3] * 40, 60, priority=1)
    planner.advance(planner.plan())
    assert long.computed == 3
    first.tokens.append(2)
    urgent = planner.add([4] * 5, 20)
    sizes = []
    for _ in range(3):
        plan = planner.plan()
        sizes.append((plan.chunks[first], plan.chunks.get(urgent, 0), plan.chunks.get(long, 0)))
        planner.advance(plan)
        first.tokens.append(2)
        if urgent.computed == len(urgent.tokens):
            urgent.tokens.append(5)
    assert sizes == [(1, 3, 0), (1, 2, 1), (1, 1, 3)]


def test_guesses_have_what_is_kept_from_prompts() -> None:
    tables = BlockTables(BlockPool(40), 4)
    planner = Scheduler(tables, most_tokens=8, most_sequences=4, prompt_tokens=2)
    first = planner.add([1] * 4, 30)
    planner.advance(planner.plan())
    first.tokens += [2, 3, 3, 3]
    first.guessed = 3
    second = planner.add([4] * 9, 20)
    plan = planner.plan()
    assert plan.chunks == {first: 4, second: 2}


def test_the_last_to_come_makes_way_and_goes_on_where_its_prefix_is_found() -> None:
    simulation = Simulation(8, most_tokens=40, most_sequences=2)
    old, new = simulation.add([0, 1] * 6, 14), simulation.add([1, 1, 0] * 4, 12)
    while old in simulation.open:
        simulation.step()
    assert new.preemptions and simulation.scheduler.preemptions == new.preemptions and not old.preemptions
    while new in simulation.open:
        simulation.step()
    assert new.tokens == right([1, 1, 0] * 4, 0, 24) and new.cached


def test_priority_goes_first_even_where_that_preempts() -> None:
    planner = scheduler(blocks=4, tokens=16)
    late = planner.add([1] * 12, 16, priority=1)
    planner.advance(planner.plan())
    late.tokens.append(1)
    urgent = planner.add([2] * 8, 10)
    plan = planner.plan()
    assert list(plan.chunks) == [urgent] and planner.running == [urgent] and planner.waiting == 1
    assert late.preemptions == 1 and late.computed == 0


def test_who_is_given_up_while_it_waits_is_forgotten() -> None:
    planner = scheduler(sequences=1)
    first = planner.add([1], 20)
    planner.advance(planner.plan())
    first.tokens.append(1)
    waits = planner.add([2], 3)
    for _ in range(3):
        planner.end(planner.add([3], 3, priority=1))
    assert len(planner._waiting) == planner.waiting == 1, "although it never came first"
    planner.end(first)
    assert list(planner.plan().chunks) == [waits]


def test_refusals_name_what_to_change() -> None:
    with pytest.raises(ArgumentError, match=r"need 9 blocks, and it has 8"):
        scheduler().add([1] * 30, 34)
    scheduler().add([1] * 30, 33)
    with pytest.raises(ArgumentError, match="n=4"):
        scheduler().add([1], 3, copies=4)
    with pytest.raises(ArgumentError, match="most_tokens=3 must exceed most_sequences=3"):
        scheduler(tokens=3)


def test_the_watermark_lets_nobody_in_whom_the_next_step_would_drive_out() -> None:
    planner = Scheduler(BlockTables(BlockPool(200), 4), most_tokens=900, most_sequences=9)
    first = planner.add([1] * 790, 800)
    planner.advance(planner.plan())  # 198 blocks
    first.tokens.append(1)
    planner.add([2], 3)
    assert list(planner.plan().chunks) == [first] and planner.waiting == 1, "two blocks are free, and are the watermark"


def test_the_same_seed_makes_the_same_operations() -> None:
    assert run(500, seed=3) == run(500, seed=3) != run(500, seed=random.Random(0).randrange(100))
