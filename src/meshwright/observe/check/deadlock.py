"""Deadlock search: proves that every operation can end under NCCL's rules, whatever the timing.

    FIFO         operations of one communicator run on a rank in the order in which they were started
    rendezvous   a collective runs once all members have reached it, a message once both ends have
    in order     an operation runs after the kernels that were launched before its start, kernels launched after a wait
                 run after what was waited for, and the kernels of a rank run one after another
    host         never stops. A host that reads a value back adds no rule: what it starts then waits for those kernels
                 in any case
    loading      a kernel's first launch waits until all receives that are open have ended (lazy module loading)

No step of a rank ever prevents a step of another, so one run in any order decides: either all operations end, or the
rest waits in a cycle.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Literal

from meshwright.observe.check.events import Compute, RankTrace, Start, Trace, Violation, WaitEvent
from meshwright.observe.check.sequences import members_of

Loading = Literal["none", "first", "every"]
"""Kernel launches that wait for open receives."""
Node = tuple[int, int]
"""(rank, unit). Unit -1 stands for the rank's kernels."""
START, WAIT = 0, 1


class SimulationUnits:
    """A trace in units of operations that start together."""

    def __init__(self, trace: Trace, loading: Loading) -> None:
        self.unit_of_operation: dict[int, int] = {}
        self.groups: list[int] = []
        self.operations: list[tuple[int, ...]] = []
        self.keys: list[list[tuple[str, int, int]]] = []
        """Keys of each unit's operations: (kind, peer, number of earlier ones of that kind)."""
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
                unit = self.unit_of_operation[event.operation]
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
            operation = trace.operations[number]
            key = (operation.kind, operation.peer) if operation.is_message else ("collective", 0)
            keys.append((*key, counts[(group, *key)]))
            self.unit_of_key[(group, *keys[-1])] = unit
            counts[(group, *key)] += 1
            self.unit_of_operation[number] = unit
        self.keys.append(keys)
        return unit


class Simulation:
    """Runs all ranks as far as they get."""

    def __init__(self, world: Sequence[RankTrace], loading: Loading) -> None:
        known: dict[int, SimulationUnits] = {}
        self.world = {rank_trace.rank: rank_trace for rank_trace in world}
        self.units = {}
        for rank_trace in world:
            if id(rank_trace.trace) not in known:
                known[id(rank_trace.trace)] = SimulationUnits(rank_trace.trace, loading)
            self.units[rank_trace.rank] = known[id(rank_trace.trace)]
        self.numbers = {
            name: {rank_trace.rank: n for rank_trace, n in members} for name, members in members_of(world).items()
        }
        self.at = dict.fromkeys(self.world, 0)
        self.started = {r: dict.fromkeys(u.order, 0) for r, u in self.units.items()}
        self.head = {r: dict.fromkeys(u.order, 0) for r, u in self.units.items()}
        self.ended = {r: bytearray(len(u.groups)) for r, u in self.units.items()}
        self.unfinished: dict[Node, int] = {}
        """Number of unfinished operations of each running unit."""
        self.arrived: dict[tuple[str, int], int] = defaultdict(int)
        self.messages: set[tuple[str, int, int, int]] = set()
        """Messages with one end started: (group, sender, receiver, number)."""
        self.runnable: deque[tuple[int, int]] = deque((rank, -1) for rank in self.world)
        """(rank, communicator whose next unit may run). Communicator -1 stands for the rank's kernels."""

    def run(self) -> bool:
        """Run until nothing moves. Return True if all operations ended."""
        while self.runnable:
            rank, group = self.runnable.popleft()
            if group < 0:
                self._advance(rank)
            else:
                self._launch(rank, group)
        return all(self.at[r] == len(u.steps) and all(self.ended[r]) for r, u in self.units.items())

    def _advance(self, rank: int) -> None:
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
                    self.runnable.append((rank, group))
            at += 1
        self.at[rank] = at

    def _launch(self, rank: int, group: int) -> None:
        units, position = self.units[rank], self.head[rank][group]
        unit = units.order[group][position]
        if (rank, unit) in self.unfinished or position >= self.started[rank][group]:
            return
        communicator = self.world[rank].communicators[group]
        self.unfinished[rank, unit] = len(units.keys[unit])
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
        """End one operation of a rank. The last one of a unit lets the communicator's next unit run."""
        group = self.numbers[name][rank]
        unit = self.units[rank].unit_of_key[(group, *key)]
        self.unfinished[rank, unit] -= 1
        if self.unfinished[rank, unit]:
            return
        del self.unfinished[rank, unit]
        self.ended[rank][unit] = 1
        self.head[rank][group] += 1
        if self.head[rank][group] < self.started[rank][group]:
            self.runnable.append((rank, group))
        steps, at = self.units[rank].steps, self.at[rank]
        if at < len(steps) and steps[at][0] == WAIT and unit in steps[at][1]:
            self.runnable.append((rank, -1))

    def waits_for(self, node: Node) -> Iterator[tuple[Node, str]]:
        """Yield the nodes that an unfinished node waits for, with the reason."""
        rank, unit = node
        units, rank_trace = self.units[rank], self.world[rank]
        if unit < 0:
            if self.at[rank] < len(units.steps):
                _, wanted, loading = units.steps[self.at[rank]]
                for other in wanted:
                    if not self.ended[rank][other]:
                        text = rank_trace.describe(units.operations[other][0])
                        why = f"rank {rank} loads a kernel ({loading}) while it has open" if loading else ""
                        yield (rank, other), f"{why or f'rank {rank} waits for its'} {text}"
            return
        group = units.groups[unit]
        position = units.order[group].index(unit)
        text = rank_trace.describe(units.operations[unit][0])
        if position >= self.started[rank][group]:
            yield (rank, -1), f"rank {rank} has not yet started its {text}"
        elif position > self.head[rank][group]:
            before = units.order[group][self.head[rank][group]]
            first = rank_trace.describe(units.operations[before][0])
            yield (rank, before), f"rank {rank} runs its {text} only after, in the same group, its {first}"
        else:
            yield from self._partners(rank, unit)

    def _partners(self, rank: int, unit: int) -> Iterator[tuple[Node, str]]:
        units, rank_trace = self.units[rank], self.world[rank]
        communicator = rank_trace.communicators[units.groups[unit]]
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
                if theirs is None or self.ended[other][theirs] or (other, theirs) in self.unfinished or other == rank:
                    continue
                yield (other, theirs), f"rank {rank} needs rank {other} for its {rank_trace.describe(number)}"


def deadlocks(world: Sequence[RankTrace], loading: Loading = "first") -> Iterator[Violation]:
    """Yield the shortest cycle of waits, if there is one. The traces must have no mismatches."""
    simulation = Simulation(world, loading)
    if simulation.run():
        return
    stuck = [rank for rank, units in simulation.units.items() if simulation.at[rank] < len(units.steps)]
    stuck = stuck or [rank for rank, ended in simulation.ended.items() if not all(ended)]
    cycle = _shortest_cycle(simulation, stuck)
    if cycle:
        text = "each of these waits for the next, the last for the first:\n" + "\n".join(f"  {wait}" for wait in cycle)
    else:
        text = f"ranks {', '.join(map(str, stuck[:8]))} wait for operations that no rank starts"
    yield Violation(rule="deadlock", text=text)


LOOKED_AT = 64
"""Ranks from which cycles are searched."""


def _shortest_cycle(simulation: Simulation, stuck: Sequence[int]) -> list[str]:
    best: list[str] = []
    for rank in stuck[:LOOKED_AT]:
        for node in [(rank, -1), *((rank, u) for u, done in enumerate(simulation.ended[rank]) if not done)][:4]:
            cycle = _cycle(simulation, node)
            if cycle and (not best or len(cycle) < len(best)):
                best = cycle
    return best


def _cycle(simulation: Simulation, start: Node) -> list[str]:
    """Return the shortest way back to a node, by breadth-first search."""
    before: dict[Node, tuple[Node, str]] = {}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for following, reason in simulation.waits_for(node):
            if following == start:
                reasons = [reason]
                while node != start:
                    node, earlier_reason = before[node]
                    reasons.append(earlier_reason)
                return reasons[::-1]
            if following not in before:
                before[following] = node, reason
                waiting.append(following)
    return []
