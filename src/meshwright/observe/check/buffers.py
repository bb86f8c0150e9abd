"""Whether local work leaves buffers alone from the start of an operation until it was waited for.

What an operation receives must not be read or changed, what it sends must not be changed, and neither may be freed: the
allocator would give the memory to a kernel that runs before the operation has ended.
"""

from collections.abc import Iterator, Sequence

from meshwright.observe.check.events import RankTrace, Start, Touch, Violation, WaitEvent

WORDS = {"read": "reads what arrives", "written": "changes the buffer", "freed": "frees the buffer"}


def hazards(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """Of each distinct trace, on the first rank that has it."""
    for one in {id(one.trace): one for one in reversed(world)}.values():
        yield from _of_rank(one)


def _of_rank(one: RankTrace) -> Iterator[Violation]:
    pending: set[int] = set()
    reported: set[int] = set()
    for event in one.trace.events:
        if isinstance(event, Start):
            pending |= set(event.operations)
        elif isinstance(event, WaitEvent):
            pending.discard(event.operation)
        elif isinstance(event, Touch) and event.operation in pending - reported:
            reported.add(event.operation)
            yield Violation(
                rule="buffer",
                text=f"rank {one.rank} {WORDS[event.what]} of an operation before it was waited for: {event.where}; "
                f"the operation is the {one.says(event.operation)}",
            )
    for number in sorted(pending - reported):
        yield Violation(rule="buffer", text=f"rank {one.rank} never waits for the {one.says(number)}")
        return
