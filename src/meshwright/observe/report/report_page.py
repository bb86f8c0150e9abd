"""The report: one HTML page of one or several runs, from what their folders hold and nothing else.

The page's own files are package data in page/, and names, colours and tooltips are those of the layout explorer; they
become one file with its data in it, so that it opens from disk, offline. Nothing in it is loaded from anywhere.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from meshwright import planfile
from meshwright.observe.compare.finished_run import Finished
from meshwright.observe.compare.judge import compare
from meshwright.observe.compare.sources_of_columns import Column, columns
from meshwright.observe.compare.table import as_json, verdict
from meshwright.observe.report.loss_curves import curves, evaluations
from meshwright.observe.report.pipeline_view import executed_timeline, planned_timeline
from meshwright.observe.shared_document import PartPeak
from meshwright.planner.explain import layout_words
from meshwright.planner.explorer.explorer_page import schedules, source
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import num_parameters
from meshwright.spec.ledger import PLANNED
from meshwright.spec.places import pipeline_ranks
from meshwright.training.run_samples import recorded

SCRIPTS = ("charts.js", "curves.js", "samples.js", "memory.js", "pipeline.js", "rows.js", "page.js")
"""In the order in which they read each other."""
SAMPLED, LONGEST = 12, 4000
"""Steps whose samples are shown, and characters of a text."""
MOMENTS = 400
"""Of a memory timeline; of more, the highest of each stretch."""


def page(runs: Sequence[Finished], planners: Sequence[Estimator | None] = (), tolerance: float = 0.1) -> str:
    """The HTML page; the first run is the one whose details are shown first. `planners`: of each run one that knows
    its machine, or None; none of them by default."""
    names, planners = _names(runs), planners or [None] * len(runs)
    content = {
        "kinds": PLANNED,
        "schedules": schedules(),
        "runs": [data(*one, tolerance) for one in zip(runs, names, planners, strict=True)],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    found = _own("page.html")
    style = source("colours.css") + _own("page.css")
    script = "\n".join((source("words.js"), *map(_own, SCRIPTS)))
    for mark, part in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", text)):
        found = found.replace(mark, part, 1)
    return found


def _own(name: str) -> str:
    return (files("meshwright.observe.report") / "page" / name).read_text(encoding="utf-8")


def _names(runs: Sequence[Finished]) -> list[str]:
    """Folder names, with as many of the folders around them as tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    deep = next((n for n in range(1, 9) if len({p[-n:] for p in parts}) == len(set(parts))), 1)
    return ["/".join(p[-deep:]) for p in parts]


def _place(path: Path) -> str:
    """The folder as a command names it; of a full path the last two names alone, for the rest is this machine's."""
    return str(Path(*path.parts[-2:])) if path.is_absolute() else str(path)


def data(run: Finished, name: str, of: Estimator | None, tolerance: float) -> dict[str, Any]:
    """All that the page shows of a run."""
    plan = run.plan_as_run
    three = columns(run, of)
    found = compare(plan, three, tolerance)
    measured = three[2].found
    return {
        "name": name,
        "place": _place(run.path),
        "model": plan.model.name,
        "parameters": num_parameters(plan.model),
        "layout": layout_words(replace(plan.layout, micro_batch=plan.layout.micro_batch_of(plan.recipe.global_batch))),
        "world": plan.layout.world,
        "pp": plan.layout.pp,
        "schedule": plan.layout.schedule,
        "batch": [plan.recipe.global_batch, plan.recipe.sequence],
        "precision": plan.recipe.precision,
        "device": _device(run),
        "capacity": _capacity(run),
        "curves": curves(run.steps),
        "evaluations": evaluations(run.evaluations),
        "samples": _samples(run),
        "last": _last(run),
        "comparison": as_json(found, name),
        "verdict": list(verdict(found)),
        "moments": {key: _moments(column, plan) for key, column in zip(("dryrun", "measured"), three[1:], strict=True)},
        "timelines": {
            "planned": planned_timeline(
                of or build_estimator(plan), plan, seconds=three[0].found is not None and not three[0].timeless
            ),
            "executed": executed_timeline(plan, measured) if measured else None,
        },
        "plan": yaml.safe_dump(planfile.dump(planfile.without_folders(run.plan)), sort_keys=False, width=100),
        "environment": {
            key: ", ".join(map(str, value)) if isinstance(value, list) else value
            for key, value in run.environment.items()
            if value is not None
        },
    }


def _samples(run: Finished) -> list[dict[str, Any]]:
    """The last samples, oldest first. RunError: a damaged line."""
    found = []
    for one in recorded(run.path / "samples.jsonl")[-SAMPLED:]:
        items = [
            {name: str(sample.get(name, ""))[:LONGEST] for name in ("prompt", "text", "held_out")}
            for sample in one["samples"]
            if isinstance(sample, dict)
        ]
        found.append({"step": one.get("step", 0), "items": items, "problem": str(one.get("problem", ""))})
    return found


def _capacity(run: Finished) -> int | None:
    return int(usable_bytes(run.plan)) if run.plan.cluster.device.memory_bytes else None


def _device(run: Finished) -> str:
    found = run.environment.get("device") or run.environment.get("devices") or ""
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


def _last(run: Finished) -> dict[str, Any]:
    """What the tiles say."""
    if not run.steps:
        return {"steps": 0}
    last, score = run.steps[-1], run.evaluations[-1] if run.evaluations else {}
    return {
        "steps": last["step"],
        "of": run.plan.recipe.steps,
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "bits_per_byte": score.get("bits_per_byte"),
        "eval_loss": score.get("loss"),
    }


def _moments(column: Column, plan: Any) -> dict[str, list[list[Any]]]:
    """Rank -> [name, step, bytes by kind in the order of PLANNED]."""
    found = {}
    for rank in pipeline_ranks(plan.layout):
        seen = column.rank(rank)
        told = seen.memory_timeline or seen.passes if seen else ()
        if told:
            found[str(rank)] = [
                [
                    one.name,
                    step,
                    [{held.kind: held.bytes for held in one.memory}.get(kind, 0) for kind in PLANNED],
                ]
                for one, step in _highest(told)
            ]
    return found


def _highest(moments: Sequence[PartPeak]) -> list[tuple[PartPeak, int]]:
    """Of neighbours the one that held most, and its step, which a dry run tells by the name of a part before it."""
    with_steps, step = [], 0
    for one in moments:
        word, _, number = one.name.partition(" ")
        step = one.step or (int(number) if word == "step" and number.isdigit() else 0 if word == "evaluate" else step)
        with_steps.append((one, step))
    size = -(-len(with_steps) // MOMENTS)
    groups = [with_steps[start : start + size] for start in range(0, len(with_steps), size)]
    return [max(group, key=lambda entry: sum(held.bytes for held in entry[0].memory)) for group in groups]
