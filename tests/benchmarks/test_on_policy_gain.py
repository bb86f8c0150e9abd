"""The benchmark of on-policy distillation: both ways, and what it prints."""

import json

import pytest

from benchmarks import on_policy_gain


@pytest.mark.slow
def test_a_short_one_has_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    on_policy_gain.main(["--teacher-steps", "3", "--begins", "2", "--steps", "2", "--seeds", "1", "--json"])
    document = json.loads(capsys.readouterr().out)
    [ways] = document["students"]
    assert list(ways) == ["offline", "on-policy"]
    assert all(0 < way["own"] < 10 and 0 < way["text"] < 10 for way in ways.values())
    assert document["own_ratio"] == pytest.approx(ways["on-policy"]["own"] / ways["offline"]["own"])
    assert "own words" in on_policy_gain.text(document)
