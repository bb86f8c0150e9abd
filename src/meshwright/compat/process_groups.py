"""Methods of torch's process groups, below every public collective: private names, each with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """One call of a method of a process group, as its arguments say it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier, send, receive."""
    given: Tensor | None = None
    """What this rank contributes."""
    taken: Tensor | None = None
    """Where the result goes."""
    reduce: str = ""
    peer: int = -1
    """Place of a message's other end in the group; root of a broadcast."""
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    """Rows for and from each rank; empty = equal."""


def _reduce(options: Any) -> str:
    operation = getattr(options, "reduceOp", None)
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    found = [name for name in names if operation == getattr(dist.ReduceOp, name)]
    return found[0].lower() if found else "unknown"


def _all_reduce(tensors: Any, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_reduce", given=tensors[0], taken=tensors[0], reduce=_reduce(options))


def _all_gather(out: Tensor, x: Tensor, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_gather", given=x, taken=out)


def _reduce_scatter(out: Tensor, x: Tensor, options: Any = None) -> GroupCall:
    return GroupCall(kind="reduce_scatter", given=x, taken=out, reduce=_reduce(options))


def _all_to_all(out: Tensor, x: Tensor, received: Any, sent: Any, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_to_all", given=x, taken=out, sent=tuple(sent), received=tuple(received))


def _send(tensors: Any, peer: int, tag: int = 0) -> GroupCall:
    return GroupCall(kind="send", given=tensors[0], peer=peer)


def _receive(tensors: Any, peer: int, tag: int = 0) -> GroupCall:
    return GroupCall(kind="receive", taken=tensors[0], peer=peer)


def _broadcast(tensors: Any, options: Any = None) -> GroupCall:
    return GroupCall(kind="broadcast", given=tensors[0], taken=tensors[0], peer=int(getattr(options, "rootRank", 0)))


def _barrier(options: Any = None, **named: Any) -> GroupCall:
    return GroupCall(kind="barrier")


_METHODS = {
    "allreduce": _all_reduce,
    "_allgather_base": _all_gather,
    "all_gather_single": _all_gather,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
    "send": _send,
    "recv": _receive,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
_UNREAD = (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "allreduce_coalesced", "alltoall", "gather", "recv_anysource", "reduce", "reduce_scatter", "scatter",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


def _unread(*given: Any, **named: Any) -> GroupCall:
    return GroupCall(kind="unknown")


def group_methods() -> dict[str, Any]:
    """Name of each method by which collectives are started -> what reads its arguments. All public functions of
    torch.distributed, and fully_shard, end there; torch 2.13 renamed some of them and has no list."""
    every = {**_METHODS, **dict.fromkeys(_UNREAD, _unread)}
    return {name: read for name, read in every.items() if hasattr(dist.ProcessGroup, name)}


def groups_made() -> list[tuple[str, tuple[int, ...]]]:
    """(name, ranks) of this process's groups as they were made. Names are what ranks meet under; torch lists them in
    its private world only."""
    world = dist.distributed_c10d._world
    return [(name, tuple(dist.get_process_group_ranks(group))) for group, name in world.pg_names.items()]


def group_name(group: dist.ProcessGroup) -> str:
    """Its name there."""
    return str(group.group_name)


def is_collective_operation(operation: Any) -> bool:
    """Whether the dispatcher's operation is one of a process group's."""
    return str(getattr(operation, "namespace", "")) == "c10d"


@dataclass(frozen=True, slots=True)
class Launch:
    """What an operation does with memory, by its schema: positions and names of the arguments that it writes."""

    computes: bool
    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


_EMPTY = ("empty", "new_empty", "set_", "resize_", "_resize_output_", "detach", "lift_fresh", "alias", "device")
_NOTHING = Launch(False)


def launch_of(operation: Any) -> Launch:
    """Whether an operation of the dispatcher runs a kernel, and what that writes. Views and allocations run none. torch
    prints schemas; to ask them has no public name."""
    schema = getattr(operation, "_schema", None)
    if schema is None or getattr(operation, "namespace", "") in ("c10d", "prim", "profiler"):
        return _NOTHING
    name = str(schema.name).rsplit("::", 1)[-1]
    if name.startswith(_EMPTY):
        return _NOTHING
    written = [i for i, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
    names = frozenset(schema.arguments[i].name for i in written)
    views = [one.alias_info is not None and not one.alias_info.is_write for one in schema.returns]
    if not written and (not views or all(views)):
        return _NOTHING
    return Launch(True, frozenset(written), names)
