"""The report: one HTML page of one or several runs, from the contents of their folders alone.

The page's files are package data in page_files/; names, colours and tooltips are those of the layout explorer. They
become one file with its data, which opens from disk, offline, and loads nothing.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from meshwright import planfile
from meshwright.interface.answers.markup import report_style
from meshwright.observe.compare.comparison import Column, columns, compare
from meshwright.observe.compare.finished_run import FinishedRun, goodput_document
from meshwright.observe.compare.table import as_json, verdict
from meshwright.observe.shared_document import PartPeak, Ran, RankRecord, SharedDocument
from meshwright.planner.cost.stage_costs import ranks_of
from meshwright.planner.explain import layout_words
from meshwright.planner.explorer.explorer_page import schedules, source
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Plan, num_parameters
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.layout.replay import EVEN, replay
from meshwright.spec.layout.schedule import Action, schedule
from meshwright.spec.memory.held import PLANNED
from meshwright.training.plot import Smoothed
from meshwright.training.run_samples import read_samples

SCRIPTS = ("charts.js", "curves.js", "samples.js", "memory.js", "pipeline.js", "rows.js", "page.js")
"""Scripts in the order of their dependencies."""
SAMPLED, LONGEST = 12, 4000
"""Steps whose samples are shown, and most characters of a text."""
MOMENTS = 400
"""Most points of a memory timeline; the highest of each interval is shown."""
POINTS = 600
"""Most points of a curve, which a screen can still show."""
SERIES = ("loss", "cross_entropy", "grad_norm", "tokens_per_second", "mfu_causal", "lr", "step_seconds")
PLACES = ("step", "tokens", "seconds")
MOST_BOXES = 20_000
"""Most boxes of all ranks. A longer step is cut after its beginning."""
Box = tuple[str, int, int, float, float]
"""(kind, stage, micro-batch, start, length)."""
PASSES = ("F", "B", "W", "BW")
MADE_ELSEWHERE = ("F", "B", "BW")
"""Passes that read what a neighbouring stage sends."""


def page(runs: Sequence[FinishedRun], planners: Sequence[Estimator | None] = (), tolerance: float = 0.1) -> str:
    """Return the HTML page. The first run's details are shown first.

    `planners` holds, for each run, a planner that knows its machine, or None. Empty = none.
    """
    names, planners = _short_names(runs), planners or [None] * len(runs)
    content = {
        "kinds": PLANNED,
        "schedules": schedules(),
        "runs": [data(*arguments, tolerance) for arguments in zip(runs, names, planners, strict=True)],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = _read_part("page.html")
    style = source("colours.css") + report_style()
    script = "\n".join((source("words.js"), *map(_read_part, SCRIPTS)))
    for mark, part in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", text)):
        html = html.replace(mark, part, 1)
    return html


def _read_part(name: str) -> str:
    return (files("meshwright.verbs.report") / "page_files" / name).read_text(encoding="utf-8")


def _short_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Return folder names, with as many parent folders as tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    deep = next((n for n in range(1, 9) if len({p[-n:] for p in parts}) == len(set(parts))), 1)
    return ["/".join(p[-deep:]) for p in parts]


def _short_path(path: Path) -> str:
    """Return a relative path, or the last two names of a full path: the rest is private to this machine."""
    return str(Path(*path.parts[-2:])) if path.is_absolute() else str(path)


def data(run: FinishedRun, name: str, planner: Estimator | None, tolerance: float) -> dict[str, Any]:
    """Return all that the page shows of a run."""
    plan = run.plan_as_run
    three = columns(run, planner)
    comparison = compare(plan, three, tolerance)
    measured = three[2].document
    return {
        "name": name,
        "place": _short_path(run.path),
        "model": plan.model.name,
        "parameters": num_parameters(plan.model),
        "layout": layout_words(replace(plan.layout, micro_batch=plan.layout.micro_batch_of(plan.recipe.global_batch))),
        "world": plan.layout.world,
        "pp": plan.layout.pp,
        "schedule": plan.layout.schedule,
        "batch": [plan.recipe.global_batch, plan.recipe.sequence],
        "precision": plan.recipe.precision,
        "device": _device(run),
        "capacity": int(usable_bytes(run.plan)) if run.plan.cluster.device.memory_bytes else None,
        "curves": curves(run.steps),
        "evaluations": evaluations(run.evaluations),
        "samples": _samples(run),
        "last": _totals(run),
        "goodput": goodput_document(run),
        "comparison": as_json(comparison, name),
        "verdict": list(verdict(comparison)),
        "moments": {
            key: _memory_moments(column, plan) for key, column in zip(("dryrun", "measured"), three[1:], strict=True)
        },
        "timelines": {
            "planned": planned_timeline(
                planner or build_estimator(plan), plan, seconds=three[0].document is not None and not three[0].timeless
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


def _samples(run: FinishedRun) -> list[dict[str, Any]]:
    """Return the last samples, oldest first. Raises RunError for a damaged line."""
    samples = []
    for record in read_samples(run.path / "samples.jsonl")[-SAMPLED:]:
        items = [
            {name: str(sample.get(name, ""))[:LONGEST] for name in ("prompt", "text", "held_out")}
            for sample in record["samples"]
            if isinstance(sample, dict)
        ]
        samples.append({"step": record.get("step", 0), "items": items, "problem": str(record.get("problem", ""))})
    return samples


def _device(run: FinishedRun) -> str:
    devices = run.environment.get("device") or run.environment.get("devices") or ""
    return ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)


def _totals(run: FinishedRun) -> dict[str, Any]:
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


def _memory_moments(column: Column, plan: Any) -> dict[str, list[list[Any]]]:
    """Return rank -> [name, step, bytes by kind in the order of PLANNED]."""
    by_rank = {}
    for rank in pipeline_ranks(plan.layout):
        seen = column.rank(rank)
        parts = seen.memory_timeline or seen.passes if seen else ()
        if parts:
            by_rank[str(rank)] = [
                [part.name, step, [{held.kind: held.bytes for held in part.memory}.get(kind, 0) for kind in PLANNED]]
                for part, step in _thin_moments(parts)
            ]
    return by_rank


def _thin_moments(moments: Sequence[PartPeak]) -> list[tuple[PartPeak, int]]:
    """Return the fullest of neighbours with its step, which a dry run tells by the name of an earlier part."""
    with_steps, step = [], 0
    for moment in moments:
        word, _, number = moment.name.partition(" ")
        step = moment.step or (
            int(number) if word == "step" and number.isdigit() else 0 if word == "evaluate" else step
        )
        with_steps.append((moment, step))
    size = -(-len(with_steps) // MOMENTS)
    groups = [with_steps[start : start + size] for start in range(0, len(with_steps), size)]
    return [max(group, key=lambda entry: sum(held.bytes for held in entry[0].memory)) for group in groups]


def curves(steps: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return series by name.

    A point of several steps has their mean; loss and gradient norm also have `loss_low` and `loss_high`, so that no
    spike is hidden. None = not a number, or not known.
    """
    smooth = Smoothed()
    smoothed = [smooth.add(float(step["loss"])) for step in steps]
    groups = _groups(len(steps))
    series: dict[str, list[float | None]] = {
        name: [_number(steps[group[-1]].get(name)) for group in groups] for name in PLACES
    }
    series["smooth"] = [_number(smoothed[group[-1]]) for group in groups]
    for name in SERIES:
        values = [[_number(steps[index].get(name)) for index in group] for group in groups]
        if any(value is not None for group in values for value in group):
            series[name] = [_mean(group) for group in values]
            if len(groups) < len(steps) and name in ("loss", "grad_norm"):
                series[f"{name}_low"] = [_extreme(min, group) for group in values]
                series[f"{name}_high"] = [_extreme(max, group) for group in values]
    return series


def evaluations(records: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return held-out loss and bits per byte, with the step."""
    return {name: [_number(record.get(name)) for record in records] for name in ("step", "loss", "bits_per_byte")}


def _groups(count: int) -> list[range]:
    number = min(count, POINTS)
    edges = [round(index * count / number) for index in range(number + 1)] if number else [0]
    return [range(a, b) for a, b in pairwise(edges)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known else None


def _extreme(choose: Any, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def planned_timeline(planner: Estimator, plan: Plan, *, seconds: bool) -> dict[str, Any]:
    """Return the schedule in the planner's seconds; without `seconds` (unknown device) all passes are equally long."""
    layout, recipe = plan.layout, plan.recipe
    m = layout.micro_batches(recipe.global_batch)
    send_s, costs = 0.0, planner.costs
    if seconds and layout.pp > 1:
        parts, _ = costs.parts(layout)
        send_s = planner.links.send_seconds(parts.between_bytes, ranks_of(layout, "pp")[1])
    played = replay(_actions(plan, m), costs.stages(layout, costs.pass_terms(layout)) if seconds else EVEN, send_s)
    boxes: list[list[Box]] = [
        [(s.action.kind, s.action.stage, s.action.micro_batch, s.start_s, s.end_s - s.start_s) for s in rank_boxes]
        for rank_boxes in played.spans
    ]
    if seconds:
        time, _ = planner.measure(layout)
        for rank_boxes in boxes:
            rank_boxes.extend(
                _boxes_after(
                    played.total_s, (("gradients", time.gradients_s), ("optimizer", time.optimizer_s + time.muon_s))
                )
            )
    return _document(pipeline_ranks(layout), boxes, "seconds" if seconds else "passes", played.bubble)


def _actions(plan: Plan, m: int) -> tuple[tuple[Action, ...], ...]:
    layout = plan.layout
    if layout.pp > 1:
        return schedule(layout.schedule, layout.pp, m, layout.vp)
    return (tuple(Action(kind, 0, i) for i in range(m) for kind in ("F", "BW")),)


def _boxes_after(start: float, parts: Iterable[tuple[str, float]]) -> Iterable[Box]:
    for name, length in parts:
        if length > 0:
            yield (name, -1, -1, start, length)
            start += length


def executed_timeline(plan: Plan, profile: SharedDocument) -> dict[str, Any] | None:
    """Return the last whole step of which all pipeline stages have spans. None without spans."""
    ranks = [
        next((record for record in profile.ranks if record.rank == rank), None) for rank in pipeline_ranks(plan.layout)
    ]
    read_samples = [record for record in ranks if record is not None and record.spans]
    if not read_samples or len(read_samples) < len(ranks):
        return None
    steps = [_spans_by_step(record) for record in read_samples]
    last = min(len(of_rank) for of_rank in steps) - 1
    chosen = [of_rank[last] for of_rank in steps]
    first = min(span.start_s for spans_of_rank in chosen for span in spans_of_rank)
    boxes = [
        [(s.name, s.stage, s.micro_batch, s.start_s - first, s.seconds) for s in spans_of_rank]
        for spans_of_rank in chosen
    ]
    document = _document([record.rank for record in read_samples], boxes, "seconds", profile.bubble_fraction)
    for spans_of_rank, spans, waits in zip(chosen, document["spans"], _wait_seconds(chosen), strict=True):
        for _, box, wait_s in zip(spans_of_rank, spans, waits, strict=False):
            if wait_s > 0:
                box.append(_rounded(wait_s))
    return document


def _wait_seconds(ranks: Sequence[Sequence[Ran]]) -> list[list[float]]:
    """Return how long each span began before the neighbouring stage had finished the same micro-batch."""
    ends = {(_direction(span.name), span.stage, span.micro_batch): span.end_s for spans in ranks for span in spans}
    waits_of_ranks = []
    for spans in ranks:
        waits = []
        for span in spans:
            before = span.stage - 1 if span.name == "F" else span.stage + 1
            ready = (
                ends.get((_direction(span.name), before, span.micro_batch), 0.0) if span.name in MADE_ELSEWHERE else 0.0
            )
            waits.append(min(span.seconds, max(0.0, ready - span.start_s)))
        waits_of_ranks.append(waits)
    return waits_of_ranks


def _direction(name: str) -> str:
    return "backward" if name in ("B", "BW") else name


def _spans_by_step(rank: RankRecord) -> list[list[Ran]]:
    """Split a rank's spans by step. A pass of a micro-batch occurs once per step; later parts go with it."""
    steps: list[list[Ran]] = [[]]
    seen: Counter[tuple[str, int, int]] = Counter()
    for span in sorted(rank.spans, key=lambda entry: entry.start_s):
        if span.name in PASSES:
            key = span.name, span.stage, span.micro_batch
            if seen[key] == len(steps):
                steps.append([])
            seen[key] += 1
        steps[-1].append(span)
    return steps


def _document(ranks: Sequence[int], boxes: Sequence[Sequence[Box]], unit: str, bubble: float | None) -> dict[str, Any]:
    most = MOST_BOXES // max(1, len(boxes))
    total = max((start + length for rank_boxes in boxes for *_, start, length in rank_boxes), default=0.0)
    return {
        "unit": unit,
        "total": total,
        "bubble": bubble,
        "cut": any(len(rank_boxes) > most for rank_boxes in boxes),
        "ranks": list(ranks),
        "spans": [
            [[kind, stage, i, _rounded(start), _rounded(length)] for kind, stage, i, start, length in rank_boxes[:most]]
            for rank_boxes in boxes
        ],
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
