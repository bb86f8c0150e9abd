"""torch's process groups: names that every member derives alone, and the methods that all public collectives call."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

_torch: Any = distributed_c10d
_c10d: Any = _distributed_c10d


def create_named_group(
    ranks: Sequence[int], timeout: timedelta | None, purpose: str = "", axis: str = ""
) -> dist.ProcessGroup:
    """Create a group that only its members join, named by purpose and ranks. `axis`: how the flight recorder calls it.

    torch names such a group by a per-process counter and has no public way to set the name. Some ranks belong to more
    groups than others, such as the ends of a pipeline. They would wait for each other under different names. The number
    at the end distinguishes a group from earlier ones of the same ranks.
    """
    key = hashlib.sha1(f"{purpose} {'_'.join(map(str, sorted(ranks)))}".encode(), usedforsecurity=False).hexdigest()
    name = f"{key}_{sum(str(other).startswith(key) for other in _torch._world.pg_names.values())}"
    # Replaced for the one call that asks for a name.
    by_count = _torch._process_group_name
    _torch._process_group_name = lambda *_, **__: name
    try:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=axis or None
        )
    finally:
        _torch._process_group_name = by_count
    return group


def oldest_open_collective() -> tuple[int, str]:
    """Return number and name of the first collective that has not ended, as `all_gather 512 on shard`.

    torch's flight recorder numbers the collectives of a process and knows which have ended, on a GPU, too, behind which
    the host runs ahead. (-1, "") = all that it holds have ended. Takes 40 ms on a CPU, where it reads all entries.
    """
    # No public way leads to it without its files, which torch writes when a collective times out.
    entries: list[dict[str, Any]] = json.loads(_c10d._dump_fr_trace_json(True, True)).get("entries", [])
    # Gloo marks what has ended as retired alone.
    oldest = min((entry for entry in entries if not entry["retired"]), key=itemgetter("record_id"), default=None)
    if oldest is None:
        return -1, ""
    operation = oldest["profiling_name"].rpartition(":")[2].strip("_")
    number = oldest["p2p_seq_id" if oldest["is_p2p"] else "collective_seq_id"]
    group = oldest["process_group"][1].replace("default_pg", "world")
    return oldest["record_id"], f"{operation} {number} on {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """One call of a process group method."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier, send, receive."""
    contributed: Tensor | None = None
    """Tensor that this rank contributes."""
    received_into: Tensor | None = None
    """Tensor that receives the outcome."""
    reduce: str = ""
    peer: int = -1
    """Group rank of the other end of a message, or root of a broadcast."""
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    """Rows to and from each rank. Empty = equal."""


def _reduce(options: Any) -> str:
    operation = getattr(options, "reduceOp", None)
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    matches = [name for name in names if operation == getattr(dist.ReduceOp, name)]
    return matches[0].lower() if matches else "unknown"


def _all_reduce(tensors: Any, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_reduce", contributed=tensors[0], received_into=tensors[0], reduce=_reduce(options))


def _all_gather(out: Tensor, x: Tensor, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_gather", contributed=x, received_into=out)


def _reduce_scatter(out: Tensor, x: Tensor, options: Any = None) -> GroupCall:
    return GroupCall(kind="reduce_scatter", contributed=x, received_into=out, reduce=_reduce(options))


def _all_to_all(out: Tensor, x: Tensor, received: Any, sent: Any, options: Any = None) -> GroupCall:
    return GroupCall(kind="all_to_all", contributed=x, received_into=out, sent=tuple(sent), received=tuple(received))


def _send(tensors: Any, peer: int, tag: int = 0) -> GroupCall:
    return GroupCall(kind="send", contributed=tensors[0], peer=peer)


def _receive(tensors: Any, peer: int, tag: int = 0) -> GroupCall:
    return GroupCall(kind="receive", received_into=tensors[0], peer=peer)


def _broadcast(tensors: Any, options: Any = None) -> GroupCall:
    return GroupCall(
        kind="broadcast", contributed=tensors[0], received_into=tensors[0], peer=int(getattr(options, "rootRank", 0))
    )


_METHODS: dict[str, Callable[..., GroupCall]] = {
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
    "barrier": lambda *_, **__: GroupCall(kind="barrier"),
}
_UNREAD = (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "allreduce_coalesced", "alltoall", "gather", "recv_anysource", "reduce", "reduce_scatter", "scatter",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


def group_methods() -> dict[str, Any]:
    """Return {method that starts a collective: function that reads its arguments}.

    All functions of torch.distributed and fully_shard end in these methods. torch 2.13 renamed some and has no list.
    """
    unread = dict.fromkeys(_UNREAD, lambda *_, **__: GroupCall(kind="unknown"))
    return {name: read for name, read in {**_METHODS, **unread}.items() if hasattr(dist.ProcessGroup, name)}


def list_groups() -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, ranks) of this process's groups in order of creation. Ranks meet under these names."""
    world = dist.distributed_c10d._world
    return [(name, tuple(dist.get_process_group_ranks(group))) for group, name in world.pg_names.items()]


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name under which the ranks of a group meet."""
    return str(group.group_name)


def is_collective_operation(operation: Any) -> bool:
    """Return whether a dispatcher operation is a process group's."""
    return str(getattr(operation, "namespace", "")) == "c10d"


@dataclass(frozen=True, slots=True)
class Launch:
    """Effect of an operation on memory, by its schema: positions and names of the arguments that it writes."""

    computes: bool
    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


_EMPTY = ("empty", "new_empty", "set_", "resize_", "_resize_output_", "detach", "lift_fresh", "alias", "device")
_NOTHING = Launch(False)


def launch_of(operation: Any) -> Launch:
    """Return whether a dispatcher operation runs a kernel, and which arguments it writes.

    Views and allocations run none. torch prints schemas but has no public query for them.
    """
    schema = getattr(operation, "_schema", None)
    if schema is None or getattr(operation, "namespace", "") in ("c10d", "prim", "profiler"):
        return _NOTHING
    # Schemas do not tell an allocation from a computation, but names do.
    name = str(schema.name).rsplit("::", 1)[-1]
    if name.startswith(_EMPTY):
        return _NOTHING
    written = [
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    names = frozenset(schema.arguments[i].name for i in written)
    # An output that aliases an input without writing it is a view, for which no kernel runs.
    views = [argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.returns]
    if not written and (not views or all(views)):
        return _NOTHING
    return Launch(True, frozenset(written), names)
