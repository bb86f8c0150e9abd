"""Runs of the repository's own table: what a row says is what was counted, and how far the planner is off."""

from pathlib import Path

import pytest

from meshwright.planner.accuracy.published import JudgedRow, PublishedRow, Unreadable, family_of, read
from meshwright.planner.accuracy.score import judge, mean

TABLE = Path(__file__).parents[2] / "evaluation" / "published_runs.csv"
ROWS = list(read(TABLE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.columns["id"])
def test_a_row_is_a_whole_plan_or_says_why_not(row: PublishedRow | Unreadable) -> None:
    assert family_of(row.source) == "MLPerf"
    if isinstance(row, Unreadable):
        assert row.reason.startswith("LoRA")
        return
    columns, layout = row.columns, row.plan.layout
    assert row.step_s == float(columns["step_time_s"]) and not row.derived
    assert layout.world == int(columns["n_gpus"]) and layout.vp == int(columns["vpp"])
    assert (row.stack.hides_tensor == 0) is ("TP_COMM_OVERLAP=False" in columns["notes"])


def test_runs_of_mlperf_are_predicted_within_their_bar() -> None:
    """Nothing was fitted to them: 12 % in the mean, none off by a quarter."""
    errors = [abs(entry.step_error or 0) for entry in judge(ROWS) if isinstance(entry, JudgedRow)]
    assert len(errors) == 12
    assert (mean(errors) or 1) < 0.12 and max(errors) < 0.25
