"""Memory by kind over time: what the watch and the allocator say of each part of a program, side by side."""

from dataclasses import asdict, dataclass

from meshwright.observe.dryrun.rank_run import WatchedRank
from meshwright.observe.dryrun.storage_tracker import StorageWatch
from meshwright.observe.profile.allocator import AllocatorAccount, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePeak(Stretch):
    """A part of the program in which something is taken or given back, when it held most: `build`, `F 0 3`,
    `gradients`, `update 1` ..., as Watch.phases. Where the allocator was not told of each part, `allocated_bytes` are
    the watch's."""

    step: int
    """0 = before the first one."""
    kinds: dict[str, int]
    """By the watch."""


def moments(seen: WatchedRank, watch: StorageWatch, account: AllocatorAccount) -> tuple[TimelinePeak, ...]:
    """The parts of a program that was watched once and told of by the allocator once, in order."""
    starts = [*(phase.start for phase in watch.phases), watch.now]
    told = _paired(watch, account)
    parts = iter(seen.passes)
    found, step = [], 0
    for index, phase in enumerate(watch.phases):
        word, _, number = phase.name.partition(" ")
        step = int(number) if word == "step" else step
        if starts[index] == starts[index + 1]:
            continue
        part = next(parts, None)
        if part is None:
            break  # what was given back since the watch was read
        assert part.name == phase.name
        held = told[index] or Stretch(name=part.name, allocated_bytes=part.peak_bytes, reserved_bytes=0)
        found.append(TimelinePeak(step=step, kinds=part.kinds, **asdict(held)))
    return tuple(found)


def _paired(watch: StorageWatch, account: AllocatorAccount) -> list[Stretch | None]:
    """What the allocator says of each phase of the watch; nothing where the two runs were not the same."""
    names = [phase.name for phase in watch.phases]
    if [one.name for one in account.stretches] == names:
        return list(account.stretches)
    return [None] * len(names)
