"""Groups of ranks along a mesh axis, and their collectives.

A group of one rank computes what a collective would return and touches no network, so callers need not ask for the
degree. Every collective of the engine goes through here. It is reported to `traffic` before it begins, with the bytes
that this rank sends. data.py reports the collectives of fully_shard.

Bytes are those of ring algorithms. With n ranks, an all-reduce sends 2 (n-1)/n of the tensor; all-gather and
reduce-scatter send (n-1)/n of the whole one. An all-to-all sends the rows for others, and a send its tensor. Groups of
one rank send nothing and are not counted. The cost of counting is in docs/parallel.md.

Ranks also agree: rank 0 does work for all of them, and ranks tell each other small objects. An error on one rank is
raised on every rank, so none waits for a rank that failed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import prod
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import compat
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.memory.held import takes

Counts = Mapping[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> (calls, bytes sent by this rank)."""


class Traffic:
    """The counts of one rank since the start, and the last collective it began, for a watchdog.

    Written by the thread that trains. Another thread may read `last` and `calls_begun` at any time.
    """

    __slots__ = ("_counts", "_last", "calls_begun")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[str, str] | None = None
        self.calls_begun = 0
        """Number of collectives, sends and receives begun since the start."""

    def tell(self, axis: str, collective: str, sent_bytes: int) -> None:
        """Report that a collective is about to begin, in which this rank sends `sent_bytes`."""
        self.begin(axis, collective)
        self.add(axis, collective, sent_bytes)

    def begin(self, axis: str, collective: str) -> None:
        """Report the start of something that is counted elsewhere: a receive is counted at its sender."""
        self._last = (axis, collective)
        self.calls_begun += 1

    def add(self, axis: str, collective: str, sent_bytes: int) -> None:
        """Count one more call, and its bytes."""
        count = self._counts.get((axis, collective))
        if count is None:
            self._counts[axis, collective] = [1, sent_bytes]
        else:
            count[0] += 1
            count[1] += sent_bytes

    @property
    def last(self) -> str:
        """The last collective that was begun, as `all_reduce on tp`. Empty = none so far."""
        return f"{self._last[1]} on {self._last[0]}" if self._last else ""

    def snapshot(self) -> Counts:
        """Return the counts as they are now."""
        return {key: (calls, sent) for key, (calls, sent) in self._counts.items()}

    def restore(self, before: Counts) -> None:
        """Set the counts back to a snapshot: what was sent since does not belong to a step."""
        self._counts = {key: [calls, sent] for key, (calls, sent) in before.items()}

    def since(self, before: Counts) -> Counts:
        """Return what was counted after a snapshot."""
        more = {}
        for key, (calls, sent) in self.snapshot().items():
            calls_before, sent_before = before.get(key, (0, 0))
            if calls > calls_before:
                more[key] = (calls - calls_before, sent - sent_before)
        return more


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Group:
    """Ranks along an axis: their numbers in the world, in order of the axis, and the `index` of this rank."""

    axis: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    process_group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    overlaps: bool = True
    """Collectives overlap with other work until their wait(). False = each ends within the call that starts it."""
    number: int = field(init=False, default_factory=partial(next, count()))
    """Name of the group in operators of compiled code, which take only tensors and numbers (`find_group`)."""

    def __post_init__(self) -> None:
        _groups[self.number] = self

    @property
    def size(self) -> int:
        """Number of ranks: the degree of the axis."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Take the sum or maximum over the ranks in place, and return x."""
        if self.size > 1:
            self.tell_all_reduce(x)
            dist.all_reduce(x, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=self.process_group)
        return x

    def start_all_reduce(self, x: Tensor) -> "Pending":
        """Start a sum in place. x must not be read or changed before wait()."""
        if self.size == 1:
            return Pending(x)
        self.tell_all_reduce(x)
        return Pending(x, dist.all_reduce(x, group=self.process_group, async_op=self.overlaps))

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the ranks' tensors of equal shape along `dim`."""
        return self.start_all_gather(x, dim, overlaps=False).wait()

    @takes("buffers")
    def start_all_gather(
        self, x: Tensor, dim: int = 0, *, overlaps: bool = True, into: Tensor | None = None
    ) -> "Pending":
        """Start an all-gather, into a tensor or a new one. x must not change before wait()."""
        if self.size == 1:
            return Pending(x if into is None else into.copy_(x))
        self.tell_all_gather(x)
        x = x.contiguous()
        is_outermost = prod(x.shape[:dim]) == 1  # then the ranks' tensors need no copy after the call
        whole = x.new_empty(self.size, *x.shape) if into is None or not is_outermost else into
        work = compat.all_gather_into(whole.view(-1), x.view(-1), self.process_group, overlaps and self.overlaps)
        if is_outermost:
            return Pending(whole.view(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :]), work, sent=x)
        # Parts along an inner dimension lie apart in the answer, so they are put in order after the wait.
        if into is None:
            return Pending(whole, work, lambda ranks: torch.cat(ranks.unbind(0), dim), x)
        parts = into.unflatten(dim, (self.size, -1)).movedim(dim, 0)
        return Pending(whole, work, lambda ranks: (parts.copy_(ranks), into)[1], x)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part along `dim` (a multiple of the size) of the sum over the ranks."""
        return self.start_reduce_scatter(x, dim, overlaps=False).wait()

    @takes("buffers")
    def start_reduce_scatter(
        self, x: Tensor, dim: int = 0, *, overlaps: bool = True, into: Tensor | None = None
    ) -> "Pending":
        """Start a reduce-scatter, into a tensor or a new one. x must not change before wait()."""
        if self.size == 1:
            return Pending(x if into is None else into.copy_(x))
        self.tell_reduce_scatter(x)
        # The call scatters contiguous runs, so pieces along an inner dimension are stacked first.
        copies = prod(x.shape[:dim]) > 1
        pieces = torch.stack(x.chunk(self.size, dim)) if copies else x.contiguous()
        part = into
        # It also writes contiguous memory only. Another target is filled after the wait.
        if part is None or not part.is_contiguous():
            part = x.new_empty(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
        work = compat.reduce_scatter_into(
            part.view(-1), pieces.view(-1), self.process_group, async_op=overlaps and self.overlaps
        )
        return Pending(part, work, None if part is into or into is None else into.copy_, pieces)

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy the first rank's tensor to all ranks in place, and return x."""
        if self.size > 1:
            # Counted as a chain: every rank but the last passes the tensor on.
            self.traffic.tell(self.axis, "broadcast", _bytes(x) if self.index < self.size - 1 else 0)
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange runs of rows (N, ...): sent[r] rows go to rank r, and received[r] rows come from rank r."""
        return self.start_all_to_all(rows, sent, received, overlaps=False).wait()

    @takes("buffers")
    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, overlaps: bool = True,
        into: Tensor | None = None,
    ) -> "Pending":  # fmt: skip
        """Start an all-to-all, into a contiguous tensor or a new one. Rows must not change before wait()."""
        if self.size == 1:
            return Pending(rows if into is None else into.copy_(rows))
        # Rows that stay on this rank are no traffic.
        leaving = sum(sent) - sent[self.index]
        self.traffic.tell(self.axis, "all_to_all", leaving * _bytes(rows) // max(1, len(rows)))
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
        work = dist.all_to_all_single(
            arriving, rows, list(received), list(sent), group=self.process_group, async_op=overlaps and self.overlaps
        )
        return Pending(arriving, work, sent=rows)

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
        """Start to send tensors to ranks of the group, given by index, and to receive from such.

        Return the work to wait for.

        A tensor must stay alive and unchanged until its work is done. Between two ranks, sends and receives are matched
        in the order of the calls.
        """
        # A receive is announced for the watchdog, but its bytes are counted by the sender.
        for _ in receives:
            self.traffic.begin(self.axis, "receive")
        for tensor, _ in sends:
            self.traffic.tell(self.axis, "send", _bytes(tensor))
        work = [dist.P2POp(dist.isend, tensor, self.ranks[index], self.process_group) for tensor, index in sends]
        work += [dist.P2POp(dist.irecv, tensor, self.ranks[index], self.process_group) for tensor, index in receives]
        return dist.batch_isend_irecv(work) if work else []

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        if self.size > 1:
            self.traffic.tell(self.axis, "barrier", 0)
            dist.barrier(group=self.process_group)

    def tell_all_reduce(self, x: Tensor) -> None:
        """Report that a tensor is about to be summed over the ranks."""
        if self.size > 1:
            self.traffic.tell(self.axis, "all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)

    def tell_all_gather(self, part: Tensor) -> None:
        """Report that this rank's part is about to be gathered."""
        if self.size > 1:
            self.traffic.tell(self.axis, "all_gather", (self.size - 1) * _bytes(part))

    def tell_reduce_scatter(self, whole: Tensor) -> None:
        """Report that a tensor is about to be summed and scattered."""
        if self.size > 1:
            self.traffic.tell(self.axis, "reduce_scatter", (self.size - 1) * _bytes(whole) // self.size)


_groups: WeakValueDictionary[int, Group] = WeakValueDictionary()


def find_group(number: int) -> Group:
    """Return the group of this process that has a number. The caller keeps it alive."""
    return _groups[number]


@dataclass(slots=True)
class Pending:
    """A collective under way, or one that has ended (no work)."""

    tensor: Tensor
    work: dist.Work | None = None
    arrange: Callable[[Tensor], Tensor] | None = None
    """Function that turns the received tensor into the answer. None = it is the answer."""
    sent: Tensor | None = None
    """Input of the collective, kept alive until it has ended."""

    @takes("buffers")
    def wait(self) -> Tensor:
        """Wait for the collective and return its answer."""
        if self.work is not None:
            self.work.wait()
        if self.arrange is not None:
            self.tensor = self.arrange(self.tensor)
        # Free the inputs, and let another wait() return the same answer.
        self.sent = self.work = self.arrange = None
        return self.tensor


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone. Gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "NCCL" in str(error))
    )


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


T = TypeVar("T")


class RankZero:
    """Work that rank 0 of the world does for all ranks: it owns the run folder and prints messages."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self.is_here = world.index == 0

    def run(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0 while the others wait. Its errors are raised on every rank; other ranks get None."""
        answer, failure = None, None
        if self.is_here:
            try:
                answer = work()
            except MeshwrightError as error:
                failure = error
        if self.world.size > 1:
            # Success is broadcast too, as None: here is where the other ranks wait for rank 0.
            failure = broadcast_object(0, failure, self.world.process_group)
        if failure is not None:
            # One message is enough: the other ranks exit silently.
            failure.reported_elsewhere = not self.is_here
            raise failure
        return answer

    def run_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on all other ranks, which find the cache that rank 0 wrote."""
        answer = self.run(work)
        return work() if answer is None else answer

    def broadcast(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its answer on every rank: a file system may show others an older state."""
        answer = self.run(work)
        if self.world.size > 1:
            answer = broadcast_object(0, answer, self.world.process_group)
        return answer  # type: ignore[return-value]  # the broadcast leaves no None


def agree(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank. If it fails on some, all raise the first rank's error, so that none hangs later."""
    answer, failure = None, None
    try:
        answer = work()
    except MeshwrightError as error:
        failure = error
    is_alone = not (dist.is_available() and dist.is_initialized())
    # Reached by every rank, with or without an error, since gathering is a collective.
    failures = [error for error in ([failure] if is_alone else gather_objects(failure, group)) if error]
    if failures:
        failures[0].reported_elsewhere |= not is_alone and dist.get_rank(group) > 0
        raise failures[0] from None
    return answer  # type: ignore[return-value]  # without an error, `work` has returned


def check_same(world: Group, what: str, mine: str) -> None:
    """Raise MeshwrightError on every rank when the ranks were started with different texts (a plan, a version)."""
    # The texts are long, so ranks compare digests and only two that differ send theirs.
    digests = gather_objects(digest([mine]), world.process_group) if world.size > 1 else [""]
    differing = next((rank for rank, other in enumerate(digests) if other != digests[0]), None)
    if differing is None:
        return
    first, second = (broadcast_object(rank, mine, world.process_group) for rank in (0, differing))
    lines = zip((first + "\n").splitlines(), (second + "\n").splitlines(), strict=False)
    # Quote the first line that differs. If one text continues the other, quote both ends.
    line, other_line = next(((a, b) for a, b in lines if a != b), (first[-60:], second[-60:]))
    raise MeshwrightError(
        f"rank 0 and rank {differing} disagree about {what}: {line.strip()[:80]!r} and {other_line.strip()[:80]!r}. "
        "Start every rank with the same command and version"
    )


def union_of_names(mine: Iterable[str], group: dist.ProcessGroup | None) -> set[str]:
    """Return the names that any rank has. Ranks with equal names send a digest only, except for one of them."""
    names = sorted(mine)
    digests = gather_objects(digest(names), group)
    return set().union(*(broadcast_object(digests.index(text), names, group) for text in sorted(set(digests))))


def digest(texts: Iterable[str]) -> str:
    """Return a hash of a list of texts."""
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=16).hexdigest()


def gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the objects of all ranks, by rank, on every rank. Bytes grow with the square of the ranks."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def broadcast_object(source: int, mine: T, group: dist.ProcessGroup | None) -> T:
    """Return the object of the rank with index `source` in the group, on every rank."""
    objects = [mine]
    dist.broadcast_object_list(objects, group=group, group_src=source)
    return objects[0]
