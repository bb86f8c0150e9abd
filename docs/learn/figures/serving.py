"""Ten requests of `examples/serving.py`, recorded: who holds which block at each step, and what moved."""

import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

from examples.serving import story
from meshwright.serving.engine.serving_record import ServingRecord, read_record

TITLE = "Blocks of ten requests, step by step"


def recorded() -> ServingRecord:
    """Serve the story with a tiny random model."""
    with tempfile.TemporaryDirectory() as folder:
        story(Path(folder) / "steps.jsonl")
        return read_record(Path(folder) / "steps.jsonl")


def data() -> dict[str, Any]:
    """Sizes, and for each step its cells, tables and figures. Times are left out: they differ by machine."""
    record = recorded()
    size, starts = record.header["block"], [request["request"] for request in record.requests]
    tables, members = dict[int, list[int]](), {"cached": set[int](), "host": set[int]()}
    seen, steps = set[int](), []
    for step in record.steps:
        for number, (same, *blocks) in step["tables"].items():
            tables[int(number)] = [*tables.get(int(number), [])[:same], *blocks]
        for name, changes in members.items():
            came, went = step.get(name, [[], []])
            changes -= set(went)
            changes |= set(came)
        cells, rows = dict[int, dict[str, Any]](), []
        for number, computed, count in step["running"]:
            request = bisect_right(starts, number) - 1
            for index, block in enumerate(tables[number]):
                cell = cells.setdefault(block, {"requests": [], "holders": 0, "filled": 0})
                cell["holders"] += 1
                cell["requests"] += [request] if request not in cell["requests"] else []
                cell["filled"] = max(cell["filled"], min(size, computed - index * size))
            state = "pauses" if not count else "decodes" if count == 1 and number in seen else "prompt"
            rows.append([request, number - starts[request], state, computed, tables[number]])
        rows += [
            [bisect_right(starts, number) - 1, 0, "preempted" if number in seen else "waits", 0, []]
            for number in step.get("waiting", ())
        ]
        seen |= {number for number, _, _ in step["running"]}
        steps.append({
            "cells": cells, "rows": rows, "moves": step.get("moves", []), "cached": sorted(members["cached"]),
            "host": sorted(members["host"]), "hits": step.get("hits", 0),
            "preempted": [bisect_right(starts, number) - 1 for number in step.get("preempted", ())],
        })  # fmt: skip
    kinds = ["beams" if request["beams"] > 1 else "answers" for request in record.requests]
    return {
        "block": size, "blocks": record.header["blocks"], "host": record.header["host_slots"], "steps": steps,
        "kinds": kinds,
    }  # fmt: skip
