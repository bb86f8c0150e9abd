"""A profile as the JSON document that `plan`, `dryrun` and `profile` share (docs/planner.md)."""

from dataclasses import asdict
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun.document import kinds, largest, traffic
from meshwright.observe.profile.measure import Profile, RankProfile
from meshwright.spec.plan.plan import as_document


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return the document.

    Memory and traffic are of the rank that held most, time of the one that computed longest in the step of median
    length. `ranks` has everything of every rank.
    """
    worst, busiest = profile.worst, profile.busiest
    started_s = min(rank.steps[profile.chosen].start_s for rank in profile.ranks)
    return {
        "source": "measured",
        "plan": as_document(profile.plan),
        "device": "cuda" if worst.kernels else "cpu",
        "environment": {
            "meshwright": __version__,
            "torch": torch.__version__,
            "devices": sorted({rank.device for rank in profile.ranks}),
            "hosts": len({rank.host for rank in profile.ranks}),
        },
        "peak_bytes": worst.account.peak_bytes,
        "peak_rank": worst.rank,
        "memory": kinds(worst.seen.kinds),
        "traffic": traffic(worst.traffic),
        "time": _time_rows(profile.parts),
        "busiest_rank": busiest.rank,
        "step_seconds": profile.step_s,
        "steps": list(profile.step_seconds),
        "tokens_per_second": profile.tokens_per_s,
        "tokens_per_second_per_device": profile.tokens_per_s / profile.plan.layout.world,
        "mfu_causal": profile.utilization(causal=True),
        "mfu_full": profile.utilization(causal=False),
        "hfu": profile.utilization(causal=True, hardware=True),
        "bubble_fraction": profile.bubble_fraction,
        "clock_residual_s": profile.residual_s,
        "notes": list(profile.notes),
        "ranks": [_rank_document(rank, profile.chosen, started_s) for rank in profile.ranks],
    }


def _rank_document(profile: RankProfile, chosen: int, started_s: float) -> dict[str, Any]:
    step = profile.steps[chosen]
    return {
        "rank": profile.rank,
        "device": profile.device,
        "peak_bytes": profile.account.peak_bytes,
        "reserved_bytes": profile.account.reserved_bytes,
        "active_bytes": profile.account.active_bytes,
        "inactive_split_bytes": profile.account.inactive_split_bytes,
        "watched_bytes": profile.seen.peak_bytes,
        "when": profile.seen.when,
        "memory": kinds(profile.seen.kinds),
        "activations": [{"where": where, "bytes": size} for where, size in profile.seen.where.items()],
        "largest": largest(profile.seen),
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
            for moment in profile.memory
        ],
        "allocator_events": profile.account.events,
        "allocated": [[seconds, size] for seconds, size in profile.account.curve],
        "traffic": traffic(profile.traffic),
        "time": _time_rows(step.parts),
        "streams": step.streams,
        "kernels": asdict(profile.kernels) if profile.kernels else None,
        "operations": [asdict(operation) for operation in profile.operations],
        "spans": [
            {**asdict(span), "start_s": span.start_s - started_s, "end_s": span.end_s - started_s}
            for span in step.spans
        ],
        "clock_offset_s": profile.clock.first.seconds,
        "clock_drift_s": profile.clock.drift_s,
        "clock_residual_s": profile.clock.residual_s,
    }


def _time_rows(parts: dict[str, float]) -> list[dict[str, Any]]:
    return [{"what": what, "seconds": seconds} for what, seconds in parts.items()]
