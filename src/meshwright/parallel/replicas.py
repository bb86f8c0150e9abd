"""ZeRO-0: every rank holds every parameter, and gradients are summed over the ranks once a step.

A bucket is a block; embedding, and norm with head, are one each. Without a pipeline, whose ranks hold several models,
small neighbours are one bucket (spec/gradient_buckets.py). Micro-batches are added up in one buffer for each, of
which the gradients are views. When the backward pass of the last one has made the last gradient of a bucket, its
all-reduce begins, in place, while the backward pass goes on with the blocks before (Li et al. 2020, arXiv:2006.15704).
Of a step's only micro-batch gradients stay as they are made until a bucket has all, and are widened as they are laid
into the buffer: a buffer from the first gradient on would stand beside the activations of the block.

A rank holds 4 N elements in fp32 (parameters, gradients, two moments), and of one micro-batch a bucket more, where
DistributedDataParallel's buckets are a fifth N. Sums are taken in fp32, or in the parameters' dtype.

Buckets start in their order, each after the ones before it: one order on all ranks of a group, whose parts are alike.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.gradient_sums import GradientSum
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.moe import MoE
from meshwright.parallel.data import meeting
from meshwright.parallel.group import Group, Pending
from meshwright.parallel.mesh import Mesh
from meshwright.spec.gradient_buckets import bucket_counts
from meshwright.spec.purpose import takes


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are summed over `group` in one call."""

    parameters: Sequence[nn.Parameter]
    group: Group
    dtype: torch.dtype
    """Of the sum."""
    made_here: int
    """Gradients that a pass makes of them on this rank: none of biases that another tp rank adds, two of a matrix that
    both ends share."""
    missing: int = 0
    """Gradients that the last backward pass of the step has not made yet."""
    pending: Pending | None = None
    buffer: Tensor | None = None
    """Of this step. CUDA graphs lay one that stays where it is (parallel/pass_graphs.py)."""
    _cut: tuple[Tensor, list[Tensor]] | None = None
    """A buffer and its parts: to cut it for each of hundreds of parameters takes longer than the sum."""
    _recent: int = 0
    """The parameter that got a place last."""

    def place(self, index: int) -> Tensor:
        """Of a parameter's sum, in the buffer of this step."""
        if self.buffer is None or self.parameters[self._recent].grad is None:
            self._allocate()
        self._recent = index
        return self._parts()[index]

    def _allocate(self) -> None:
        size = sum(one.numel() for one in self.parameters)
        self.buffer = torch.empty(size, dtype=self.dtype, device=self.parameters[0].device)

    def _parts(self) -> list[Tensor]:
        assert self.buffer is not None
        if self._cut is None or self._cut[0] is not self.buffer:
            parts = self.buffer.split([one.numel() for one in self.parameters])
            views = [part.view_as(one) for part, one in zip(parts, self.parameters, strict=True)]
            self._cut = self.buffer, views
        return self._cut[1]

    def __post_init__(self) -> None:
        self.missing = self.made_here

    @takes("buffers")
    def start(self) -> None:
        """Begin the sum. A parameter without a gradient takes part with zeros, and gets the sum like the others."""
        if self.buffer is None:
            self._allocate()
        assert self.buffer is not None
        here, laid = compat.storage_key(self.buffer.untyped_storage()), []
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif compat.storage_key(parameter.grad.untyped_storage()) != here:
                laid.append((part, parameter.grad))
            parameter.grad = part
        if laid:
            compat.copy_each(*map(list, zip(*laid, strict=True)))
        self.pending, self.buffer, self._cut = self.group.start_all_reduce(self.buffer), None, None

    def finish(self) -> None:
        """Wait for the sum."""
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.missing = None, self.made_here


class Replicas:
    """The buckets of one model (a pipeline stage), in the order of the backward pass."""

    def __init__(self, buckets: Iterable[Bucket], meeting: Container[Tensor] = ()) -> None:
        self.buckets = list(buckets)
        self.meeting = meeting
        self.expecting = self.only = False
        self.started = 0
        self.sums = [
            GradientSum(
                one, bucket.dtype, partial(self.place, bucket, index), partial(self.made, number), meets=one in meeting
            )
            for number, bucket in enumerate(self.buckets)
            for index, one in enumerate(bucket.parameters)
        ]

    def expect(self, *, last: bool, only: bool = False) -> None:
        """Before a micro-batch's backward pass; that of the `last` one of the step starts the sums. `only`: there is no
        other."""
        self.expecting, self.only = last, only

    def place(self, bucket: Bucket, index: int) -> Tensor | None:
        """Of a parameter's first gradient of a step."""
        lone = bucket.parameters[index] not in self.meeting
        return None if self.only and lone else bucket.place(index)

    def start(self) -> None:
        """Start what has not been started: after the last backward pass, or where weight gradients came apart."""
        self.expecting = False
        for bucket in self.buckets[self.started :]:
            bucket.start()
        self.started = len(self.buckets)

    def finish(self) -> None:
        """Wait for all sums; gradients are those of all ranks then."""
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0

    def made(self, place: int) -> None:
        """A gradient of this bucket is there."""
        if not self.expecting:
            return
        self.buckets[place].missing -= 1
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self.buckets[self.started].start()
            self.started += 1


def replicate(stages: Iterable[Transformer], mesh: Mesh, dtype: torch.dtype | None = None) -> tuple[Replicas, ...]:
    """Sum the gradients of each stage over the ranks that hold the same parameters, in `dtype` (None = theirs). No two
    stages of a rank have one in common: spec.legal refuses that beside data parallelism."""
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
    idle = {module.bias for module in model.modules() if isinstance(module, Linear) and not module.adds_bias}
    times: dict[Tensor | None, int] = {**dict.fromkeys(meeting(model), 2), **dict.fromkeys(idle, 0)}
    units = [[p for p in unit if p.requires_grad] for unit in [last, *reversed(blocks), ends]]
    merge = mesh["pp"].size == 1
    found = [
        *_together([[p for p in unit if p not in experts] for unit in units], dtype, merge, mesh["data"]),
        *_together([[p for p in unit if p in experts] for unit in units], dtype, merge, mesh["expert_data"]),
    ]
    buckets = []
    for _, some, group in sorted(found, key=lambda one: one[0]):  # by the unit whose gradients are made last
        buckets += _buckets(some, group, dtype, times)
    return Replicas(buckets, meeting(model))


def _together(
    units: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype | None, merge: bool, group: Group
) -> Iterator[tuple[int, list[nn.Parameter], Group]]:
    """(place of the last unit, parameters) of each bucket."""
    places = [place for place, unit in enumerate(units) if unit]
    sizes = (sum(p.numel() * (dtype or p.dtype).itemsize for p in units[place]) for place in places)
    for count in bucket_counts(sizes) if merge else [1] * len(places):
        here, places = places[:count], places[count:]
        yield here[-1], [p for place in here for p in units[place]], group


def _buckets(
    parameters: Sequence[nn.Parameter],
    group: Group,
    dtype: torch.dtype | None,
    times: Mapping[Tensor | None, int],
) -> list[Bucket]:
    """One for each dtype; none where there is nobody to sum with. `times`: gradients of a parameter in a pass, if not
    one."""
    if group.size == 1:
        return []
    dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
    held = [[p for p in parameters if p.dtype == dtype] for dtype in dtypes]
    return [
        Bucket(some, group, dtype or own, sum(times.get(p, 1) for p in some))
        for own, some in zip(dtypes, held, strict=True)
    ]
