"""`meshwright calibrate` on this machine, a few sizes only; the plans that it looks at."""

import json
import math
from pathlib import Path

import pytest

from meshwright.observe.timed_steps import Timing, measure_steps
from meshwright.planner.machine.clusterfile import load, text
from meshwright.verbs.calibrate.campaign import calibrate, sample_plans
from meshwright.verbs.main import main


@pytest.mark.slow
def test_quick_calibration_makes_a_file_that_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    machine = calibrate(device="cpu", worlds=(1, 2), quick=True)
    path.write_text(text(machine))
    loaded = load(path)
    assert set(loaded.rates) == {1, 2} and loaded.provenance["command"] == "meshwright calibrate --quick"
    curves = loaded.rates[2].links.curves
    assert curves is not None
    assert {name for name, _ in curves.seconds} == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"}
    for plan in sample_plans(loaded, (1, 2), "fp32"):
        predicted = loaded.estimator(plan).predict(plan)
        assert 1e-3 < predicted.step_s < 1e3 and math.isfinite(predicted.peak_bytes)
    words = ["plan", "gpt2", "--cluster", f"{path}x2", "--recipe", "precision=fp32", "--recipe", "global_batch=4"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["cluster"]["devices_per_node"] == 2
    plans = [plan for plan in sample_plans(loaded, (1, 2), "fp32") if plan.layout.tp == 2 or plan.layout.pp == 2]
    assert all(0 < seconds < 60 for seconds in measure_steps(plans, Timing(seconds=0.0, least=1)))


@pytest.mark.parametrize("out", ["x.txt", "absent/x.toml"])
def test_a_wrong_place_is_refused_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--out", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err.startswith("meshwright: --out")
