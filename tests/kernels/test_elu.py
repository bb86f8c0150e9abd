"""The example of docs/learn/fusion.md: five kernels or one, and the same numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "elu.py"


def test_the_example_counts_and_agrees() -> None:
    command = [sys.executable, str(SCRIPT), "--elements", "10000", "--no-compile", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    eager, by_hand = json.loads(finished.stdout)
    assert (eager["kernels"], eager["bytes"]) == (5, 42)
    assert (by_hand["kernels"], by_hand["bytes"]) == (1, 8)
    assert max(eager["difference"], by_hand["difference"]) < 1e-6
