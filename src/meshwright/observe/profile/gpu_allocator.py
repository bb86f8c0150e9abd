"""A GPU's allocator, event by event: what it gave out and took back while its history was recorded.

The shape is that of torch.cuda.memory._snapshot: for each device the last events in their order, and the blocks that
are held now. Levels are told backwards from the blocks, so that a history whose beginning was dropped still has the
right ones. Sizes are those that were asked for, in multiples of what the allocator gives at least; a block whose rest
was too small to be split off counts a little more in the allocator's own statistics.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Point = tuple[int, int]
"""(ns since 1970, bytes allocated then)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a snapshot tells of one device."""

    allocated: tuple[Point, ...]
    """After each event; empty = nothing happened."""
    active_peak_bytes: int
    """The most that was allocated, or given back but still in use on another stream."""
    inactive_split_bytes: int
    """At the end: free pieces of segments that something else still holds, of no use to a larger request."""


def history(snapshot: Mapping[str, Any], device: int, round_bytes: int) -> History | None:
    """What is told of a device; None where the snapshot has another shape than this torch's documentation says."""
    try:
        blocks = [
            (block["state"], _rounded(block.get("requested_size", block["size"]), round_bytes))
            for segment in _segments(snapshot, device)
            for block in segment["blocks"]
        ]
        allocated = sum(size for state, size in blocks if state == "active_allocated")
        active = sum(size for state, size in blocks if state != "inactive")
        entries = [one for one in snapshot["device_traces"][device] if one["action"] in CHANGES]
        return History(
            allocated=tuple(_levels(entries, allocated, 0, round_bytes)),
            active_peak_bytes=max((size for _, size in _levels(entries, active, 1, round_bytes)), default=active),
            inactive_split_bytes=sum(_split(segment["blocks"]) for segment in _segments(snapshot, device)),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return None


CHANGES = {"alloc": (1, 1), "free_requested": (-1, 0), "free_completed": (0, -1)}
"""What an event does to what is allocated, and to what is active."""


def _segments(snapshot: Mapping[str, Any], device: int) -> Iterator[Mapping[str, Any]]:
    return (segment for segment in snapshot["segments"] if segment.get("device", device) == device)


def _levels(entries: list[Any], end_bytes: int, which: int, round_bytes: int) -> list[Point]:
    """(ns, bytes after it) of every event that changes what is looked at, from the level at the end."""
    level, latest, found = end_bytes, entries[-1]["time_us"] * 1000 if entries else 0, []
    for one in reversed(entries):
        sign = CHANGES[one["action"]][which]
        latest = min(latest, one["time_us"] * 1000)
        if sign:
            found.append((latest, level))
            level -= sign * _rounded(one["size"], round_bytes)
    return found[::-1]


def _split(blocks: list[Any]) -> int:
    free = sum(block["size"] for block in blocks if block["state"] == "inactive")
    return free if any(block["state"] != "inactive" for block in blocks) else 0


def _rounded(size: int, round_bytes: int) -> int:
    return -(-size // round_bytes) * round_bytes
