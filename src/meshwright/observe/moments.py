"""Memory by kind over time, from a Watch: how much of each kind there was when a part of the program held most."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.observe.storages import Watch
from meshwright.observe.witness import Stretch, Testimony


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A part of the program when it held most."""

    step: int
    """0 = before the first one."""
    name: str
    """`build`, `F 0 3`, `gradients`, `update 1` ...: as Watch.phases."""
    allocated_bytes: int
    """By the witness; what follows is by the watch."""
    reserved_bytes: int
    kinds: dict[str, int]


def moments(watch: Watch, witness: Testimony) -> tuple[Moment, ...]:
    """The parts of a program that was watched once and witnessed once, in order; kinds must have been told before."""
    kinds = by_phase(watch)
    names = [phase.name for phase in watch.phases]
    both = _paired(names, witness.stretches)
    found, step = [], 0
    for name, kind, stretch in zip(names, kinds, both, strict=True):
        word, _, number = name.partition(" ")
        step = int(number) if word == "step" else step
        if name == "start" and not kind:
            continue
        found.append(
            Moment(
                step=step,
                name=name,
                allocated_bytes=stretch.allocated_bytes if stretch else sum(kind.values()),
                reserved_bytes=stretch.reserved_bytes if stretch else 0,
                kinds=kind,
            )
        )
    return tuple(found)


def by_phase(watch: Watch) -> list[dict[str, int]]:
    """Of each phase the bytes by kind when it held most."""
    starts = [phase.start for phase in watch.phases]
    kind_of = [record.kind for record in watch.records]
    now: dict[str, int] = {}
    found: list[dict[str, int]] = []
    total = most = place = 0
    for at, (number, size) in enumerate(watch.events()):
        while place < len(starts) and starts[place] <= at:
            found.append({kind: held for kind, held in now.items() if held})
            most, place = total, place + 1
        total += size
        now[kind_of[number]] = now.get(kind_of[number], 0) + size
        if total > most and found:
            most = total
            found[-1] = {kind: held for kind, held in now.items() if held}
    found += [{kind: held for kind, held in now.items() if held}] * (len(starts) - len(found))
    return found


def _paired(names: Sequence[str], stretches: Sequence[Stretch]) -> list[Stretch | None]:
    """The witness's stretches by place; none where the two runs were not the same."""
    if [one.name for one in stretches] == list(names):
        return list(stretches)
    return [None] * len(names)
