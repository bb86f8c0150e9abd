"""Whether the members of every group start the same collectives in the same order, and every send has its receive.

NCCL matches the operations of a group by their order alone: nothing in what travels says what it is.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from meshwright.observe.check.events import Operation, RankTrace, Start, Trace, Violation

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
        for event in trace.events:
            for number in event.operations if isinstance(event, Start) else ():
                one = trace.operations[number]
                if one.is_message:
                    self.messages[one.group, one.kind, one.peer].append(number)
                else:
                    self.collectives[one.group].append(number)


def orders_of(world: Sequence[RankTrace]) -> dict[int, Orders]:
    """By the identity of the trace: many ranks have one."""
    return {id(trace): Orders(trace) for trace in {id(one.trace): one.trace for one in world}.values()}


def mismatches(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """The first difference of each group and each pair of ranks."""
    orders = orders_of(world)
    for members in members_of(world).values():
        yield from _membership(members)
        yield from _collectives(members, orders)
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
    (first, number), seen = members[0], set()
    expected = orders[id(first.trace)].collectives[number]
    for one, place in members[1:]:
        if (id(one.trace), place) in seen:
            continue
        seen.add((id(one.trace), place))
        if (one.trace, place) == (first.trace, number) and not _splits(one, place, orders):
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
            a, b = first.trace.operations[mine], one.trace.operations[other]
            if _signature(a) != _signature(b):
                yield _mismatch(
                    f"rank {first.rank} and rank {one.rank} start different collectives as number {at + 1} of their "
                    f"group: {first.says(mine)}; against {one.says(other)}"
                )
                break
    yield from _rows(members, orders)


def _splits(one: RankTrace, place: int, orders: dict[int, Orders]) -> bool:
    return any(one.trace.operations[n].sent for n in orders[id(one.trace)].collectives[place])


def _rows(members: list[tuple[RankTrace, int]], orders: dict[int, Orders]) -> Iterator[Violation]:
    """What a rank sends to another in an all-to-all, that one must take. Groups of other members are left to others."""
    places = {one.rank: index for index, one in enumerate(one for one, _ in members)}
    first, number = members[0]
    ranks = first.communicators[number].ranks
    if not any(_splits(one, place, orders) for one, place in members) or set(ranks) != set(places):
        return
    lists = [orders[id(one.trace)].collectives[place] for one, place in members]
    if len({len(some) for some in lists}) > 1:
        return  # told already
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


def _signature(one: Operation) -> tuple[object, ...]:
    elements = 0 if one.kind == "all_to_all" else one.elements
    return one.kind, one.dtype, elements, one.reduce


def _messages(world: Sequence[RankTrace], orders: dict[int, Orders]) -> Iterator[Violation]:
    """Of each pair of ranks in each group and direction, from the sender's side; then receives that nobody sends."""
    by_rank = {one.rank: one for one in world}
    numbers = {one.rank: {c.name: n for n, c in enumerate(one.communicators)} for one in world}
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
