"""The benchmark of recovery: both divergences, and what it prints."""

import json

import pytest

from benchmarks import quantized_recovery


@pytest.mark.slow
def test_a_short_one_has_both_divergences(capsys: pytest.CaptureFixture[str]) -> None:
    quantized_recovery.main(["--teacher-steps", "3", "--steps", "2", "--seeds", "1", "--json"])
    document = json.loads(capsys.readouterr().out)
    [entry] = document["seeds"]
    assert 0 < entry["rounded"] < 1 and 0 < entry["recovered"] < 1
    assert document["share"] == pytest.approx(1 - entry["recovered"] / entry["rounded"])
    assert "recovered" in quantized_recovery.text(document)
