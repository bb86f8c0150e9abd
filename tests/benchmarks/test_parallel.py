"""The benchmarks of many processes at toy size."""

from dataclasses import replace

import pytest

from benchmarks import parallel_memory
from benchmarks.parallel_memory import against, context_bytes, traced
from benchmarks.parallel_speed import report, summary
from benchmarks.parallel_turns import Group
from benchmarks.parallel_work import SHAPE, Work
from meshwright.observe.ranks import on_ranks

TOY = Work(
    shape=replace(SHAPE, vocab=64, layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=64),
    rows=4,
    sequence=16,
    micro_rows=1,
)


@pytest.mark.slow
def test_turns_of_pipelines_give_ratios_and_what_they_should_have_taken() -> None:
    group = Group(axis="pp", world=2, work=TOY, schedules=("1f1b", "zb-h1"))
    actual = report(group, seconds=0.0)
    assert set(actual["contests"]) == {"pp-2-1f1b", "pp-2-zb-h1"} and actual["loss_spread"] < 1e-4
    assert actual["pipelines"]["1f1b"]["over_1f1b"] == 1
    assert 0 < actual["pipelines"]["zb-h1"]["simulated_over_1f1b"] < 2, (
        "of times measured on a few microseconds of work"
    )
    least = summary({"pp-2": actual})["least"]["pp-2"]
    assert least == min(contest["ours_over_best"] for contest in actual["contests"].values())


@pytest.mark.slow
def test_turns_of_compiled_pipelines() -> None:
    """Beside each other only, with split passes."""
    group = Group(axis="pp", world=2, work=TOY, schedules=("1f1b", "zb-h1"), compile="on")
    actual = report(group, seconds=0.0)
    assert group.name == "pp-2-compiled" and not actual["contests"] and not actual["failed"]
    assert actual["loss_spread"] < 1e-4 and 0 < actual["pipelines"]["zb-h1"]["simulated_over_1f1b"] < 2


@pytest.mark.slow
def test_memory_is_measured_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_memory, "WORK", replace(TOY, micro_rows=0))
    assert 0.5 < against(2, "ours zero=0", "torch DDP")["ours_over_theirs"] < 1.5
    halves = on_ranks(2, context_bytes, 2, replace(TOY, rows=1))
    assert 2 * max(halves) == pytest.approx(on_ranks(1, context_bytes, 1, replace(TOY, rows=1))[0], rel=0.05)


def test_a_trace_tells_what_lives_when() -> None:
    import torch
    from torch.profiler import record_function

    stored = []

    def run() -> None:
        stored.append(torch.zeros(1024))
        with record_function("mark it"):
            torch.ones(4096)
            stored.append(torch.zeros(256))

    trace = traced(run)
    start, end = trace.marks["mark it"]
    assert trace.at(start) == 4096 and trace.at(end) == 4096 + 1024
    assert trace.peak("mark it") == 4096 + 4 * 4096
