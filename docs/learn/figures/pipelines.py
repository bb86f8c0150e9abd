"""Every schedule of the package, played: when each rank does what, the bubble, and the micro-batches that it keeps."""

from typing import Any

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.replay import Times, replay
from meshwright.spec.layout.schedule import KINDS, schedule

TITLE = "A pipeline's schedule"
RANKS = (2, 3, 4)
MICRO_BATCHES = (2, 3, 4, 6, 8, 12)
STAGES = (1, 2, 3)
"""Stages of a rank, v."""


def record(name: str, ranks: int, micro_batches: int, virtual: int) -> dict[str, Any] | None:
    """A schedule in units of a rank's forward pass, F = B = W. None = the schedule refuses these numbers."""
    unit = 1.0 / virtual
    try:
        played = replay(schedule(name, ranks, micro_batches, virtual), Times(unit, unit, unit))
    except IllegalLayout:
        return None
    return {
        "spans": [
            [
                [span.action.kind, span.action.stage, span.action.micro_batch, round(span.start_s, 3),
                 round(span.end_s - span.start_s, 3)]
                for span in spans
            ]
            for spans in played.spans
        ],
        "total": round(played.total_s, 3),
        "bubble": round(played.bubble, 6),
        "kept": [round(count / virtual, 2) for count in played.in_flight],
    }  # fmt: skip


def stages_of(name: str) -> tuple[int, ...]:
    """The numbers of stages that a schedule has."""
    return STAGES[1:] if name == "interleaved" else (KINDS[name].stages,)


def data() -> dict[str, Any]:
    """Schedule -> "p m v" -> how it runs."""
    return {
        "ranks": RANKS, "micro_batches": MICRO_BATCHES, "stages": {name: stages_of(name) for name in KINDS},
        "schedules": {
            name: {
                f"{p} {m} {v}": record(name, p, m, v) for p in RANKS for m in MICRO_BATCHES for v in stages_of(name)
            }
            for name in KINDS
        },
    }  # fmt: skip
