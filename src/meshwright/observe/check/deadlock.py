"""Whether every operation can end under NCCL's rules, whatever the times are.

    FIFO         operations of one communicator run on a rank in the order in which they were started
    rendezvous   a collective runs once all members have reached it, a message once both ends have
    in order     an operation runs after the kernels that were launched before its start, kernels launched after a wait
                 run after what was waited for, and the kernels of a rank run one after another
    host         never stops. A host that reads a value back adds no rule: what it starts then waits for those kernels
                 in any case
    loading      a kernel's first launch waits until all receives that are open have ended (lazy module loading)

No step of a rank ever takes back another one's chance, so one run in any order decides: either all ends, or what is
left waits in a cycle.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Literal

from meshwright.observe.check.events import Compute, RankTrace, Start, Trace, Violation, WaitEvent
from meshwright.observe.check.sequences import members_of

Loading = Literal["none", "first", "every"]
"""Which kernel launches wait for open receives."""
Node = tuple[int, int]
"""(rank, its unit); unit -1: the rank's kernels."""
START, WAIT = 0, 1


class SimulationUnits:
    """A trace as the simulation takes it: units are operations that start together."""

    def __init__(self, trace: Trace, loading: Loading) -> None:
        self.of_operation: dict[int, int] = {}
        self.groups: list[int] = []
        self.operations: list[tuple[int, ...]] = []
        self.keys: list[list[tuple[str, int, int]]] = []
        """Of each operation of a unit: (kind, peer, how many of its kind came before)."""
        self.steps: list[tuple[int, tuple[int, ...], str]] = []
        """(START, unit) or (WAIT, units), with the reason."""
        self.order: dict[int, list[int]] = defaultdict(list)
        self.unit_of_key: dict[tuple[int, str, int, int], int] = {}
        counts: dict[tuple[int, str, int], int] = defaultdict(int)
        receives: list[int] = []
        for event in trace.events:
            if isinstance(event, Start):
                unit = self._add(trace, event, counts)
                if any(trace.operations[n].kind == "receive" for n in event.operations):
                    receives.append(unit)
            elif isinstance(event, WaitEvent):
                unit = self.of_operation[event.operation]
                self.steps.append((WAIT, (unit,), ""))
                if unit in receives:
                    receives.remove(unit)
            elif isinstance(event, Compute) and receives and (event.first or loading == "every") and loading != "none":
                self.steps.append((WAIT, tuple(receives), event.where))
                receives = []

    def _add(self, trace: Trace, event: Start, counts: dict[tuple[int, str, int], int]) -> int:
        unit = len(self.groups)
        group = trace.operations[event.operations[0]].group
        self.groups.append(group)
        self.operations.append(event.operations)
        self.order[group].append(unit)
        self.steps.append((START, (unit,), ""))
        keys = []
        for number in event.operations:
            one = trace.operations[number]
            key = (one.kind, one.peer) if one.is_message else ("collective", 0)
            keys.append((*key, counts[(group, *key)]))
            self.unit_of_key[(group, *keys[-1])] = unit
            counts[(group, *key)] += 1
            self.of_operation[number] = unit
        self.keys.append(keys)
        return unit


class Simulation:
    """Runs all ranks as far as they get."""

    def __init__(self, world: Sequence[RankTrace], loading: Loading) -> None:
        known: dict[int, SimulationUnits] = {}
        self.world = {one.rank: one for one in world}
        self.units = {}
        for one in world:
            if id(one.trace) not in known:
                known[id(one.trace)] = SimulationUnits(one.trace, loading)
            self.units[one.rank] = known[id(one.trace)]
        self.numbers = {name: {one.rank: n for one, n in some} for name, some in members_of(world).items()}
        self.at = dict.fromkeys(self.world, 0)
        self.started = {r: dict.fromkeys(u.order, 0) for r, u in self.units.items()}
        self.head = {r: dict.fromkeys(u.order, 0) for r, u in self.units.items()}
        self.ended = {r: bytearray(len(u.groups)) for r, u in self.units.items()}
        self.left: dict[Node, int] = {}
        """Operations that have not ended, of units that are running."""
        self.arrived: dict[tuple[str, int], int] = defaultdict(int)
        self.messages: set[tuple[str, int, int, int]] = set()
        """(group, sender, receiver, number) whose one end is there."""
        self.moving: deque[tuple[int, int]] = deque((rank, -1) for rank in self.world)
        """(rank, communicator whose next unit may run), or -1: its kernels."""

    def run(self) -> bool:
        """Whether all ended."""
        while self.moving:
            rank, group = self.moving.popleft()
            if group < 0:
                self._go_on(rank)
            else:
                self._launch(rank, group)
        return all(self.at[r] == len(u.steps) and all(self.ended[r]) for r, u in self.units.items())

    def _go_on(self, rank: int) -> None:
        units, ended = self.units[rank], self.ended[rank]
        steps, at = units.steps, self.at[rank]
        while at < len(steps):
            code, wanted, _ = steps[at]
            if code == WAIT:
                if not all(ended[unit] for unit in wanted):
                    break
            else:
                group = units.groups[wanted[0]]
                self.started[rank][group] += 1
                if self.started[rank][group] == self.head[rank][group] + 1:
                    self.moving.append((rank, group))
            at += 1
        self.at[rank] = at

    def _launch(self, rank: int, group: int) -> None:
        units, place = self.units[rank], self.head[rank][group]
        unit = units.order[group][place]
        if (rank, unit) in self.left or place >= self.started[rank][group]:
            return
        communicator = self.world[rank].communicators[group]
        self.left[rank, unit] = len(units.keys[unit])
        for kind, peer, number in units.keys[unit]:
            if kind == "collective":
                key = communicator.name, number
                self.arrived[key] += 1
                if self.arrived[key] == len(communicator.ranks):
                    del self.arrived[key]
                    for member in communicator.ranks:
                        self._end(member, communicator.name, ("collective", 0, number))
                continue
            size, index = len(communicator.ranks), communicator.ranks.index(rank)
            other = communicator.ranks[(index + peer) % size]
            message = communicator.name, *((rank, other) if kind == "send" else (other, rank)), number
            if message not in self.messages:
                self.messages.add(message)
                continue
            self.messages.remove(message)
            self._end(rank, communicator.name, (kind, peer, number))
            self._end(other, communicator.name, ("receive" if kind == "send" else "send", -peer % size, number))

    def _end(self, rank: int, name: str, key: tuple[str, int, int]) -> None:
        """One operation of a rank has ended; with the last of its unit the next one of the communicator runs."""
        group = self.numbers[name][rank]
        unit = self.units[rank].unit_of_key[(group, *key)]
        self.left[rank, unit] -= 1
        if self.left[rank, unit]:
            return
        del self.left[rank, unit]
        self.ended[rank][unit] = 1
        self.head[rank][group] += 1
        if self.head[rank][group] < self.started[rank][group]:
            self.moving.append((rank, group))
        steps, at = self.units[rank].steps, self.at[rank]
        if at < len(steps) and steps[at][0] == WAIT and unit in steps[at][1]:
            self.moving.append((rank, -1))

    def waits_for(self, node: Node) -> Iterator[tuple[Node, str]]:
        """What keeps something that has not ended, with the reason."""
        rank, unit = node
        units, one = self.units[rank], self.world[rank]
        if unit < 0:
            if self.at[rank] < len(units.steps):
                _, wanted, loading = units.steps[self.at[rank]]
                for other in wanted:
                    if not self.ended[rank][other]:
                        says = one.says(units.operations[other][0])
                        why = f"rank {rank} loads a kernel ({loading}) while it has open" if loading else ""
                        yield (rank, other), f"{why or f'rank {rank} waits for its'} {says}"
            return
        group = units.groups[unit]
        place = units.order[group].index(unit)
        says = one.says(units.operations[unit][0])
        if place >= self.started[rank][group]:
            yield (rank, -1), f"rank {rank} has not yet started its {says}"
        elif place > self.head[rank][group]:
            before = units.order[group][self.head[rank][group]]
            first = one.says(units.operations[before][0])
            yield (rank, before), f"rank {rank} runs its {says} only after, in the same group, its {first}"
        else:
            yield from self._partners(rank, unit)

    def _partners(self, rank: int, unit: int) -> Iterator[tuple[Node, str]]:
        units, one = self.units[rank], self.world[rank]
        communicator = one.communicators[units.groups[unit]]
        for number, (kind, peer, nth) in zip(units.operations[unit], units.keys[unit], strict=True):
            size, index = len(communicator.ranks), communicator.ranks.index(rank)
            if kind == "collective":
                key, others = (kind, 0, nth), communicator.ranks
            else:
                key = ("receive" if kind == "send" else "send", -peer % size, nth)
                others = (communicator.ranks[(index + peer) % size],)
            for other in others:
                group = self.numbers[communicator.name].get(other)
                theirs = None if group is None else self.units[other].unit_of_key.get((group, *key))
                if theirs is None or self.ended[other][theirs] or (other, theirs) in self.left or other == rank:
                    continue
                yield (other, theirs), f"rank {rank} needs rank {other} for its {one.says(number)}"


def deadlocks(world: Sequence[RankTrace], loading: Loading = "first") -> Iterator[Violation]:
    """The shortest cycle of waits, if there is one; traces without mismatches are asked for."""
    simulation = Simulation(world, loading)
    if simulation.run():
        return
    stuck = [rank for rank, units in simulation.units.items() if simulation.at[rank] < len(units.steps)]
    stuck = stuck or [rank for rank, ended in simulation.ended.items() if not all(ended)]
    cycle = _shortest(simulation, stuck)
    if cycle:
        text = "each of these waits for the next, the last for the first:\n" + "\n".join(f"  {one}" for one in cycle)
    else:
        text = f"ranks {', '.join(map(str, stuck[:8]))} wait for operations that no rank starts"
    yield Violation(rule="deadlock", text=text)


LOOKED_AT = 64
"""Ranks from which cycles are looked for."""


def _shortest(simulation: Simulation, stuck: Sequence[int]) -> list[str]:
    best: list[str] = []
    for rank in stuck[:LOOKED_AT]:
        for node in [(rank, -1), *((rank, u) for u, done in enumerate(simulation.ended[rank]) if not done)][:4]:
            found = _cycle(simulation, node)
            if found and (not best or len(found) < len(best)):
                best = found
    return best


def _cycle(simulation: Simulation, start: Node) -> list[str]:
    """The shortest way back to a node, by breadth."""
    before: dict[Node, tuple[Node, str]] = {}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for following, why in simulation.waits_for(node):
            if following == start:
                found = [why]
                while node != start:
                    node, reason = before[node]
                    found.append(reason)
                return found[::-1]
            if following not in before:
                before[following] = node, why
                waiting.append(following)
    return []
