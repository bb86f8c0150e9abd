"""The layout explorer: one HTML page that counts memory by itself, shows every layout, and plays the schedules.

The page's own files are package data in explorer/; here they become one file with its data in it, so that it opens from
disk, offline. Nothing in it is loaded from anywhere.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.resources import files
from math import inf, isfinite
from typing import Any

from meshwright.planner.explorer.coefficients import coefficients, legal_degrees
from meshwright.planner.explorer.legal_tables import controls, counts_of, legal_tables, stage_runs, timeline_tables
from meshwright.planner.explorer.matrix_tables import matrix_tables
from meshwright.planner.explorer.time_tables import time_tables
from meshwright.planner.search.landscape import FIELDS, landscape
from meshwright.planner.search.recommend import FREE
from meshwright.planner.step.predict import Estimator, estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.flop import token_flop
from meshwright.spec.inventory import num_parameters
from meshwright.spec.plan import Plan
from meshwright.spec.schedule_kinds import KINDS

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")
"""Of a shape, what the page reads under the same name."""
STACK = ("own", "slack", "sharding", "vocab_parallel", "outputs_kept", "step_buffers")
"""Of a stack, what memory.js and peaks.js read under the same name."""
SCRIPTS = ("schedule.js", "legal.js", "matrices.js", "memory.js", "peaks.js", "time.js", "words.js", "controls.js",
           "bars.js", "map.js", "timeline.js", "page.js")  # fmt: skip
"""In the order in which they read each other."""


def page(plan: Plan, of: Estimator | None = None, command: str = "") -> str:
    """The HTML page for a plan's model, recipe and cluster; its layout does not matter. `of`: of a measured machine.
    `command`: what of `meshwright plan` asks about the same model and cluster, for the page to complete."""
    return _assemble({**data(plan, of), "command": command})


def data(plan: Plan, of: Estimator | None = None) -> dict[str, Any]:
    """All numbers of the page. A batch ramp is left aside: a step has the recipe's global batch."""
    plan = replace(plan, recipe=replace(plan.recipe, batch_ramp=(), noise_scale_every=0))
    of, room = of or estimator(plan), usable_bytes(plan)
    found = landscape(of, plan)
    shown = [dict(zip(FIELDS, fields, strict=True)) for fields, *_ in found["points"]]
    return {**facts(of, room, shown), "landscape": {**found, "start": _start(found, room)}}


def _start(found: dict[str, Any], room: float) -> int:
    """The fastest layout that leaves some memory free; where none does, the map's best."""
    peaks = [peak for *_, peak in found["points"][: found["front"]]]
    return next((place for place, peak in enumerate(peaks) if peak <= (1 - FREE) * room), found["best"])


def schedules() -> dict[str, Any]:
    """What words.js and schedule.js read of each schedule, by name: `DATA.schedules` of a page."""
    return {name: asdict(kind) for name, kind in KINDS.items()}


def facts(of: Estimator, usable: float = inf, layouts: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the page's formulas read: shape, recipe, cluster, stack and the linear coefficients. `usable`: bytes of a
    device that a program can have. `layouts`: of the map."""
    shape, recipe, device = of.shape, of.recipe, of.cluster.device
    degrees = legal_degrees(of, of.cluster.devices)
    values = controls(of, degrees, layouts)
    return {
        "model": {
            "name": shape.name,
            "parameters": num_parameters(shape),
            **{size: getattr(shape, size) for size in SIZES},
            "experts": shape.moe.experts if shape.moe else 0,
            "first_dense": shape.moe.first_dense if shape.moe else 0,
            "legal": legal_tables(of, values),
            "stages": stage_runs(of, values),
            "activation_bytes": 4 if recipe.precision == "fp32" else 2,
        },
        "recipe": {"sequence": recipe.sequence, "global_batch": recipe.global_batch, "precision": recipe.precision},
        "token_flop": {length: token_flop(shape, length, causal=False).training for length in values["sequence"]},
        "cluster": {
            "device": device.name,
            "devices": of.cluster.devices,
            "per_node": of.cluster.devices_per_node,
            "memory_bytes": device.memory_bytes,
            "usable_bytes": usable if isfinite(usable) else None,
            "tight_bytes": (1 - FREE) * usable if isfinite(usable) else None,
            "flop_per_s": device.half_flop_per_s or of.speeds.peak_flop_per_s,
        },
        "stack": {
            "bucket_bytes": of.stack.update_bucket_bytes,
            "widened_bytes": of.widened_bytes,
            "reserve_bytes": of.stack.reserve_bytes,
            **{name: getattr(of.stack, name) for name in STACK},
        },
        "controls": values,
        "schedules": schedules(),
        "timelines": timeline_tables(values, counts_of(of, values)),
        "memory": coefficients(of, of.cluster.devices),
        "time": time_tables(of, degrees),
        "muon": matrix_tables(of, degrees),
    }


def source(*names: str) -> str:
    """The text of some of the page's files, one after the other."""
    folder = files("meshwright.planner.explorer")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _assemble(content: dict[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    found = source("page.html")
    for mark, part in (
        ("/*STYLE*/", source("colours.css", "page.css")),
        ("/*SCRIPT*/", source(*SCRIPTS)),
        ("/*DATA*/", text),
    ):
        found = found.replace(mark, part, 1)
    return found
