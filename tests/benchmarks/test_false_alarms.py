"""The benchmark of false alarms, with short times."""

import pytest

from benchmarks.false_alarms import measure


@pytest.mark.slow
def test_it_runs() -> None:
    found = measure(stall_s=1.0, pause_s=1.0, limit_s=4.0)
    assert found["false_alarms"] == 0 and found["missed"] == 0, found
    assert 0 <= found["late_s"] < 20
