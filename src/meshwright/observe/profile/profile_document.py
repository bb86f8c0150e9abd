"""A profile as the JSON document that `plan`, `dryrun` and `profile` share (docs/planner.md), and as a trace.

The trace has the timed steps of all ranks on one clock, for https://ui.perfetto.dev (Chrome's JSON trace format). A
rank is a process of the trace. Its tracks are the schedule (steps, and in them passes by stage and micro-batch), its
waits, and the collectives of each axis. A collective lasts from its call to the end of the wait for it. A counter shows
memory by kind, that of the same pass in the last watched step.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun.document import kinds, largest, traffic
from meshwright.observe.profile.measure import Profile, RankProfile
from meshwright.observe.profile.step_record import TimedCall, TimedStep
from meshwright.observe.shared_document import Ran
from meshwright.spec.plan.plan import as_document

SCHEDULE, WAITING, AXES = 0, 1, 2
Event = dict[str, Any]


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


def trace(profile: Profile) -> dict[str, Any]:
    """Return the trace in microseconds since the first rank's first timed step."""
    zero = min(rank.steps[0].start_s for rank in profile.ranks)
    events = [event for rank in profile.ranks for event in _rank_events(rank, zero)]
    metadata = {"clock_residual_us": profile.residual_s * 1e6, "clock": "that of rank 0"}
    return {"displayTimeUnit": "ms", "otherData": metadata, "traceEvents": events}


def _rank_events(profile: RankProfile, zero: float) -> Iterator[Event]:
    axes = sorted({call.axis for step in profile.steps for call in step.calls})
    tracks = {SCHEDULE: "schedule", WAITING: "waiting", **{AXES + n: axis for n, axis in enumerate(axes)}}
    yield _name_event(profile.rank, "process_name", 0, f"rank {profile.rank}, {profile.device}")
    yield {"ph": "M", "pid": profile.rank, "name": "process_sort_index", "args": {"sort_index": profile.rank}}
    for track, name in tracks.items():
        yield _name_event(profile.rank, "thread_name", track, name)
    number = 0
    for index, step in enumerate(profile.steps, start=1):
        yield _slice_event(profile.rank, SCHEDULE, f"step {index}", step, zero, {})
        for span in step.spans:
            arguments = {"stage": span.stage, "micro_batch": span.micro_batch} if span.stage >= 0 else {}
            yield _slice_event(profile.rank, SCHEDULE, title(span), span, zero, arguments)
        for wait in step.waits:
            yield _slice_event(profile.rank, WAITING, f"{wait.part}: {wait.collective} on {wait.axis}", wait, zero, {})
        for call in step.calls:
            number += 1
            yield from _call_events(profile.rank, AXES + axes.index(call.axis), call, zero, number)
        yield from _memory_events(profile, step, zero)


def title(span: Ran) -> str:
    """Return `F 0 3` (pass, stage, micro-batch), or the name of a part without them."""
    return f"{span.name} {span.stage} {span.micro_batch}" if span.stage >= 0 else span.name


def _name_event(rank: int, what: str, track: int, name: str) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _slice_event(
    rank: int, track: int, name: str, what: TimedStep | Ran | TimedCall, zero: float, arguments: dict[str, Any]
) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "args": arguments,
        "ts": (what.start_s - zero) * 1e6, "dur": (what.end_s - what.start_s) * 1e6,
    }  # fmt: skip


def _call_events(rank: int, track: int, call: TimedCall, zero: float, number: int) -> Iterator[Event]:
    """Yield begin and end: calls of one axis may overlap, which slices of one track may not."""
    common = {"cat": call.axis, "name": call.collective, "id": f"{rank}.{number}", "pid": rank, "tid": track}
    yield {**common, "ph": "b", "ts": (call.start_s - zero) * 1e6, "args": {"sent_bytes": call.sent_bytes}}
    yield {**common, "ph": "e", "ts": (call.end_s - zero) * 1e6}


def _memory_events(profile: RankProfile, step: TimedStep, zero: float) -> Iterator[Event]:
    # Memory is measured in other steps than time. Steady steps are alike, so the last one stands for all.
    last = max((moment.step for moment in profile.memory), default=0)
    moments = {moment.name: moment for moment in profile.memory if moment.step == last}
    # A counter keeps its last figure, so a kind that is gone has to be written as 0.
    every = dict.fromkeys((kind for moment in moments.values() for kind in moment.kinds), 0)
    for span in step.spans:
        moment = moments.get(title(span))
        if moment is not None:
            yield {
                "ph": "C", "pid": profile.rank, "name": "memory", "ts": (span.start_s - zero) * 1e6,
                "args": {**every, **moment.kinds},
            }  # fmt: skip
