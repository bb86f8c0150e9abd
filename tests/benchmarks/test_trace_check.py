"""The benchmark of the trace checker at toy size reports the keys that the claims read."""

import pytest

from benchmarks import trace_check
from meshwright.observe.oracle.feature_matrix import trial


@pytest.mark.slow
def test_schedules_have_rows_without_violations() -> None:
    rows = list(trace_check.schedules((2,)))
    assert {row["name"] for row in rows} == {f"{name} pp=2" for name in trace_check.NAMES}
    assert all(row["violations"] == 0 and row["operations"] > 50 and not row["first"] for row in rows)
    assert sum(row["cases"] for row in rows) == 27


@pytest.mark.long
def test_layouts_of_verify_are_checked() -> None:
    actual = trial(["pp 1f1b"])
    assert not isinstance(actual, str) and actual is not None
    checked = trace_check._layout(actual)
    assert checked.ranks == 2 and not checked.violations


def test_large_models_get_the_layout_that_the_planner_ranks_first() -> None:
    plan = trace_check.best(*trace_check.LARGE[0])
    assert plan.layout.world == 64
    assert not plan.violations()
