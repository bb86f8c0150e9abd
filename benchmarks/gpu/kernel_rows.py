"""A row of the kernels' table: one operation at one size, all contestants."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.case import Case, Run
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.entries import Entry
from benchmarks.gpu.errors import judged, reason
from benchmarks.gpu.timing import Timer, input_sets, measured
from meshwright.kernels.chooser import dtype_name

EAGER, COMPILED = "eager", "compiled"


def contestants(case: Case, skip: set[str]) -> dict[str, Run]:
    """By name, ours first. `compiled` is the compiled form of `eager`."""
    runs: dict[str, Run] = {**case.ours, EAGER: case.eager}
    if case.compiles and COMPILED not in skip:
        runs[COMPILED] = torch.compile(case.eager, dynamic=False)
    return {name: run for name, run in (runs | case.rivals).items() if not any(word in name.lower() for word in skip)}


def row(
    entry: Entry, dtype: torch.dtype, device: torch.device, timer: Timer, ceilings: Ceilings, *, seconds: float,
    skip: set[str], late: Callable[[], bool],
) -> dict[str, Any]:  # fmt: skip
    """Times, roofline, memory and errors of an entry."""
    torch.compiler.reset()
    timer.release()
    case = entry.case(dtype, device)
    runs = contestants(case, skip)
    timed = measured(case, runs, input_sets(case, device, timer.cache_bytes), timer, seconds, late)
    floor = floors(case, ceilings)
    for contestant in timed.values():
        times = {part: spread["median"] for part, spread in contestant.get("seconds", {}).items()}
        contestant["roofline"] = {part: floor[part] / time for part, time in times.items() if time > 0}
    verdict = _errors(entry, dtype, device, set(runs), late)
    for name, contestant in verdict.get("contestants", {}).items():
        timed[name]["judged"] = contestant
    return {
        "operation": case.operation, "size": case.size, "dtype": dtype_name(case.dtype), "chosen": case.chosen,
        "counts": {part: [count.bytes_moved, count.flop] for part, count in case.counts.items()},
        "floor_seconds": floor, "judged_at": verdict.get("size"), "plain_errors": verdict.get("plain"),
        "contestants": timed,
    }  # fmt: skip


def floors(case: Case, ceilings: Ceilings) -> dict[str, float]:
    """The least seconds of each pass, and of both."""
    seconds_by_part = {part: ceilings.seconds(count, case.dtype) for part, count in case.counts.items()}
    if "backward" in case.counts:
        seconds_by_part["full"] = sum(seconds_by_part.values())
    return seconds_by_part


def _errors(
    entry: Entry, dtype: torch.dtype, device: torch.device, names: set[str], late: Callable[[], bool]
) -> dict[str, Any]:  # fmt: skip
    """At the size that fp64 has room for. `eager` is the measure; what is compiled is not compiled once more."""
    if late():
        return {}
    case = entry.judged(dtype, device)
    runs = {name: run for name, run in (case.ours | case.rivals).items() if name in names}
    try:
        return judged(case, runs, device) | {"size": case.size}
    except RuntimeError as failure:  # no memory for fp64
        return {"size": case.size, "contestants": {name: {"failed": reason(failure)} for name in runs}}
