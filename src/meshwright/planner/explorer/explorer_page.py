"""The layout explorer: one HTML page that counts memory by itself, shows every layout, and plays the schedules.

The page's own files are package data in explorer/. Here they become one file with its data in it, which opens from
disk, offline. Nothing in it is loaded from anywhere.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.resources import files
from math import inf, isfinite
from typing import Any

from meshwright.planner.explorer.coefficients import coefficients, legal_degrees, matrix_tables
from meshwright.planner.explorer.half import Half, SoftwareRules
from meshwright.planner.explorer.legal_tables import controls, counts_of, legal_tables, stage_runs, timeline_tables
from meshwright.planner.explorer.nearby_times import nearby_times
from meshwright.planner.explorer.option_tables import option_tables
from meshwright.planner.search.landscape import FIELDS, landscape
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import KINDS
from meshwright.spec.weights.inventory import num_parameters, token_flop

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")
"""Fields of a shape that the page reads under the same name."""
STACK = ("slack", "sharding", "vocab_parallel", "outputs_kept", "step_buffers")
"""Fields of a stack that memory.js and peaks.js read under the same name."""
SCRIPTS = ("schedule.js", "legal.js", "matrices.js", "memory.js", "peaks.js", "words.js", "controls.js",
           "bars.js", "map.js", "timeline.js", "options.js",
           "half.js", "differences.js", "theme.js", "page.js")  # fmt: skip
"""Scripts in the order in which they read each other."""


def page(*halves: Half) -> str:
    """Return the HTML page for one cluster, or for two side by side."""
    return assemble(*map(data, halves))


def data(half: Half) -> dict[str, Any]:
    """Return all numbers of a half. A batch ramp is ignored: a step has the recipe's global batch."""
    plan = replace(half.plan, recipe=replace(half.plan.recipe, batch_ramp=(), noise_scale_every=0))
    room, software = usable_bytes(plan), half.software
    points = landscape(half.estimator, plan, fixed=software.fixed if software else None)
    shown = [dict(zip(FIELDS, fields, strict=True)) for fields, *_ in points["points"]]
    numbers, start = facts(half.estimator, room, shown, software), _start(points, half.estimator.largest_share * room)
    first = Layout(**{**shown[start], "sp": bool(shown[start]["sp"])})
    return {
        **numbers,
        "landscape": {**points, "start": start},
        "times": nearby_times(half.estimator, plan, first, numbers["controls"], software.fixed if software else None),
        "title": half.title,
        "command": half.command,
        "price": {"usd_per_hour": half.usd_per_hour, "words": half.price_words.replace("https://", "")},
    }


def _start(points: dict[str, Any], room: float) -> int:
    """Return the fastest layout within `room` bytes, or without one, the map's best."""
    peaks = [peak for *_, peak in points["points"][: points["front"]]]
    return next((number for number, peak in enumerate(peaks) if peak <= room), points["best"])


def schedules() -> dict[str, Any]:
    """Return the properties of each schedule by name, for words.js and schedule.js."""
    return {name: asdict(kind) for name, kind in KINDS.items()}


def facts(
    estimator: Estimator,
    usable: float = inf,
    layouts: Iterable[dict[str, Any]] = (),
    software: SoftwareRules | None = None,
) -> dict[str, Any]:
    """Return the inputs of the page's formulas: shape, recipe, cluster, stack and the linear coefficients.

    `usable`: bytes of a device that a program can have. `layouts`: those of the map.
    """
    shape, recipe, device, seen = estimator.shape, estimator.recipe, estimator.cluster.device, list(layouts)
    degrees = legal_degrees(estimator, estimator.cluster.devices)
    values = controls(estimator, degrees, seen)
    counts = counts_of(estimator, values)
    return {
        "model": {
            "name": shape.name,
            "parameters": num_parameters(shape),
            **{size: getattr(shape, size) for size in SIZES},
            "experts": shape.moe.experts if shape.moe else 0,
            "first_dense": shape.moe.first_dense if shape.moe else 0,
            "legal": legal_tables(estimator, values, software.refusals if software else ()),
            "stages": stage_runs(estimator, values),
            "activation_bytes": 4 if recipe.precision == "fp32" else 2,
        },
        "recipe": {"sequence": recipe.sequence, "global_batch": recipe.global_batch, "precision": recipe.precision},
        "token_flop": {length: token_flop(shape, length, causal=False).training for length in values["sequence"]},
        "cluster": {
            "device": device.name,
            "devices": estimator.cluster.devices,
            "per_node": estimator.cluster.devices_per_node,
            "memory_bytes": device.memory_bytes,
            "usable_bytes": usable if isfinite(usable) else None,
            "tight_bytes": estimator.largest_share * usable if isfinite(usable) else None,
            "flop_per_s": device.half_flop_per_s or estimator.speeds.peak_flop_per_s,
        },
        "stack": {
            "bucket_bytes": estimator.stack.update_bucket_bytes,
            "widened_bytes": estimator.widened_bytes,
            "reserve_bytes": estimator.stack.reserve_bytes,
            "own": estimator.stack.is_meshwright,
            **{name: getattr(estimator.stack, name) for name in STACK},
        },
        "controls": values,
        "schedules": schedules(),
        "timelines": timeline_tables(values, counts),
        "memory": coefficients(estimator, estimator.cluster.devices),
        "muon": matrix_tables(estimator, degrees),
        "software": None
        if software is None
        else {
            "word": software.word,
            "title": software.title,
            "known_errors": list(software.known_errors),
            **option_tables(estimator, values, seen, counts, software),
        },
    }


def source(*names: str) -> str:
    """Return the text of some of the page's files, joined."""
    folder = files("meshwright.planner.explorer")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def assemble(*halves: dict[str, Any]) -> str:
    """Return the page, given the numbers that `data` returned."""
    text = json.dumps({"halves": halves}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = source("page.html")
    for mark, part in (
        ("/*STYLE*/", source("colours.css", "page.css")),
        ("/*SCRIPT*/", source(*SCRIPTS)),
        ("/*DATA*/", text),
    ):
        html = html.replace(mark, part, 1)
    return html
