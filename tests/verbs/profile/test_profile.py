"""Files of `profile`, read by compare, report, calibrate and train."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright import compat, planfile
from meshwright.planner.machine.clusterfile import load, text
from tests.planner.test_clusterfile import machine
from tests.verbs.toy import RECIPE, SHAPE, call, refused, train, write_texts

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="written for two processes on a CPU"),
]

PACKED_BYTES = 600_000 if compat.blas_is_slow() else 0
"""What oneDNN packs of a transposed operand during a product, where fp32 products are its (docs/dryrun.md): no dry run
counts it."""


def test_a_profile_is_compared_reported_and_fed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, known, better = tmp_path / "run", tmp_path / "known.toml", tmp_path / "better.toml"
    words = ["profile", *SHAPE, *RECIPE, "layout.dp_replicate=2", "layout.micro_batch=2", f"run={run}", "--steps", "1"]
    assert call(capsys, *words)[0] == 0
    assert planfile.read(run / "plan.yaml").layout.world == 2

    code, out, errors = call(capsys, "compare", run, "--json", "--tolerance", "0.2")
    document = json.loads(out)
    assert document["columns"]["measured"]["about"] == "a profile of the plan (profile.json)", errors
    rows = {(row["section"], row["what"], row["unit"]): row for row in document["rows"]}
    peak = rows["memory", "peak", "bytes"]
    assert 0.95 * peak["measured"] - PACKED_BYTES < peak["dryrun"] < 1.05 * peak["measured"]
    for unit in ("bytes", "calls"):
        sent = rows["traffic", "data all_reduce", unit]
        assert sent["dryrun"] == sent["measured"] > 0
    assert rows["time", "compute", "seconds"]["measured"] > 0 and code in (0, 4)
    assert json.loads((run / "dryrun.json").read_text())["source"] == "dryrun"

    assert call(capsys, "report", run)[0] == 0
    assert "a profile of the plan" in (run / "report.html").read_text()

    known.write_text(text(replace(machine(), stack=replace(machine().stack, step_s=0.0))))
    code, _, errors = call(capsys, "calibrate", "--from", run, "--cluster", known, "--out", better)
    assert code == 0 and "predicted" in errors
    took = json.loads((run / "profile.json").read_text())["step_seconds"]
    plan = planfile.read(run / "plan.yaml")
    off = []
    for path in (known, better):
        there = load(path)
        on_machine = replace(plan, cluster=there.cluster(2))
        off.append(abs(there.estimator(on_machine).predict(on_machine).step_s / took - 1))
    assert off[1] < off[0]

    before = (run / "plan.yaml").read_bytes(), (run / "profile.json").read_bytes()
    line = refused(capsys, *words, "layout.micro_batch=1")
    assert "another model, recipe or layout" in line
    assert before == ((run / "plan.yaml").read_bytes(), (run / "profile.json").read_bytes())


def test_what_was_profiled_is_trained_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan.yaml is this plan's: nothing is lost. One of another plan stays, and is said."""
    training = train(write_texts(tmp_path / "texts"), tmp_path / "run")
    profile = ["profile", *training[2:], "--steps", "1"]
    code, out, _ = call(capsys, *profile)
    assert code == 0 and "operation" in out and "MiB sent" not in out, "one rank sends nothing"
    assert "refusing to overwrite it" in refused(capsys, *training, "recipe.steps=3")
    assert call(capsys, *training)[0] == 0
    assert (tmp_path / "run" / "checkpoints").is_dir() and (tmp_path / "run" / "profile.json").exists()
    assert call(capsys, *profile)[0] == 0
