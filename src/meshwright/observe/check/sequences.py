"""Order checks: members of a group start the same collectives in the same order, and every send has its receive.

NCCL matches the operations of a group by their order alone: nothing in the transferred data identifies them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from meshwright.observe.check.events import CommunicationOperation, RankTrace, Start, Trace, Violation

Members = dict[str, list[tuple[RankTrace, int]]]
"""Members of each communicator: (rank, number of the communicator there)."""


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
