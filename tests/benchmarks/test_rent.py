"""The benchmark of `rent` runs, and says what its claims read."""

import json
import sys

import pytest

from benchmarks import rent


@pytest.mark.long
def test_it_prints_what_the_claims_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rent", "--json", "--model", "llama-3.2-1b", "--tokens", "5B", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", words)
    rent.main()
    found = json.loads(capsys.readouterr().out)
    assert found["processor_seconds"] > 0 and found["clusters"] > 50 and found["front"] > 3
    assert 0 <= found["largest_goodput_gap"] < 0.01 and 0 <= found["largest_interval_loss"] < 1e-3
