"""The layout explorer: one HTML page that counts memory by itself, shows every layout, and plays the schedules.

The page's own files are package data in explorer/; here they become one file with its data in it, so that it opens from
disk, offline. Nothing in it is loaded from anywhere.
"""

import json
from dataclasses import replace
from importlib.resources import files
from math import inf, isfinite
from typing import Any

from meshwright.planner.explorer.coefficients import coefficients
from meshwright.planner.search.landscape import landscape
from meshwright.planner.search.ranking import usable_bytes
from meshwright.planner.step.predict import Estimator, estimator
from meshwright.spec.flop import token_flop
from meshwright.spec.inventory import num_parameters
from meshwright.spec.plan import Plan

SCRIPTS = ("schedule.js", "legal.js", "memory.js", "peaks.js", "words.js", "controls.js", "bars.js",
           "map.js", "timeline.js", "page.js")  # fmt: skip
"""In the order in which they read each other."""


def page(plan: Plan, of: Estimator | None = None) -> str:
    """The HTML page for a plan's model, recipe and cluster; its layout does not matter. `of`: of a measured machine."""
    return _assemble(data(plan, of))


def data(plan: Plan, of: Estimator | None = None) -> dict[str, Any]:
    """All numbers of the page. A batch ramp is left aside: a step has the recipe's global batch."""
    plan = replace(plan, recipe=replace(plan.recipe, batch_ramp=(), noise_scale_every=0))
    of = of or estimator(plan)
    return {**facts(of, usable_bytes(plan)), "landscape": landscape(of, plan)}


def facts(of: Estimator, usable: float = inf) -> dict[str, Any]:
    """What the page's formulas read: shape, recipe, cluster, stack and the linear coefficients. `usable`: bytes of a
    device that a program can have."""
    shape, recipe, device = of.shape, of.recipe, of.cluster.device
    flop = [token_flop(shape, recipe.sequence, causal=causal).training for causal in (False, True)]
    return {
        "model": {
            "name": shape.name,
            "parameters": num_parameters(shape),
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "ffn": shape.ffn,
            "vocab": shape.vocab,
            "tied": shape.tied,
            "mla": shape.mla is not None,
            "experts": shape.moe.experts if shape.moe else 0,
            "expert_ffn": shape.moe.ffn if shape.moe else 0,
            "first_dense": shape.moe.first_dense if shape.moe else 0,
            "learned_positions": shape.max_positions if shape.positions == "learned" else 0,
            "dropout": recipe.dropout,
            "activation_bytes": 4 if recipe.precision == "fp32" else 2,
        },
        "recipe": {"sequence": recipe.sequence, "global_batch": recipe.global_batch, "precision": recipe.precision},
        "token_flop": flop,
        "cluster": {
            "device": device.name,
            "devices": of.cluster.devices,
            "per_node": of.cluster.devices_per_node,
            "memory_bytes": device.memory_bytes,
            "usable_bytes": usable if isfinite(usable) else None,
            "flop_per_s": device.bf16_flop_per_s or of.speeds.peak_flop_per_s,
        },
        "stack": {
            "update_bytes": of.stack.update_bytes,
            "bucket_bytes": of.stack.update_bucket_bytes if recipe.precision != "fp32" else 0.0,
            "reserve_bytes": of.stack.reserve_bytes,
            "slack": of.stack.slack,
        },
        "memory": coefficients(of, of.cluster.devices),
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
