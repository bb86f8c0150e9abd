"""The timed steps of all ranks as a trace for https://ui.perfetto.dev (Chrome's JSON trace format), on one clock.

A rank is a process of the trace. Its tracks are the schedule (steps, and in them passes by stage and micro-batch), its
waits, and the collectives of each axis. A collective lasts from its call to the end of the wait for it. A counter shows
memory by kind, that of the same pass in the last watched step.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.observe.profile.measure import Profile, RankProfile
from meshwright.observe.profile.step_record import TimedCall, TimedStep
from meshwright.observe.shared_document import Ran

SCHEDULE, WAITING, AXES = 0, 1, 2
Event = dict[str, Any]


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
    both = {"cat": call.axis, "name": call.collective, "id": f"{rank}.{number}", "pid": rank, "tid": track}
    yield {**both, "ph": "b", "ts": (call.start_s - zero) * 1e6, "args": {"sent_bytes": call.sent_bytes}}
    yield {**both, "ph": "e", "ts": (call.end_s - zero) * 1e6}


def _memory_events(profile: RankProfile, step: TimedStep, zero: float) -> Iterator[Event]:
    last = max((moment.step for moment in profile.memory), default=0)
    held = {moment.name: moment for moment in profile.memory if moment.step == last}
    every = dict.fromkeys((kind for moment in held.values() for kind in moment.kinds), 0)
    for span in step.spans:
        moment = held.get(title(span))
        if moment is not None:
            yield {
                "ph": "C", "pid": profile.rank, "name": "memory", "ts": (span.start_s - zero) * 1e6,
                "args": {**every, **moment.kinds},
            }  # fmt: skip
