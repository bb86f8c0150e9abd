"""A profile as the JSON document that `plan`, `dryrun` and `profile` share (docs/planner.md)."""

from dataclasses import asdict
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun.dryrun_document import kinds, largest, traffic
from meshwright.observe.profile.measure import Profile, RankProfile
from meshwright.spec.plan import as_document


def measured(found: Profile) -> dict[str, Any]:
    """Memory and traffic of the rank that held most, time of the one that computed longest in the step in the middle by
    its length, and all of every rank."""
    worst, busiest = found.worst, found.busiest
    started_s = min(one.steps[found.chosen].start_s for one in found.ranks)
    return {
        "source": "measured",
        "plan": as_document(found.plan),
        "device": "cuda" if worst.kernels else "cpu",
        "environment": {
            "meshwright": __version__,
            "torch": torch.__version__,
            "devices": sorted({one.device for one in found.ranks}),
            "hosts": len({one.host for one in found.ranks}),
        },
        "peak_bytes": worst.account.peak_bytes,
        "peak_rank": worst.rank,
        "memory": kinds(worst.seen.kinds),
        "traffic": traffic(worst.traffic),
        "time": _time(found.parts),
        "busiest_rank": busiest.rank,
        "step_seconds": found.step_s,
        "steps": list(found.step_seconds),
        "tokens_per_second": found.tokens_per_s,
        "tokens_per_second_per_device": found.tokens_per_s / found.plan.layout.world,
        "mfu_causal": found.utilization(causal=True),
        "mfu_full": found.utilization(causal=False),
        "hfu": found.utilization(causal=True, hardware=True),
        "bubble_fraction": found.bubble_fraction,
        "clock_residual_s": found.residual_s,
        "notes": list(found.notes),
        "ranks": [_rank(one, found.chosen, started_s) for one in found.ranks],
    }


def _rank(one: RankProfile, chosen: int, started_s: float) -> dict[str, Any]:
    step = one.steps[chosen]
    return {
        "rank": one.rank,
        "device": one.device,
        "peak_bytes": one.account.peak_bytes,
        "reserved_bytes": one.account.reserved_bytes,
        "active_bytes": one.account.active_bytes,
        "inactive_split_bytes": one.account.inactive_split_bytes,
        "watched_bytes": one.seen.peak_bytes,
        "when": one.seen.when,
        "memory": kinds(one.seen.kinds),
        "activations": [{"where": where, "bytes": size} for where, size in one.seen.where.items()],
        "largest": largest(one.seen),
        "memory_timeline": [
            {
                "step": moment.step,
                "name": moment.name,
                "bytes": moment.allocated_bytes,
                "reserved_bytes": moment.reserved_bytes,
                "active_bytes": moment.active_bytes,
                "inactive_split_bytes": moment.inactive_split_bytes,
                "memory": kinds(moment.kinds),
            }
            for moment in one.memory
        ],
        "allocator_events": one.account.events,
        "allocated": [[seconds, size] for seconds, size in one.account.curve],
        "traffic": traffic(one.traffic),
        "time": _time(step.parts),
        "streams": step.streams,
        "kernels": asdict(one.kernels) if one.kernels else None,
        "operations": [asdict(operation) for operation in one.operations],
        "spans": [
            {**asdict(span), "start_s": span.start_s - started_s, "end_s": span.end_s - started_s}
            for span in step.spans
        ],
        "clock_offset_s": one.clock.first.seconds,
        "clock_drift_s": one.clock.drift_s,
        "clock_residual_s": one.clock.residual_s,
    }


def _time(parts: dict[str, float]) -> list[dict[str, Any]]:
    return [{"what": what, "seconds": seconds} for what, seconds in parts.items()]
