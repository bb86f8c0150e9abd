"""Measured peaks of steps on a GPU: the planner within 1.5 % in the mean, a dry run within 3 %, without a GPU."""

from statistics import mean

import pytest

from benchmarks.measured_peaks import as_run, planned_bytes, runs_today
from benchmarks.measured_steps import read
from meshwright.observe.dryrun.simulate import dry_run


def test_the_planner_holds_what_was_measured() -> None:
    errors = [planned_bytes(as_run(step, today=False), today=False) / step.peak_bytes - 1 for step in read()]
    assert len(errors) >= 20
    assert mean(map(abs, errors)) < 0.015
    assert max(map(abs, errors)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number, step in enumerate(read()) if runs_today(step)])
def test_a_dry_run_holds_what_was_measured(number: int) -> None:
    """Compiled blocks are lowered as the compiler lowers them, on a machine without a GPU."""
    step = read()[number]
    assert dry_run(as_run(step, today=False), device="cuda").peak_bytes == pytest.approx(step.peak_bytes, rel=0.03)
