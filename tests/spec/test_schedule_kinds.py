"""One list of schedules: an entry in it is all that the readers need."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.spec.layout.schedule import KINDS

PACKAGE = Path(meshwright.__file__).parent
ENTRY = """    "wide": ScheduleKind(
        order=Rounds(hop=3),
        title="Made up",
        meaning="One forward, one backward, with three forward passes more for each rank nearer to the front.",
        formula="bubble (p - 1) / m",
        source="tests/spec/test_schedule_kinds.py",
    ),
"""
ASKED = """
import json

from meshwright import planfile
from meshwright.observe.oracle.features import FEATURES
from meshwright.planner.explorer.explorer_page import facts
from meshwright.planner.search.regions import Cell, pipelines
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.replay import replay
from meshwright.spec.layout.schedule import schedule

plan = Plan(
    model=presets.model("llama-tiny"), recipe=Recipe(sequence=64, global_batch=16, precision="bf16"),
    cluster=presets.cluster("h100x8", 1), layout=Layout(pp=4, dp_shard=2, schedule="wide", micro_batch=1),
)
page = facts(build_estimator(plan))
print(json.dumps({
    "legal": plan.violations(),
    "bubble": replay(schedule("wide", 4, 8)).bubble,
    "in_flight": replay(schedule("wide", 4, 8)).in_flight,
    "step_s": predict(plan).step_s,
    "schema": "wide" in json.dumps(planfile.schema()),
    "search": ["wide", 1] in [list(one) for one in pipelines(plan, Cell(1, False, 1, 1, 4, 2), 1, {})],
    "verify": FEATURES["pp wide"],
    "control": "wide" in page["controls"]["schedule"] and page["controls"]["vp"]["wide"][4],
    "page": page["schedules"]["wide"]["title"],
}))
"""


@pytest.mark.long
def test_a_schedule_is_one_entry_that_every_reader_finds(tmp_path: Path) -> None:
    """A copy of the package with one entry more: spec, schema, planner, search, verify and the page have it."""
    copy = tmp_path / "meshwright"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "spec" / "layout" / "schedule.py"
    text = path.read_text(encoding="utf-8")
    text = text.replace('"dualpipe-v"]\n', '"dualpipe-v", "wide"]\n', 1)
    text = text.replace("    ),\n}\n", f"    ),\n{ENTRY}}}\n", 1)
    assert text.count('"wide"') == 2
    path.write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", ASKED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    readers: dict[str, Any] = json.loads(ran.stdout)
    assert readers["legal"] == [] and readers["schema"] and readers["search"]
    assert 0.3 < readers["bubble"] <= 0.5 and readers["in_flight"][0] == 8  # three more for each of three ranks
    assert readers["step_s"] > 0
    assert readers["verify"] == {"pp": 2, "vp": 1, "schedule": "wide"}
    assert readers["control"] == [1] and readers["page"] == "Made up"


def test_no_other_file_of_the_page_names_a_schedule() -> None:
    """Its JavaScript writes out what Python declares; `1f1b` is what a layout without a pipeline has."""
    named = {
        f"{path.name}: {name}"
        for path in (PACKAGE / "planner" / "explorer").glob("*.js")
        for name in KINDS
        if f'"{name}"' in path.read_text(encoding="utf-8")
    }
    assert named <= {"controls.js: 1f1b", "page.js: 1f1b"}
