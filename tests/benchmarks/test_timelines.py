"""benchmarks/timelines.py: planned lines by arithmetic of the tests' own, and a trace that was written by hand."""

from itertools import pairwise
from typing import Any

import pytest

from benchmarks.timelines import COMPUTES, LAYERS, SENDS, Lines, of_trace, planned


def lengths(lines: Lines, line: str) -> list[float]:
    return [piece.end_s - piece.start_s for piece in lines.pieces if piece.line == line]


def test_without_overlap_every_sum_comes_after_the_backward_pass() -> None:
    usual, serial = planned("data").values()
    forward, backward = lengths(serial, COMPUTES)[0], lengths(serial, COMPUTES)[-1]
    total = lengths(serial, SENDS)[0]
    passes = LAYERS * (forward + backward)
    assert serial.total_s == pytest.approx(passes + LAYERS * total)
    assert serial.exposed_s == pytest.approx(LAYERS * total)
    # A sum is shorter than a layer's backward pass, so all but the last one hide.
    assert total < lengths(usual, COMPUTES)[-1]
    assert usual.exposed_s == pytest.approx(lengths(usual, SENDS)[-1])


def test_a_ring_hides_what_an_all_gather_exposes() -> None:
    gathered, ring = planned("context").values()
    assert ring.exposed_s < gathered.exposed_s
    usual, serial = planned("tensor").values()
    assert 0 < usual.exposed_s < serial.exposed_s


def test_pipelines_wait_as_their_schedules_say() -> None:
    lines = planned("pipeline")
    assert lines["afab"].total_s == pytest.approx(lines["1f1b"].total_s)
    assert lines["interleaved"].total_s < lines["1f1b"].total_s
    assert lines["zb-h1"].total_s < lines["1f1b"].total_s
    for schedule in lines.values():
        for rank in {piece.line for piece in schedule.pieces}:
            pieces = sorted((piece for piece in schedule.pieces if piece.line == rank), key=lambda piece: piece.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(pieces))


def event(name: str, thread: int, start: float, length: float, rank: int = 0) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": length, "args": {}}


def test_a_trace_becomes_the_lines_of_its_shortest_step() -> None:
    names = [{"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "waiting"}} for rank in (0, 1)]
    first = [event("step 1", 0, -150, 150), event("F 0 0", 0, -150, 40)]
    last = [
        event("step 2", 0, 100, 100), event("F 0 0", 0, 100, 30), event("BW 0 0", 0, 130, 40),
        event("gradients: all_reduce on data", 1, 175, 20),
        # Rank 1 begins earlier, waits within its pass, and is in its next step when rank 0 ends.
        event("step 2", 0, 90, 70, rank=1), event("F 0 0", 0, 100, 35, rank=1),
        event("pipeline: recv", 1, 110, 10, rank=1), event("F 1 0", 0, 165, 20, rank=1),
    ]  # fmt: skip
    call = {"pid": 0, "tid": 2, "name": "all_reduce", "id": 7}
    events = [*names, *first, *last, {**call, "ph": "b", "ts": 150}, {**call, "ph": "e", "ts": 195}]
    lines = of_trace(events, by_rank=False)
    by_name = {(piece.line, piece.label): (piece.start_s, piece.end_s) for piece in lines.pieces}
    assert by_name == {
        (COMPUTES, "F"): (0, pytest.approx(30e-6)),
        (COMPUTES, "BW"): (pytest.approx(30e-6), pytest.approx(70e-6)),
        (SENDS, "exposed wait"): (pytest.approx(75e-6), pytest.approx(95e-6)),
        (SENDS, "collective"): (pytest.approx(50e-6), pytest.approx(95e-6)),
    }
    assert lines.exposed_s == pytest.approx(20e-6)
    ranks = of_trace(events, by_rank=True)
    by_rank = {
        (piece.line, round(1e6 * piece.start_s), round(1e6 * piece.end_s), piece.label) for piece in ranks.pieces
    }
    assert by_rank == {
        ("rank 0", 10, 40, "F"), ("rank 0", 40, 80, "BW"), ("rank 1", 10, 20, "F"), ("rank 1", 30, 45, "F"),
    }  # fmt: skip
    # The step lasts from rank 1's start, 90, to the end of rank 0's last pass, 170; rank 0 computes for 70 of it.
    assert ranks.exposed_s == pytest.approx(10e-6)
    hidden = [piece for piece in planned("context")["context=ring"].pieces if piece.label == "collective"]
    assert len(hidden) == 2 * LAYERS, "a ring's hops are drawn, though none is exposed"
