"""Whether the members of every group start the same collectives in the same order, and every send has its receive.

NCCL matches the operations of a group by their order alone: nothing in what travels says what it is.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from meshwright.observe.check.events import CommunicationOperation, RankTrace, Start, Trace, Violation

Members = dict[str, list[tuple[RankTrace, int]]]
"""Of each communicator: (rank, its number there)."""


def members_of(world: Sequence[RankTrace]) -> Members:
    """Who has a communicator of which name."""
    found: Members = defaultdict(list)
    for one in world:
        for number, communicator in enumerate(one.communicators):
            found[communicator.name].append((one, number))
    return found


class Orders:
    """For each communicator of a trace the numbers of its collectives, and of its messages by peer, as started."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.collectives: dict[int, list[int]] = defaultdict(list)
        self.messages: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        self._signatures: dict[int, tuple[object, ...]] = {}
        for event in trace.events:
            for number in event.operations if isinstance(event, Start) else ():
                one = trace.operations[number]
                if one.is_message:
                    self.messages[one.group, one.kind, one.peer].append(number)
                else:
                    self.collectives[one.group].append(number)

    def signatures(self, group: int) -> tuple[object, ...]:
        """What must be equal on all members of a group."""
        if group not in self._signatures:
            self._signatures[group] = tuple(_signature(self.trace.operations[n]) for n in self.collectives[group])
        return self._signatures[group]

    def has_rows(self, group: int) -> bool:
        """Whether ranks of a group send each other unequal parts."""
        return any(self.trace.operations[n].sent for n in self.collectives[group])


def orders_of(world: Sequence[RankTrace]) -> dict[int, Orders]:
    """By the identity of the trace: many ranks have one."""
    return {id(trace): Orders(trace) for trace in {id(one.trace): one.trace for one in world}.values()}


def mismatches(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """The first difference of each group and each pair of ranks. Groups whose members have the traces of a group that
    was compared already are not compared again."""
    orders = orders_of(world)
    seen: set[object] = set()
    for members in members_of(world).values():
        yield from _membership(members)
        key = tuple((id(one.trace), place) for one, place in members)
        if key not in seen:
            seen.add(key)
            yield from _collectives(members, orders)
            yield from _rows(members, orders)
    yield from _messages(world, orders)


def _membership(members: list[tuple[RankTrace, int]]) -> Iterator[Violation]:
    """All members must be there, and agree on who is a member in which place."""
    first, number = members[0]
    ranks = first.communicators[number].ranks
    for one, place in members:
        other = one.communicators[place]
        if other.ranks != ranks or one.rank not in ranks:
            yield _mismatch(
                f"rank {first.rank} and rank {one.rank} disagree on the members of one group: "
                f"{first.communicators[number]}, and {other}"
            )
            return
    if missing := sorted(set(ranks) - {one.rank for one, _ in members}):
        yield _mismatch(f"rank {missing[0]} does not make the {first.communicators[number]}, rank {first.rank} does")


def _collectives(members: list[tuple[RankTrace, int]], orders: dict[int, Orders]) -> Iterator[Violation]:
    first, number = members[0]
    expected = orders[id(first.trace)].collectives[number]
    signatures = orders[id(first.trace)].signatures(number)
    for one, place in members[1:]:
        if orders[id(one.trace)].signatures(place) == signatures:
            continue
        found = orders[id(one.trace)].collectives[place]
        for at, (mine, other) in enumerate(zip_longest(expected, found)):
            if mine is None or other is None:
                more, fewer, extra = (first, one, mine) if other is None else (one, first, other)
                yield _mismatch(
                    f"rank {fewer.rank} never starts collective {at + 1} of the {first.communicators[number]}, which "
                    f"rank {more.rank} starts: {more.says(extra)}"
                )
                break
            if _signature(first.trace.operations[mine]) != _signature(one.trace.operations[other]):
                yield _mismatch(
                    f"rank {first.rank} and rank {one.rank} start different collectives as number {at + 1} of their "
                    f"group: {first.says(mine)}; against {one.says(other)}"
                )
                break


def _rows(members: list[tuple[RankTrace, int]], orders: dict[int, Orders]) -> Iterator[Violation]:
    """What a rank sends to another in an all-to-all, that one must take. Groups of other members are left to others."""
    places = {one.rank: index for index, one in enumerate(one for one, _ in members)}
    first, number = members[0]
    ranks = first.communicators[number].ranks
    if not any(orders[id(one.trace)].has_rows(place) for one, place in members) or set(ranks) != set(places):
        return
    lists = [orders[id(one.trace)].collectives[place] for one, place in members]
    if len({len(some) for some in lists}) > 1:
        return  # reported already
    for numbers in zip(*lists, strict=True):
        ops = [one.trace.operations[n] for (one, _), n in zip(members, numbers, strict=True)]
        if any(one.kind != "all_to_all" or len(one.sent) != len(ranks) for one in ops):
            continue
        sent = {rank: ops[places[rank]].sent for rank in ranks}
        taken = {rank: ops[places[rank]].received for rank in ranks}
        for i, source in enumerate(ranks):
            for j, target in enumerate(ranks):
                if sent[source][j] != taken[target][i]:
                    yield _mismatch(
                        f"rank {source} sends {sent[source][j]} elements to rank {target}, which takes "
                        f"{taken[target][i]}: {members[places[source]][0].says(numbers[places[source]])}"
                    )
                    return


def _signature(one: CommunicationOperation) -> tuple[object, ...]:
    elements = 0 if one.kind == "all_to_all" else one.elements
    return one.kind, one.dtype, elements, one.reduce


def _messages(world: Sequence[RankTrace], orders: dict[int, Orders]) -> Iterator[Violation]:
    """Of each pair of ranks in each group and direction, from the sender's side; then receives that nobody sends."""
    by_rank = {one.rank: one for one in world}
    numbers = {one.rank: {c.name: n for n, c in enumerate(one.communicators)} for one in world}
    seen: set[object] = set()
    for one in world:
        for (group, kind, peer), mine in orders[id(one.trace)].messages.items():
            communicator = one.communicators[group]
            size = len(communicator.ranks)
            other = by_rank.get(one.partner(one.trace.operations[mine[0]]))
            place = numbers[other.rank].get(communicator.name) if other is not None else None
            if other is None or place is None:
                yield _mismatch(f"rank {one.rank} has a partner outside of the world: {one.says(mine[0])}")
                continue
            wanted = "receive" if kind == "send" else "send"
            pair = id(one.trace), group, kind, peer, id(other.trace), place
            if pair in seen:
                continue
            seen.add(pair)
            theirs = orders[id(other.trace)].messages.get((place, wanted, -peer % size), [])
            yield from _pair(one, mine, other, theirs)


def _pair(one: RankTrace, mine: list[int], other: RankTrace, theirs: list[int]) -> Iterator[Violation]:
    for at, number in enumerate(mine):
        if at >= len(theirs):
            yield _mismatch(
                f"rank {other.rank} never starts the other end of message {at + 1} of rank {one.rank}: "
                f"{one.says(number)}"
            )
            return
        a, b = one.trace.operations[number], other.trace.operations[theirs[at]]
        if a.kind == "send" and (a.elements, a.dtype) != (b.elements, b.dtype):
            yield _mismatch(
                f"rank {one.rank} and rank {other.rank} have ends of different sizes as message {at + 1}: "
                f"{one.says(number)}; against {other.says(theirs[at])}"
            )
            return


def _mismatch(text: str) -> Violation:
    return Violation(rule="mismatch", text=text)
