"""An independent count of what is sent: a dispatch mode that sees every operation of torch's process groups."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Seen = dict[tuple[tuple[int, ...], str], list[int]]
"""(ranks of the group, collective) -> [calls, bytes that this rank sends]."""

SENDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "send": "send",
}
IGNORED = {"recv_"}
"""Counted at the sender."""


class TrafficRecorder(TorchDispatchMode):
    """Within, all that this thread sends; backward passes on a CPU run in the thread that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "c10d":
            name = operation.overloadpacket.__name__
            assert name in SENDS or name in IGNORED, f"the recorder does not know c10d.{name}"
            if name in SENDS:
                self._see(name, args)
        return operation(*args, **(kwargs or {}))

    def _see(self, name: str, args: tuple[Any, ...]) -> None:
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        group = dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        count = self.seen.setdefault((ranks, SENDS[name]), [0, 0])
        count[0] += 1
        count[1] += _sent(name, args, len(ranks), group.rank())


def _sent(name: str, args: tuple[Any, ...], size: int, index: int) -> int:
    """Bytes that leave this rank when the collective goes round a ring."""
    if name == "allreduce_":  # every element leaves twice, but for the rank's own n-th
        return sum(2 * _bytes(x) * (size - 1) // size for x in args[0])
    if name == "_allgather_base_":
        whole, _ = args[:2]
        return _bytes(whole) * (size - 1) // size
    if name == "_reduce_scatter_base_":
        _, whole = args[:2]
        return _bytes(whole) * (size - 1) // size
    if name == "alltoall_base_":
        _, rows, _, _, splits = args[:5]
        return sum(_bytes(part) for number, part in enumerate(rows.split(list(splits))) if number != index)
    if name == "broadcast_":
        return sum(map(_bytes, args[0])) if args[2] == index else 0
    return sum(map(_bytes, args[0])) if name == "send" else 0


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
