"""The benchmark of distillation: its controls, and what it prints."""

import json
import math

import pytest

from benchmarks import distill_gain


@pytest.mark.slow
def test_a_short_one_has_every_control(capsys: pytest.CaptureFixture[str]) -> None:
    distill_gain.main(["--teacher-steps", "3", "--steps", "2", "--seeds", "1", "--json"])
    document = json.loads(capsys.readouterr().out)
    [ways] = document["students"]
    assert list(ways) == ["cross-entropy", "online", "kept", "longer"]
    assert all(0 < way["loss"] < 10 and way["seconds"] > 0 for way in ways.values())
    assert ways["longer"]["steps"] >= ways["kept"]["steps"] == 2
    assert all(math.isfinite(gain) for gain in document["gains"].values())
    assert "cross-entropy" in distill_gain.text(document)
