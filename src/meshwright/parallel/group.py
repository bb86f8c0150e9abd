"""A group of ranks along one mesh axis, and the collectives it has.

A group of one rank computes what a collective would give and touches no network, so that code above asks for no degree.
Every collective that the engine calls goes through here and is told to `traffic`, before it begins, with the bytes
that this rank sends; those that fully_shard makes itself are told by what sharding.py gives it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import prod
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import compat
from meshwright.parallel.traffic import Traffic
from meshwright.spec.purpose import takes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Group:
    """`ranks` are numbers in the world, in the order of the axis; `index` is this rank's place among them."""

    axis: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    process_group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    number: int = field(init=False, default_factory=partial(next, count()))
    """What operators of compiled code call the group by (`numbered`): they take tensors and plain numbers only."""

    def __post_init__(self) -> None:
        _numbered[self.number] = self

    @property
    def size(self) -> int:
        """Number of ranks: the degree of the axis."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum or maximum over the ranks, in place; gives x."""
        if self.size > 1:
            self.tell_all_reduce(x)
            dist.all_reduce(x, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=self.process_group)
        return x

    def start_all_reduce(self, x: Tensor) -> "Pending":
        """A sum in place that goes on while the caller does; x must not be read or changed before wait()."""
        if self.size == 1:
            return Pending(x)
        self.tell_all_reduce(x)
        return Pending(x, dist.all_reduce(x, group=self.process_group, async_op=True))

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors of equal shape, one after another along `dim`."""
        return self.start_all_gather(x, dim, goes_on=False).wait()

    @takes("buffers")
    def start_all_gather(
        self, x: Tensor, dim: int = 0, *, goes_on: bool = True, into: Tensor | None = None
    ) -> "Pending":
        """The same while the caller goes on; x must not be changed before wait(). `into`: where the result is put."""
        if self.size == 1:
            return Pending(x if into is None else into.copy_(x))
        self.tell_all_gather(x)
        x = x.contiguous()
        lies_so = prod(x.shape[:dim]) == 1  # in memory as it should: no copy
        whole = x.new_empty(self.size, *x.shape) if into is None or not lies_so else into
        work = compat.all_gather_into(whole.view(-1), x.view(-1), self.process_group, goes_on)
        if lies_so:
            return Pending(whole.view(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :]), work, sent=x)
        if into is None:
            return Pending(whole, work, lambda found: torch.cat(found.unbind(0), dim), x)
        parts = into.unflatten(dim, (self.size, -1)).movedim(dim, 0)
        return Pending(whole, work, lambda found: (parts.copy_(found), into)[1], x)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along `dim` (a multiple of the size) of the sum over the ranks."""
        return self.start_reduce_scatter(x, dim, goes_on=False).wait()

    @takes("buffers")
    def start_reduce_scatter(
        self, x: Tensor, dim: int = 0, *, goes_on: bool = True, into: Tensor | None = None
    ) -> "Pending":
        """The same while the caller goes on; x must not be changed before wait(). `into`: where the result is put."""
        if self.size == 1:
            return Pending(x if into is None else into.copy_(x))
        self.tell_reduce_scatter(x)
        copies = prod(x.shape[:dim]) > 1
        pieces = torch.stack(x.chunk(self.size, dim)) if copies else x.contiguous()
        part = into
        if part is None or not part.is_contiguous():
            part = x.new_empty(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
        work = compat.reduce_scatter_into(part.view(-1), pieces.view(-1), self.process_group, async_op=goes_on)
        return Pending(part, work, None if part is into or into is None else into.copy_, pieces)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor on all ranks, in place; gives x."""
        if self.size > 1:
            self.traffic.tell(self.axis, "broadcast", _bytes(x) if self.index < self.size - 1 else 0)
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """rows (N, ...) in runs of sent[r] for rank r -> the runs that the ranks sent here, received[r] from rank r."""
        return self.start_all_to_all(rows, sent, received, goes_on=False).wait()

    @takes("buffers")
    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, goes_on: bool = True,
        into: Tensor | None = None,
    ) -> "Pending":  # fmt: skip
        """The same while the caller goes on; rows must not be changed before wait(). `into`: where the result is put,
        contiguous."""
        if self.size == 1:
            return Pending(rows if into is None else into.copy_(rows))
        leaving = sum(sent) - sent[self.index]
        self.traffic.tell(self.axis, "all_to_all", leaving * _bytes(rows) // max(1, len(rows)))
        rows = rows.contiguous()
        found = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
        work = dist.all_to_all_single(
            found, rows, list(received), list(sent), group=self.process_group, async_op=goes_on
        )
        return Pending(found, work, sent=rows)

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
        """Start to send tensors to places and to receive from places of the group; wait() on what it gives.

        A tensor must stay alive and unchanged until its work is waited for. Between two ranks, sends and receives meet
        in the order in which they are given.
        """
        for _ in receives:
            self.traffic.begin(self.axis, "receive")
        for tensor, _ in sends:
            self.traffic.tell(self.axis, "send", _bytes(tensor))
        work = [dist.P2POp(dist.isend, tensor, self.ranks[place], self.process_group) for tensor, place in sends]
        work += [dist.P2POp(dist.irecv, tensor, self.ranks[place], self.process_group) for tensor, place in receives]
        return dist.batch_isend_irecv(work) if work else []

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        if self.size > 1:
            self.traffic.tell(self.axis, "barrier", 0)
            dist.barrier(group=self.process_group)

    def tell_all_reduce(self, x: Tensor) -> None:
        """Of a tensor that is about to be summed over the ranks."""
        if self.size > 1:
            self.traffic.tell(self.axis, "all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)

    def tell_all_gather(self, part: Tensor) -> None:
        """Of this rank's part of what is about to be gathered."""
        if self.size > 1:
            self.traffic.tell(self.axis, "all_gather", (self.size - 1) * _bytes(part))

    def tell_reduce_scatter(self, whole: Tensor) -> None:
        """Of a tensor that is about to be summed and scattered."""
        if self.size > 1:
            self.traffic.tell(self.axis, "reduce_scatter", (self.size - 1) * _bytes(whole) // self.size)


_numbered: WeakValueDictionary[int, Group] = WeakValueDictionary()


def numbered(number: int) -> Group:
    """The group of this process that has a number; what uses it keeps it alive."""
    return _numbered[number]


@dataclass(slots=True)
class Pending:
    """A collective under way, or one that has ended (no work)."""

    tensor: Tensor
    work: dist.Work | None = None
    made_of: Callable[[Tensor], Tensor] | None = None
    """What makes the result of the tensor that was waited for."""
    sent: Tensor | None = None
    """What the collective reads until it has ended."""

    @takes("buffers")
    def wait(self) -> Tensor:
        """The result, once it is there."""
        if self.work is not None:
            self.work.wait()
        if self.made_of is not None:
            self.tensor = self.made_of(self.tensor)
        self.sent = self.work = self.made_of = None
        return self.tensor


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
