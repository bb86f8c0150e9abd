"""ZeRO-0: every rank holds every parameter, and gradients are summed over the ranks once a step.

A bucket is a block; embedding, and norm with head, are one each. Without a pipeline small neighbours form one bucket
(spec/memory/buffers.py); with one, a rank holds several models. Micro-batches are added up in one buffer for
each bucket, of which the gradients are views. When the last backward pass has made the last gradient of a bucket, its
all-reduce begins, in place, while the backward pass goes on (Li et al. 2020, arXiv:2006.15704).

If a step has only one micro-batch, gradients stay as they are made until a bucket has all. Then they are copied into
the buffer and widened. A buffer from the first gradient on would take memory beside the activations of the block.

A rank holds 4 N elements in fp32 (parameters, gradients, two moments), and with one micro-batch a bucket more, where
DistributedDataParallel's buckets are a fifth of N. Sums are taken in fp32, or in the parameters' dtype.

Buckets start in their order, each after the ones before it. So the order is one on all ranks of a group, which hold the
same parts of the model.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.linear.gradient_sums import GradientSum
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.moe import MoE
from meshwright.parallel.groups.group import Group, Pending
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.zero.data import doubly_used
from meshwright.spec.memory.buffers import bucket_counts
from meshwright.spec.memory.held import takes


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are summed over `group` in one call."""

    parameters: Sequence[nn.Parameter]
    group: Group
    dtype: torch.dtype
    """The dtype of the sum."""
    gradients: int
    """Number of gradients that a pass makes: none of another rank's bias, two of a matrix that both ends share."""
    missing: int = 0
    """Gradients that the last backward pass of the step has not made yet."""
    pending: Pending | None = None
    buffer: Tensor | None = None
    """The buffer of this step. CUDA graphs provide one with a fixed address (parallel/graphs/pass_graphs.py)."""
    _cut: tuple[Tensor, list[Tensor]] | None = None
    """A buffer and its parts: cutting it once for each of hundreds of parameters would take longer than the sum."""
    _recent: int = 0
    """Index of the parameter that got its part last."""

    def part(self, index: int) -> Tensor:
        """Return a parameter's part of the buffer of this step."""
        # A gradient that is gone was detached after the last step, so this step needs a new buffer.
        if self.buffer is None or self.parameters[self._recent].grad is None:
            self._allocate()
        self._recent = index
        return self._parts()[index]

    def _allocate(self) -> None:
        size = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = torch.empty(size, dtype=self.dtype, device=self.parameters[0].device)

    def _parts(self) -> list[Tensor]:
        assert self.buffer is not None
        if self._cut is None or self._cut[0] is not self.buffer:
            parts = self.buffer.split([parameter.numel() for parameter in self.parameters])
            views = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
            self._cut = self.buffer, views
        return self._cut[1]

    def __post_init__(self) -> None:
        self.missing = self.gradients

    @takes("buffers")
    def start(self) -> None:
        """Start the sum. A parameter without a gradient adds zeros and gets the sum like the others."""
        if self.buffer is None:
            self._allocate()
        assert self.buffer is not None
        # In a step of one micro-batch gradients lie where autograd made them: gather them in one call.
        own_key, copies = compat.storage_key(self.buffer.untyped_storage()), []
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif compat.storage_key(parameter.grad.untyped_storage()) != own_key:
                copies.append((part, parameter.grad))
            parameter.grad = part
        if copies:
            compat.copy_each(*map(list, zip(*copies, strict=True)))
        self.pending, self.buffer, self._cut = self.group.start_all_reduce(self.buffer), None, None

    def finish(self) -> None:
        """Wait for the sum."""
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.missing = None, self.gradients


class Replicas:
    """The buckets of one model (a pipeline stage), in the order of the backward pass."""

    def __init__(self, buckets: Iterable[Bucket], meeting: Container[Tensor] = ()) -> None:
        self.buckets = list(buckets)
        self.meeting = meeting
        self.expecting = self.only = False
        self.started = 0
        self.sums = [
            GradientSum(
                parameter,
                bucket.dtype,
                partial(self.allocate, bucket, index),
                partial(self.note_gradient, number),
                meets=parameter in meeting,
            )
            for number, bucket in enumerate(self.buckets)
            for index, parameter in enumerate(bucket.parameters)
        ]

    def expect(self, *, last: bool, only: bool = False) -> None:
        """Prepare for a micro-batch's backward pass. The `last` one starts the sums. `only`: there is no other."""
        self.expecting, self.only = last, only

    def allocate(self, bucket: Bucket, index: int) -> Tensor | None:
        """Return memory for a parameter's first gradient of a step. None = it stays as it is made."""
        lone = bucket.parameters[index] not in self.meeting
        return None if self.only and lone else bucket.part(index)

    def start(self) -> None:
        """Start the remaining sums: after the last backward pass, or after weight gradients that are made apart."""
        self.expecting = False
        for bucket in self.buckets[self.started :]:
            bucket.start()
        self.started = len(self.buckets)

    def finish(self) -> None:
        """Wait for all sums. Gradients are then those of all ranks."""
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0

    def note_gradient(self, number: int) -> None:
        """Note that a gradient of a bucket is made."""
        if not self.expecting:
            return
        self.buckets[number].missing -= 1
        # A complete bucket waits for those before it, so that all ranks call their collectives in one order.
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self.buckets[self.started].start()
            self.started += 1


def replicate(stages: Iterable[Transformer], mesh: Mesh, dtype: torch.dtype | None = None) -> tuple[Replicas, ...]:
    """Set up the sums of the gradients of each stage over ranks with the same parameters, in `dtype` (None = theirs).

    No two stages of a rank share a parameter: a plan refuses that beside data parallelism.
    """
    return tuple(_replicate(stage, mesh, dtype) for stage in stages)


def _replicate(model: Transformer, mesh: Mesh, dtype: torch.dtype | None) -> Replicas:
    experts = {
        parameter
        for block in model.blocks
        if block.routed and mesh["ep"].size > 1
        for parameter in cast(MoE, block.mlp).experts.parameters()
    }
    blocks = [list(block.parameters()) for block in model.layers.values()]
    inside = {parameter for block in blocks for parameter in block}
    ends = [p for name, p in model.named_parameters() if p not in inside and name.startswith(("embed.", "positions."))]
    last = [p for p in model.parameters() if p not in inside and p not in set(ends)]
    # Biases that another tp rank adds get no gradient here, and a tied matrix gets two.
    idle = {module.bias for module in model.modules() if isinstance(module, Linear) and not module.adds_bias}
    times: dict[Tensor | None, int] = {**dict.fromkeys(doubly_used(model), 2), **dict.fromkeys(idle, 0)}
    # The backward pass makes gradients in this order.
    units = [[p for p in unit if p.requires_grad] for unit in [last, *reversed(blocks), ends]]
    merge = mesh["pp"].size == 1
    # Experts are summed over fewer ranks than the rest, so they have buckets of their own.
    grouped = [
        *_merge_units([[p for p in unit if p not in experts] for unit in units], dtype, merge, mesh["data"]),
        *_merge_units([[p for p in unit if p in experts] for unit in units], dtype, merge, mesh["expert_data"]),
    ]
    buckets = []
    # A bucket is complete with the unit whose gradients are made last, so buckets start in that order.
    for _, parameters, group in sorted(grouped, key=lambda entry: entry[0]):
        buckets += _make_buckets(parameters, group, dtype, times)
    return Replicas(buckets, doubly_used(model))


def _merge_units(
    units: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype | None, merge: bool, group: Group
) -> Iterator[tuple[int, list[nn.Parameter], Group]]:
    """Yield (number of the last unit, parameters, group) of each bucket."""
    numbers = [number for number, unit in enumerate(units) if unit]
    sizes = (sum(p.numel() * (dtype or p.dtype).itemsize for p in units[number]) for number in numbers)
    for count in bucket_counts(sizes) if merge else [1] * len(numbers):
        merged, numbers = numbers[:count], numbers[count:]
        yield merged[-1], [p for number in merged for p in units[number]], group


def _make_buckets(
    parameters: Sequence[nn.Parameter],
    group: Group,
    dtype: torch.dtype | None,
    times: Mapping[Tensor | None, int],
) -> list[Bucket]:
    """Return one bucket for each dtype, none in a group of one rank. `times`: number of gradients, if not 1."""
    if group.size == 1:
        return []
    dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
    held = [[p for p in parameters if p.dtype == dtype] for dtype in dtypes]
    return [
        Bucket(same_dtype, group, dtype or stored, sum(times.get(p, 1) for p in same_dtype))
        for stored, same_dtype in zip(dtypes, held, strict=True)
    ]
