"""ZeRO-0: every rank holds every parameter, and gradients are summed over the ranks once a step.

A bucket is a block; embedding, and norm with head, are one each. When the backward pass of the last micro-batch has
made the last gradient of a bucket, they are laid into one buffer whose all-reduce runs while the backward pass goes on
with the blocks before (Li et al. 2020, arXiv:2006.15704). From then on the gradients are views of that buffer: nothing
is copied back, and only the bucket that is being laid exists twice. A rank holds 4 N elements in fp32 (parameters,
gradients, two moments) and a block, where DistributedDataParallel's buckets are a fifth N. Sums are taken in the dtype
that the gradients have (`data.widen_gradients`).

Buckets start in one order on every rank, each after the ones before it.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast
from weakref import ref

import torch
from torch import Tensor, nn

from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.moe import MoE
from meshwright.parallel.group import Group, Pending
from meshwright.parallel.mesh import Mesh
from meshwright.spec.purpose import takes


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are summed over `group` in one call."""

    parameters: Sequence[nn.Parameter]
    group: Group
    made_here: int
    """How many of them get a gradient on this rank: biases that another tp rank adds do not."""
    missing: int = 0
    """Gradients that the last backward pass of the step has not made yet."""
    pending: Pending | None = None
    laid: Tensor | None = None
    """All gradients, where they lie in one buffer from the beginning (parallel/pass_graphs.py)."""

    def __post_init__(self) -> None:
        self.missing = self.made_here

    @takes("buffers")
    def start(self) -> None:
        """Begin the sum. A parameter without a gradient takes part with zeros, and gets the sum like the others."""
        if self.laid is not None:
            self.pending = self.group.start_all_reduce(self.laid)
            return
        gradients = [torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.pending = self.group.start_all_reduce(flat)

    def finish(self) -> None:
        """Wait for the sum."""
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.missing = None, self.made_here


class Replicas:
    """The buckets of one model (a pipeline stage), in the order of the backward pass. `overlaps`: sums start while the
    last backward pass goes on; else behind it, and no parameter has a hook."""

    def __init__(self, buckets: Iterable[Bucket], *, overlaps: bool = True) -> None:
        self.buckets = list(buckets)
        self.expecting = False
        self.started = 0
        own = ref(self)  # a parameter's hooks are out of the garbage collector's sight: no circle may go through them
        for place, bucket in enumerate(self.buckets if overlaps else ()):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(_made, own, place))

    def expect(self, *, last: bool) -> None:
        """Before a micro-batch's backward pass; that of the `last` one of the step starts the sums."""
        self.expecting = last

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


def _made(own: "ref[Replicas]", place: int, parameter: Tensor) -> None:
    if (replicas := own()) is not None:
        replicas.made(place)


def replicate(stages: Iterable[Transformer], mesh: Mesh) -> tuple[Replicas, ...]:
    """Sum the gradients of each stage over the ranks that hold the same parameters. No two stages of a rank have one in
    common: spec.legal refuses that beside data parallelism."""
    return tuple(_replicate(stage, mesh) for stage in stages)


def _replicate(model: Transformer, mesh: Mesh) -> Replicas:
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
    buckets = []
    for parameters in [last, *reversed(blocks), ends]:
        some = [p for p in parameters if p.requires_grad]
        buckets += _buckets([p for p in some if p not in experts], mesh["data"], idle)
        buckets += _buckets([p for p in some if p in experts], mesh["expert_data"], idle)
    return Replicas(buckets, overlaps=mesh.layout.cuda_graphs == "off")


def _buckets(parameters: Sequence[nn.Parameter], group: Group, idle: Container[nn.Parameter | None]) -> list[Bucket]:
    """One for each dtype; none where there is nobody to sum with."""
    if group.size == 1:
        return []
    dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
    held = [[p for p in parameters if p.dtype == dtype] for dtype in dtypes]
    return [Bucket(some, group, sum(p not in idle for p in some)) for some in held]
