"""Clocks that run apart, laid over each other: by hand, on real processes, and a GPU's that is played."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.profile.clock import Aligned, DeviceClock, Offset, align
from meshwright.observe.ranks import on_ranks


def test_drift_is_taken_out() -> None:
    """A clock that is 5 s behind and loses 20 us each second, over 100 s."""

    def ahead_s(rank_s: float) -> float:
        return 5.0 + 20e-6 * rank_s

    def asked(rank_s: float, residual_s: float) -> Offset:
        return Offset(seconds=ahead_s(rank_s), residual_s=residual_s, at_s=rank_s)

    aligned = Aligned(first=asked(1000.0, 1e-5), last=asked(1100.0, 3e-5), device_residual_s=1e-6)
    assert aligned.drift_s == pytest.approx(2e-3) and aligned.residual_s == pytest.approx(3.1e-5)
    for rank_s in (1000.0, 1031.0, 1100.0):
        assert aligned.seconds(rank_s) == pytest.approx(rank_s + ahead_s(rank_s), abs=1e-9)
    assert Aligned().seconds(7.5) == 7.5


def _drifting() -> Aligned:
    """The second rank's clock gets ahead by 40 ms between the two questions."""
    rank, real = dist.get_rank(), time.perf_counter_ns
    first = align(rank, 2)
    time.perf_counter_ns = lambda: real() + 40_000_000 * rank
    try:
        return Aligned(first=first, last=align(rank, 2))
    finally:
        time.perf_counter_ns = real


def test_both_ends_are_asked_for() -> None:
    first, second = on_ranks(2, _drifting)
    assert first.drift_s == 0.0
    assert second.drift_s == pytest.approx(-0.04, abs=2 * second.residual_s) and second.residual_s < 0.01
    assert second.last.at_s > second.first.at_s + 0.04


class Played:
    """Events of a GPU whose clock gains 1 part in 1000, and of which the host hears 30 us later."""

    host_s = 50.0

    def __init__(self, **options: bool) -> None:
        self.device_s = 0.0

    def record(self) -> None:
        Played.host_s += 10e-6
        self.device_s = 1.001 * Played.host_s + 3.0

    def synchronize(self) -> None:
        Played.host_s += 30e-6

    def elapsed_time(self, other: "Played") -> float:
        return 1e3 * (other.device_s - self.device_s)


def test_a_device_s_clock_is_laid_over_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("Event", Played), ("synchronize", lambda: None), ("current_stream", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(time, "perf_counter", lambda: Played.host_s)
    clock = DeviceClock()
    marks: list[tuple[Any, float]] = []
    for _ in range(4):
        Played.host_s += 25.0
        mark = clock.mark()
        marks.append((mark, Played.host_s))
    clock.settle()
    assert clock.residual_s == pytest.approx(20e-6)
    for mark, at_s in marks:
        assert abs(clock.seconds(mark) - at_s) <= clock.residual_s
