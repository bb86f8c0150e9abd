"""Rows of dense copies: who has which, when blocks are gathered, and that memory is bounded."""

import pytest

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.packed_step import DenseCopies
from meshwright.serving.engine.serving_engine import ServingEngine
from tests.model.shrunk import KINDS, model


def sequences(number: int) -> list[CachedSequence]:
    return [CachedSequence(number=index, tokens=[0], limit=99, first=b"") for index in range(number)]


def rows(copies: DenseCopies, growing: list[tuple[CachedSequence, int, int]]) -> list[tuple[int, int, list[object]]]:
    """(keys, rows attended to, (number, row, new) of each)."""
    return [
        (plan.keys, plan.rows, [(copied.sequence.number, copied.row, copied.new) for copied in plan.used])
        for plan in copies.plan(growing)
    ]


def test_a_row_is_gathered_once_and_then_grows() -> None:
    copies, (a, b, c) = DenseCopies(1, 1000), sequences(3)
    assert rows(copies, [(a, 5, 16), (b, 20, 32)]) == [(16, 1, [(0, 0, True)]), (32, 1, [(1, 0, True)])]
    assert rows(copies, [(a, 6, 16), (b, 21, 32)]) == [(16, 1, [(0, 0, False)]), (32, 1, [(1, 0, False)])]
    assert rows(copies, [(a, 7, 16), (c, 3, 16), (b, 22, 32)])[0] == (16, 2, [(0, 0, False), (2, 1, True)])


def test_a_step_that_is_missed_or_another_begin_gathers_again() -> None:
    copies, (a,) = DenseCopies(1, 1000), sequences(1)
    rows(copies, [(a, 5, 16)])
    assert rows(copies, [(a, 7, 16)]) == [(16, 1, [(0, 0, True)])]
    a.preemptions += 1
    assert rows(copies, [(a, 8, 16)]) == [(16, 1, [(0, 0, True)])]


def test_rows_of_those_who_leave_are_taken_again() -> None:
    copies, (a, b, c, d) = DenseCopies(1, 1000), sequences(4)
    rows(copies, [(a, 1, 16), (b, 1, 16), (c, 1, 16)])
    assert rows(copies, [(a, 2, 16), (c, 2, 16)]) == [(16, 3, [(0, 0, False), (2, 2, False)])]
    assert rows(copies, [(a, 3, 16), (c, 3, 16), (d, 9, 16)])[0][2] == [(0, 0, False), (3, 1, True), (2, 2, False)]
    assert rows(copies, [(c, 4, 16)]) == [(16, 1, [(2, 0, True)])], "two of three rows would be empty"
    assert rows(copies, [(a, 9, 32)]) == [(16, 0, []), (32, 1, [(0, 0, True)])]


def test_memory_is_bounded_and_given_back() -> None:
    copies, many = DenseCopies(2, 2 * 16 * 4), sequences(6)  # four rows of 16 keys
    assert [len(row[2]) for row in rows(copies, [(row, 1, 16) for row in many])] == [4]
    assert rows(copies, [(many[0], 20, 32)]) == [(16, 0, []), (32, 1, [(0, 0, True)])]
    assert rows(DenseCopies(0, 1000), [(many[0], 1, 16)]) == [(16, 0, [])]


@pytest.mark.parametrize("name", KINDS)
def test_answers_with_and_without_copies_have_the_same_bits(name: str) -> None:
    network = model(name).eval()
    prompts = [[7] * 3, [1, 2] * 5, [5, 6, 7] * 4, [9]]
    made = []
    for copies_bytes in (0, 2**12, 2**28):
        options = EngineOptions(exact=True, copies_bytes=copies_bytes, block=4, most_tokens=16, most_sequences=3)
        engine = ServingEngine(network, options)
        asked = [
            engine.add(entry, RequestOptions(max_new_tokens=4 + 3 * number)) for number, entry in enumerate(prompts)
        ]
        engine.run(asked)
        made.append([(entry.answers[0].ids, entry.answers[0].logprobs) for entry in asked])
    assert made[0] == made[1] == made[2]
