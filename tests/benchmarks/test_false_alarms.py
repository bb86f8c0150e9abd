"""The benchmark of false alarms, with short times."""

import pytest

from benchmarks.false_alarms import measure


@pytest.mark.slow
def test_it_runs() -> None:
    figures = measure(stall_s=1.0, pause_s=1.0, limit_s=4.0)
    assert figures["false_alarms"] == 0 and figures["missed"] == 0, figures
    assert 0 <= figures["late_s"] < 20
