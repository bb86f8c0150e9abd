"""Rules over the traces of a world: operations that match, none that wait for each other, and untouched buffers.

Matches: members of a group start the same collectives in the same order, and every send has its receive. NCCL matches
the operations of a group by their order alone: nothing in the transferred data identifies them.

Deadlocks: every operation can end under NCCL's rules, whatever the timing.

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
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal

from meshwright.observe.check.events import (
    CommunicationOperation,
    Compute,
    RankTrace,
    Start,
    Touch,
    Trace,
    Violation,
    WaitEvent,
)

Members = dict[str, list[tuple[RankTrace, int]]]
"""Members of each communicator: (rank, number of the communicator there)."""
TOUCHES = {"read": "reads what arrives", "written": "changes the buffer", "freed": "frees the buffer"}
SHOWN = 10
"""Most violations of one rule that are listed."""
Loading = Literal["none", "first", "every"]
"""Kernel launches that wait for open receives."""
Node = tuple[int, int]
"""(rank, unit). Unit -1 stands for the rank's kernels."""
START, WAIT = 0, 1
LOOKED_AT = 64
"""Ranks from which cycles are searched."""


def members_of(world: Sequence[RankTrace]) -> Members:
    """Collect the members of each communicator by name."""
    members: Members = defaultdict(list)
    for rank_trace in world:
        for number, communicator in enumerate(rank_trace.communicators):
            members[communicator.name].append((rank_trace, number))
    return members


class Orders:
    """Numbers of the collectives, and of messages by peer, of each communicator of a trace, in order of start."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.collectives: dict[int, list[int]] = defaultdict(list)
        self.messages: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        self._signatures: dict[int, tuple[object, ...]] = {}
        for event in trace.events:
            for number in event.operations if isinstance(event, Start) else ():
                operation = trace.operations[number]
                if operation.is_message:
                    self.messages[operation.group, operation.kind, operation.peer].append(number)
                else:
                    self.collectives[operation.group].append(number)

    def signatures(self, group: int) -> tuple[object, ...]:
        """Return what must be equal on all members of a group."""
        if group not in self._signatures:
            self._signatures[group] = tuple(_signature(self.trace.operations[n]) for n in self.collectives[group])
        return self._signatures[group]

    def has_rows(self, group: int) -> bool:
        """Return True if ranks of a group send each other unequal parts."""
        return any(self.trace.operations[n].sent for n in self.collectives[group])


def orders_of(world: Sequence[RankTrace]) -> dict[int, Orders]:
    """Return the orders of each distinct trace, by its identity."""
    return {id(trace): Orders(trace) for trace in {id(member.trace): member.trace for member in world}.values()}


def mismatches(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """Yield the first difference of each group and pair of ranks. Groups with equal traces are compared once."""
    orders = orders_of(world)
    seen: set[object] = set()
    for members in members_of(world).values():
        yield from _compare_members(members)
        # Thousands of ranks share a few traces, so equal groups of traces are compared once.
        key = tuple((id(rank_trace.trace), group) for rank_trace, group in members)
        if key not in seen:
            seen.add(key)
            yield from _compare_collectives(members, orders)
            yield from _compare_rows(members, orders)
    yield from _compare_messages(world, orders)


def _compare_members(members: list[tuple[RankTrace, int]]) -> Iterator[Violation]:
    """Check that all members are present and agree on the members and their order."""
    first, number = members[0]
    ranks = first.communicators[number].ranks
    for member, index_there in members:
        other = member.communicators[index_there]
        if other.ranks != ranks or member.rank not in ranks:
            yield _mismatch(
                f"rank {first.rank} and rank {member.rank} disagree on the members of one group: "
                f"{first.communicators[number]}, and {other}"
            )
            return
    if missing := sorted(set(ranks) - {member.rank for member, _ in members}):
        yield _mismatch(f"rank {missing[0]} does not make the {first.communicators[number]}, rank {first.rank} does")


def _compare_collectives(members: list[tuple[RankTrace, int]], orders: dict[int, Orders]) -> Iterator[Violation]:
    first, number = members[0]
    expected = orders[id(first.trace)].collectives[number]
    signatures = orders[id(first.trace)].signatures(number)
    for member, index_there in members[1:]:
        if orders[id(member.trace)].signatures(index_there) == signatures:
            continue
        actual = orders[id(member.trace)].collectives[index_there]
        for at, (mine, other) in enumerate(zip_longest(expected, actual)):
            if mine is None or other is None:
                more, fewer, extra = (first, member, mine) if other is None else (member, first, other)
                yield _mismatch(
                    f"rank {fewer.rank} never starts collective {at + 1} of the {first.communicators[number]}, which "
                    f"rank {more.rank} starts: {more.describe(extra)}"
                )
                break
            if _signature(first.trace.operations[mine]) != _signature(member.trace.operations[other]):
                yield _mismatch(
                    f"rank {first.rank} and rank {member.rank} start different collectives as number {at + 1} "
                    f"of their group: {first.describe(mine)}; against {member.describe(other)}"
                )
                break


def _compare_rows(members: list[tuple[RankTrace, int]], orders: dict[int, Orders]) -> Iterator[Violation]:
    """Check that receivers of an all-to-all take what is sent to them. Incomplete groups are skipped."""
    indices = {member.rank: index for index, member in enumerate(member for member, _ in members)}
    first, number = members[0]
    ranks = first.communicators[number].ranks
    if set(ranks) != set(indices):
        return  # reported already
    if not any(orders[id(member.trace)].has_rows(index_there) for member, index_there in members):
        return
    lists = [orders[id(member.trace)].collectives[index_there] for member, index_there in members]
    if len(set(map(len, lists))) > 1:
        return  # reported already
    for numbers in zip(*lists, strict=True):
        operations = [member.trace.operations[n] for (member, _), n in zip(members, numbers, strict=True)]
        if any(operation.kind != "all_to_all" or len(operation.sent) != len(ranks) for operation in operations):
            continue
        sent = {rank: operations[indices[rank]].sent for rank in ranks}
        taken = {rank: operations[indices[rank]].received for rank in ranks}
        for i, source in enumerate(ranks):
            for j, target in enumerate(ranks):
                if sent[source][j] != taken[target][i]:
                    yield _mismatch(
                        f"rank {source} sends {sent[source][j]} elements to rank {target}, which takes "
                        f"{taken[target][i]}: {members[indices[source]][0].describe(numbers[indices[source]])}"
                    )
                    return


def _signature(operation: CommunicationOperation) -> tuple[object, ...]:
    # Ranks may send unequal parts in an all-to-all, which `_compare_rows` checks pair by pair.
    elements = 0 if operation.kind == "all_to_all" else operation.elements
    return operation.kind, operation.dtype, elements, operation.reduce


def _compare_messages(world: Sequence[RankTrace], orders: dict[int, Orders]) -> Iterator[Violation]:
    """Compare each pair of ranks in each group and direction, from the sender's side; then unmatched receives."""
    by_rank = {rank_trace.rank: rank_trace for rank_trace in world}
    numbers = {rank_trace.rank: {c.name: n for n, c in enumerate(rank_trace.communicators)} for rank_trace in world}
    seen: set[object] = set()
    for rank_trace in world:
        for (group, kind, peer), mine in orders[id(rank_trace.trace)].messages.items():
            communicator = rank_trace.communicators[group]
            size = len(communicator.ranks)
            other = by_rank.get(rank_trace.partner(rank_trace.trace.operations[mine[0]]))
            group_there = numbers[other.rank].get(communicator.name) if other is not None else None
            if other is None or group_there is None:
                yield _mismatch(
                    f"rank {rank_trace.rank} has a partner outside of the world: {rank_trace.describe(mine[0])}"
                )
                continue
            wanted = "receive" if kind == "send" else "send"
            pair = id(rank_trace.trace), group, kind, peer, id(other.trace), group_there
            if pair in seen:
                continue
            seen.add(pair)
            theirs = orders[id(other.trace)].messages.get((group_there, wanted, -peer % size), [])
            yield from _compare_pair(rank_trace, mine, other, theirs)


def _compare_pair(rank_trace: RankTrace, mine: list[int], other: RankTrace, theirs: list[int]) -> Iterator[Violation]:
    for at, number in enumerate(mine):
        if at >= len(theirs):
            yield _mismatch(
                f"rank {other.rank} never starts the other end of message {at + 1} of rank {rank_trace.rank}: "
                f"{rank_trace.describe(number)}"
            )
            return
        a, b = rank_trace.trace.operations[number], other.trace.operations[theirs[at]]
        if a.kind == "send" and (a.elements, a.dtype) != (b.elements, b.dtype):
            yield _mismatch(
                f"rank {rank_trace.rank} and rank {other.rank} have ends of different sizes as message {at + 1}: "
                f"{rank_trace.describe(number)}; against {other.describe(theirs[at])}"
            )
            return


def _mismatch(text: str) -> Violation:
    return Violation(rule="mismatch", text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Size of what was checked, and violations of rules."""

    ranks: int
    operations: int
    """Operations of all ranks."""
    groups: int
    programs: int
    """Distinct traces."""
    violations: tuple[Violation, ...]

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        size = f"{self.ranks} ranks, {self.operations} operations"
        if not self.violations:
            return f"no deadlock, no mismatch: {size}"
        return f"{len(self.violations)} violation{'s' if len(self.violations) > 1 else ''}: {size}"


def check(world: Sequence[RankTrace]) -> CheckReport:
    """Check groups and messages, then deadlocks, then buffers.

    Deadlocks are searched only where all operations have their partners. One that needs no loading of kernels is shown
    before one that does.
    """
    violations = list(islice(mismatches(world), SHOWN))
    if not violations:
        # "first" has all the rules of "none", so one search shows that neither deadlocks.
        violations = list(deadlocks(world, "first"))
        violations = (violations and list(deadlocks(world, "none"))) or violations
    violations += islice(hazards(world), SHOWN)
    return CheckReport(
        ranks=len(world),
        operations=sum(len(rank_trace.trace.operations) for rank_trace in world),
        groups=len({communicator.name for rank_trace in world for communicator in rank_trace.communicators}),
        programs=len({id(rank_trace.trace) for rank_trace in world}),
        violations=tuple(violations),
    )


def hazards(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """Yield buffers that local work touches before their operation was waited for.

    What an operation receives must not be read or changed, what it sends must not be changed, and neither may be freed:
    the allocator would give the memory to a kernel that runs before the operation has ended. Each distinct trace is
    checked on the first rank that has it.
    """
    for rank_trace in {id(rank_trace.trace): rank_trace for rank_trace in reversed(world)}.values():
        yield from _rank_hazards(rank_trace)


def _rank_hazards(rank_trace: RankTrace) -> Iterator[Violation]:
    pending: set[int] = set()
    reported: set[int] = set()
    for event in rank_trace.trace.events:
        if isinstance(event, Start):
            pending |= set(event.operations)
        elif isinstance(event, WaitEvent):
            pending.discard(event.operation)
        elif isinstance(event, Touch) and event.operation in pending - reported:
            reported.add(event.operation)
            yield Violation(
                rule="buffer",
                text=f"rank {rank_trace.rank} {TOUCHES[event.what]} of an operation before it was waited for: "
                f"{event.where}; the operation is the {rank_trace.describe(event.operation)}",
            )
    for number in sorted(pending - reported):
        yield Violation(rule="buffer", text=f"rank {rank_trace.rank} never waits for the {rank_trace.describe(number)}")
        return


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
        # One per distinct trace: ranks of a large world share them.
        units_by_trace: dict[int, SimulationUnits] = {}
        self.world = {rank_trace.rank: rank_trace for rank_trace in world}
        self.units = {}
        for rank_trace in world:
            if id(rank_trace.trace) not in units_by_trace:
                units_by_trace[id(rank_trace.trace)] = SimulationUnits(rank_trace.trace, loading)
            self.units[rank_trace.rank] = units_by_trace[id(rank_trace.trace)]
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
                # Otherwise an earlier unit of this communicator still runs, and queues the next one when it ends.
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
            # The first end only announces itself. The second one ends both.
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
        # Only a rank that waits for this very unit can go on: waking all would make large worlds quadratic.
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
                other_unit = None if group is None else self.units[other].unit_of_key.get((group, *key))
                if (
                    other_unit is None
                    or self.ended[other][other_unit]
                    or (other, other_unit) in self.unfinished
                    or other == rank
                ):
                    continue
                yield (other, other_unit), f"rank {rank} needs rank {other} for its {rank_trace.describe(number)}"


def deadlocks(world: Sequence[RankTrace], loading: Loading = "first") -> Iterator[Violation]:
    """Yield the shortest cycle of waits, if there is one. The traces must have no mismatches."""
    simulation = Simulation(world, loading)
    if simulation.run():
        return
    stuck = [rank for rank, units in simulation.units.items() if simulation.at[rank] < len(units.steps)]
    # All kernels may have run while the last operations, which nobody waits for, still hang.
    stuck = stuck or [rank for rank, ended in simulation.ended.items() if not all(ended)]
    cycle = _shortest_cycle(simulation, stuck)
    if cycle:
        text = "each of these waits for the next, the last for the first:\n" + "\n".join(f"  {wait}" for wait in cycle)
    else:
        text = f"ranks {', '.join(map(str, stuck[:8]))} wait for operations that no rank starts"
    yield Violation(rule="deadlock", text=text)


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
