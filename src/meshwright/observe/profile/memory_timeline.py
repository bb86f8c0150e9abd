"""Memory by kind over time: what the watch and the allocator say of each part of a program, side by side."""

from dataclasses import dataclass

from meshwright.observe.dryrun.rank_run import Seen
from meshwright.observe.dryrun.storage_tracker import StorageWatch
from meshwright.observe.profile.allocator import AllocatorAccount, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePeak:
    """A part of the program in which something is taken or given back, when it held most."""

    step: int
    """0 = before the first one."""
    name: str
    """`build`, `F 0 3`, `gradients`, `update 1` ...: as Watch.phases."""
    allocated_bytes: int
    """By the allocator; where that was not told part by part, by the watch."""
    reserved_bytes: int
    kinds: dict[str, int]
    """By the watch."""
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    """As in a Stretch."""


def moments(seen: Seen, watch: StorageWatch, testimony: AllocatorAccount) -> tuple[TimelinePeak, ...]:
    """The parts of a program that was watched once and told of by the allocator once, in order."""
    starts = [*(phase.start for phase in watch.phases), watch.now]
    told = _paired(watch, testimony)
    parts = iter(seen.passes)
    found, step = [], 0
    for index, phase in enumerate(watch.phases):
        word, _, number = phase.name.partition(" ")
        step = int(number) if word == "step" else step
        if starts[index] == starts[index + 1]:
            continue
        part, stretch = next(parts, None), told[index]
        if part is None:
            break  # what was given back since the watch was read
        assert part.name == phase.name
        found.append(
            TimelinePeak(
                step=step,
                name=part.name,
                allocated_bytes=stretch.allocated_bytes if stretch else part.peak_bytes,
                reserved_bytes=stretch.reserved_bytes if stretch else 0,
                kinds=part.kinds,
                active_bytes=stretch.active_bytes if stretch else None,
                inactive_split_bytes=stretch.inactive_split_bytes if stretch else None,
            )
        )
    return tuple(found)


def _paired(watch: StorageWatch, testimony: AllocatorAccount) -> list[Stretch | None]:
    """What the allocator says of each phase of the watch; nothing where the two runs were not the same."""
    names = [phase.name for phase in watch.phases]
    if [one.name for one in testimony.stretches] == names:
        return list(testimony.stretches)
    return [None] * len(names)
