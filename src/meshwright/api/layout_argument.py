"""`--layout dp=8,tp=2`: the fields of a layout that the search leaves fixed."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from meshwright.spec import Layout, Plan
from meshwright.spec.errors import ArgumentError
from meshwright.spec.layout.layout import RECOMPUTE, check_word
from meshwright.spec.layout.schedule import NAMES
from meshwright.spec.presets import suggest
from meshwright.spec.rules.compilation import CAPTURED, policies
from meshwright.spec.units import many

DEGREES = ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp", "zero", "micro_batch", "recompute_layers")
WORDS = ("recompute", "schedule", "sp", "offload", "cuda_graphs")
SEARCHED = (*DEGREES[1:], *WORDS)
CARRIED = ("kernels", "compile", "context", "context_split")
"""Fields that no search varies. All layouts take them from the plan, or from this argument."""

Fixed = dict[str, tuple[Any, ...]]


def carried_layout(asked: Plan, texts: Sequence[str]) -> tuple[Plan, list[str]]:
    """Return the plan with the fields that no search varies (`kernels=reference`), and the remaining words."""
    changes: dict[str, Any] = {}
    searched: list[str] = []
    for word in re.sub(r"\([^)]*\)", " ", " ".join(texts)).replace(",", " ").split():
        key, equals, text = word.removeprefix("layout.").partition("=")
        if key in CARRIED and equals:
            check_word(key, text)
            changes[key] = text
        else:
            searched.append(word)
    return replace(asked, layout=replace(asked.layout, **changes)), searched


def fixed_layout(asked: Plan, texts: Sequence[str]) -> Fixed:
    """Return {"dp": (8,), "tp": (2,)} of `dp=8,tp=2`.

    Also reads layouts as `plan` prints them (dp=2x4, sp, interleaved), with notes in brackets.
    """
    fixed: Fixed = {}
    for part in re.sub(r"\([^)]*\)", " ", " ".join(texts)).replace(",", " ").split():
        for key, setting in _parts(part, asked):
            if fixed.setdefault(key, (setting,)) != (setting,):
                raise ArgumentError(
                    f"layout= has {key}={_shown(fixed[key][0])} and {key}={_shown(setting)}: take one of them"
                )
    if fixed.get("cuda_graphs") == ("on",):
        _fix_capturable(asked, fixed)
    _check_product(asked, fixed)
    if layers := fixed.get("recompute_layers", (0,))[0]:
        fixed.setdefault("recompute", RECOMPUTE[1:])
        if fixed["recompute"] == ("none",):
            raise ArgumentError(f"layout= has recompute_layers={layers} and recompute=none: take another recompute")
        if layers > asked.model.layers:
            raise ArgumentError(f"layout= has recompute_layers={layers}, and the model has {asked.model.layers} layers")
    return fixed


def _parts(part: str, asked: Plan) -> list[tuple[str, Any]]:
    if not part:
        return []
    if part == "plan":
        _check_world(asked)
        return [(name, getattr(asked.layout, name)) for name in SEARCHED]
    key, equals, text = part.partition("=")
    key, text = key.strip().removeprefix("layout."), text.strip()
    if not equals and key == "sp":
        return [("sp", True)]
    if not equals and key in NAMES:
        return [("schedule", key)]
    replicate, x, shard = text.partition("x")
    if key == "dp" and x and replicate.isdecimal() and shard.isdecimal() and int(replicate) and int(shard):
        return [("dp_replicate", int(replicate)), ("dp_shard", int(shard))]
    return [(key, _parse_setting(part, key, text))]


def _parse_setting(part: str, key: str, text: str) -> Any:
    words = {"recompute": RECOMPUTE, "schedule": NAMES, "sp": ("true", "false"),
             "zero": ("0", "1", "2", "3"), "offload": ("off", "activations"),
             "cuda_graphs": ("auto", "off", "on")}  # fmt: skip
    if key in words and text in words[key]:
        return {"sp": text == "true", "zero": int(text) if text.isdecimal() else 0}.get(key, text)
    if key in words:
        raise ArgumentError(f"layout={part!r}: {key} takes {' or '.join(words[key])}")
    if key in DEGREES:
        least = 0 if key == "recompute_layers" else 1
        if text.isdecimal() and least <= int(text) < 2**31:
            return int(text)
        raise ArgumentError(f"layout={part!r}: {key} takes a whole number of {least} or more")
    if key in {field.name for field in fields(Layout)}:
        raise ArgumentError(f"layout={part!r}: plan does not search {key}; write layout.{key} into a plan file")
    raise ArgumentError(f"layout={part!r}: {key!r} is not a field of a layout; {suggest(key, [*DEGREES, *WORDS], 1)}")


def _check_world(asked: Plan) -> None:
    """Raise ArgumentError unless the plan's layout is for as many devices as the cluster has."""
    cluster, world = asked.cluster, asked.layout.world
    if world != cluster.devices:
        raise ArgumentError(
            f"layout=plan is for {many(world, 'device')}, and the cluster has {cluster.devices} "
            f"({cluster.nodes} x {cluster.devices_per_node}): ask about {world} devices, or leave layout= out "
            "to search one"
        )


def _fix_capturable(asked: Plan, fixed: Fixed) -> None:
    """Fix the values that CUDA graphs can capture. Raises ArgumentError if others are fixed."""
    for key, legal in {**CAPTURED, "recompute": policies(asked.layout)}.items():
        values = fixed.get(key, legal)
        if not set(values) <= set(legal):
            shown = " or ".join(map(_shown, legal))
            raise ArgumentError(f"layout= has cuda_graphs=on and {key}={_shown(values[0])}: take {key}={shown}")
        fixed[key] = values


def _check_product(asked: Plan, fixed: Fixed) -> None:
    """Raise ArgumentError if the fixed values cannot all hold on these devices."""
    devices, cluster = asked.cluster.devices, asked.cluster
    dp = 1
    for axis in ("dp_replicate", "dp_shard"):
        dp *= fixed.get(axis, (1,))[0]
    whole = fixed.get("dp", (dp,))[0]
    if whole % dp:
        raise ArgumentError(f"layout= has dp={whole}, which is dp_replicate x dp_shard, and {dp} does not divide it")
    product = whole
    for axis in ("tp", "cp", "pp"):
        product *= fixed.get(axis, (1,))[0]
    if devices % product:
        raise ArgumentError(
            f"layout= has degrees with the product {product}, which does not divide the {devices} devices of "
            f"the cluster ({cluster.nodes} x {cluster.devices_per_node}): take degrees that do"
        )
    schedule = fixed.get("schedule", ("1f1b",))[0]
    if schedule != "1f1b" and fixed.get("pp", (2,))[0] == 1:
        raise ArgumentError(
            f"layout= has schedule={schedule}, which is the order of a pipeline, and pp=1: leave one of them out"
        )


def _shown(value: Any) -> str:
    return str(value).lower()
