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
from meshwright.planner.explorer.half import Half, SoftwareRules
from meshwright.planner.explorer.legal_tables import controls, counts_of, legal_tables, stage_runs, timeline_tables
from meshwright.planner.explorer.matrix_tables import matrix_tables
from meshwright.planner.explorer.option_tables import option_tables
from meshwright.planner.explorer.time_tables import time_tables
from meshwright.planner.search.landscape import FIELDS, landscape
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.flop import token_flop
from meshwright.spec.inventory import num_parameters
from meshwright.spec.schedule_kinds import KINDS

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")
"""Of a shape, what the page reads under the same name."""
STACK = ("slack", "sharding", "vocab_parallel", "outputs_kept", "step_buffers")
"""Of a stack, what memory.js and peaks.js read under the same name."""
SCRIPTS = ("schedule.js", "legal.js", "matrices.js", "memory.js", "peaks.js", "time.js", "words.js", "controls.js",
           "bars.js", "map.js", "timeline.js", "options.js",
           "half.js", "differences.js", "theme.js", "page.js")  # fmt: skip
"""In the order in which they read each other."""


def page(*halves: Half) -> str:
    """The HTML page for one cluster, or for two side by side."""
    return assemble(*(data(one) for one in halves))


def data(half: Half) -> dict[str, Any]:
    """All numbers of a half. A batch ramp is left aside: a step has the recipe's global batch."""
    plan = replace(half.plan, recipe=replace(half.plan.recipe, batch_ramp=(), noise_scale_every=0))
    room, software = usable_bytes(plan), half.software
    found = landscape(half.of, plan, fixed=software.fixed if software else None)
    shown = [dict(zip(FIELDS, fields, strict=True)) for fields, *_ in found["points"]]
    return {
        **facts(half.of, room, shown, software),
        "landscape": {**found, "start": _start(found, half.of.largest_share * room)},
        "title": half.title,
        "command": half.command,
        "price": {"usd_per_hour": half.usd_per_hour, "words": half.price_words.replace("https://", "")},
    }


def _start(found: dict[str, Any], room: float) -> int:
    """The fastest layout within so many bytes; where none is, the map's best."""
    peaks = [peak for *_, peak in found["points"][: found["front"]]]
    return next((place for place, peak in enumerate(peaks) if peak <= room), found["best"])


def schedules() -> dict[str, Any]:
    """What words.js and schedule.js read of each schedule, by name: `schedules` of a page or of a half."""
    return {name: asdict(kind) for name, kind in KINDS.items()}


def facts(
    of: Estimator, usable: float = inf, layouts: Iterable[dict[str, Any]] = (), software: SoftwareRules | None = None
) -> dict[str, Any]:
    """What the page's formulas read: shape, recipe, cluster, stack and the linear coefficients. `usable`: bytes of a
    device that a program can have. `layouts`: of the map."""
    shape, recipe, device, seen = of.shape, of.recipe, of.cluster.device, list(layouts)
    degrees = legal_degrees(of, of.cluster.devices)
    values = controls(of, degrees, seen)
    counts = counts_of(of, values)
    return {
        "model": {
            "name": shape.name,
            "parameters": num_parameters(shape),
            **{size: getattr(shape, size) for size in SIZES},
            "experts": shape.moe.experts if shape.moe else 0,
            "first_dense": shape.moe.first_dense if shape.moe else 0,
            "legal": legal_tables(of, values, software.refusals if software else ()),
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
            "tight_bytes": of.largest_share * usable if isfinite(usable) else None,
            "flop_per_s": device.half_flop_per_s or of.speeds.peak_flop_per_s,
        },
        "stack": {
            "bucket_bytes": of.stack.update_bucket_bytes,
            "widened_bytes": of.widened_bytes,
            "reserve_bytes": of.stack.reserve_bytes,
            "own": of.stack.is_meshwright,
            **{name: getattr(of.stack, name) for name in STACK},
        },
        "controls": values,
        "schedules": schedules(),
        "timelines": timeline_tables(values, counts),
        "memory": coefficients(of, of.cluster.devices),
        "time": time_tables(of, degrees),
        "muon": matrix_tables(of, degrees),
        "software": _software(of, values, seen, counts, software) if software else None,
    }


def _software(
    of: Estimator, values: dict[str, Any], layouts: list[dict[str, Any]], counts: Iterable[int], rules: SoftwareRules
) -> dict[str, Any]:
    said = {"word": rules.word, "title": rules.title, "known_errors": list(rules.known_errors)}
    return {**said, **option_tables(of, values, layouts, counts, rules)}


def source(*names: str) -> str:
    """The text of some of the page's files, one after the other."""
    folder = files("meshwright.planner.explorer")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def assemble(*halves: dict[str, Any]) -> str:
    """The page of what `data` gave."""
    text = json.dumps({"halves": halves}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    found = source("page.html")
    for mark, part in (
        ("/*STYLE*/", source("colours.css", "page.css")),
        ("/*SCRIPT*/", source(*SCRIPTS)),
        ("/*DATA*/", text),
    ):
        found = found.replace(mark, part, 1)
    return found
