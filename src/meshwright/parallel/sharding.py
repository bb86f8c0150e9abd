"""The collectives that fully_shard makes itself, told to the groups they are made in.

fully_shard takes objects that gather parameters and scatter gradients (set_custom_all_gather and
set_custom_reduce_scatter): anything callable that can also allocate; the classes that name this have no public name.
These do what its own do, and count. The all-reduce between replicas is heard of only once it has begun, by its hook.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright import compat
from meshwright.parallel.group import Group
from meshwright.spec.purpose import takes


def tell(module: nn.Module, replicas: Group, shards: Group) -> None:
    """Have every collective of a sharded module told to the traffic of the two groups that its mesh was made of."""
    assert isinstance(module, FSDPModule)
    module.set_custom_all_gather(_ShardGather(shards))  # type: ignore[arg-type]  # the protocol, structurally
    module.set_custom_reduce_scatter(_Scatter(shards))  # type: ignore[arg-type]  # the protocol, structurally
    if replicas.size > 1:
        module.set_all_reduce_hook(replicas.tell_all_reduce)


class _Allocates:
    """What fully_shard asks of both: where a buffer comes from."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @takes("buffers")
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ShardGather(_Allocates):
    """All shards of a module's parameters in one buffer."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.group.tell_all_gather(input_tensor)
        return compat.all_gather_into(output_tensor, input_tensor, group, async_op)


class _Scatter(_Allocates):
    """The sum of a module's gradients, a shard for each rank."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.group.tell_reduce_scatter(input_tensor)
        return compat.reduce_scatter_into(output_tensor, input_tensor, group, op, async_op)
