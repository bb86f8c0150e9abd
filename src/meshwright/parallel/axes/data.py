"""Data parallelism and ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 1 to 3 as settings of torch's fully_shard.

    zero  parameters           gradients                                optimizer states
    0     whole                whole; all-reduced once a step           whole
    1     whole in the step    whole until the last micro-batch         1 / n
    2     whole in the step    1 / n after every micro-batch            1 / n
    3     1 / n, a block at a time whole                                1 / n

n = dp_shard x cp: context-parallel ranks see other tokens with the same parameters. Replicas (dp_replicate) sum their
shards once a step. Gradients are in buckets of one block each. They are summed, never averaged: the loss was divided by
the tokens of the whole step. Stage 0 has its own code, `Replicas`: fully_shard over one rank would hold every parameter
twice.

Gradients are summed over micro-batches and ranks in `reduce_dtype` (decision 5): a parameter's `grad` has this dtype
from its first micro-batch to the optimizer. torch's mixed precision alone would round every reduction to the dtype of
the shards, and add micro-batches up in that dtype.

The collectives of fully_shard are replaced by ones that do the same and report to the group's traffic. The all-reduce
between replicas is reported by a hook, once it has begun.

Stage 0 holds every parameter, and sums gradients over the ranks once a step.
A bucket is a block; embedding, and norm with head, are one each. Without a pipeline small neighbours form one bucket
(spec/memory/held.py); with one, a rank holds several models. Micro-batches are added up in one buffer for
each bucket, of which the gradients are views. When the last backward pass has made the last gradient of a bucket, its
all-reduce begins, in place, while the backward pass goes on (Li et al. 2020, arXiv:2006.15704).

If a step has only one micro-batch, gradients stay as they are made until a bucket has all. Then they are copied into
the buffer and widened. A buffer from the first gradient on would take memory in addition to the activations of the
block.

A rank holds 4 N elements in fp32 (parameters, gradients, two moments), and with one micro-batch a bucket more, where
DistributedDataParallel's buckets are a fifth of N. Sums are taken in fp32, or in the parameters' dtype.

Buckets start in their order, each after the ones before it. So the order is one on all ranks of a group, which hold the
same parts of the model.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from meshwright import compat
from meshwright.kernels.linear.weight_gradients import GradientSum, sum_of
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.model import Transformer
from meshwright.model.feed_forward import MoE
from meshwright.model.layers import Linear
from meshwright.model.quantized_weights import QuantizedWeight, is_run
from meshwright.parallel.groups.group import Group, Pending
from meshwright.parallel.groups.mesh import Mesh, device_mesh
from meshwright.spec.memory.held import bucket_counts, takes
from meshwright.spec.weights.boxes import Box, shard, sharded_dim

FIRST, LAST = ("embed", "positions"), ("norm", "head")
"""Modules before and behind the blocks."""


def is_needed(mesh: Mesh) -> bool:
    """Return whether another rank has a gradient of any parameter of this rank.

    Experts may lie on fewer ranks than the tp group they borrow. Then the ranks that hold the same experts are
    data-parallel ranks for experts alone.
    """
    return mesh["data"].size > 1 or (mesh["ep"].size > 1 and mesh["expert_data"].size > 1)


def apply_data_parallel(
    model: Transformer, mesh: Mesh, device: torch.device, reduce_dtype: torch.dtype | None = None,
    gathered: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Shard embedding, blocks, and norm with head, each as a unit. Shards are gathered as `gathered`.

    Under a pipeline, parameters stay whole from a stage's first pass of a step to its last: otherwise they would be
    gathered for every micro-batch. A head stays whole between its forward pass and its backward pass, which is the
    next.
    """
    zero = mesh.layout.zero
    assert zero, "without ZeRO, replicas hold the whole model"
    assert mesh["data"].size > 1, "a plan refuses to shard over one rank"
    compat.let_selective_recomputation_pass_hooks()
    # Only ZeRO-3 frees a unit after its forward pass.
    frees = zero == 3 and mesh["pp"].size == 1
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    routed = any(block.routed for block in model.layers.values())
    dense, expert = device_mesh(mesh, mesh["replicate"], mesh["shard"], device.type), None
    if mesh["ep"].size > 1 and routed:
        expert = device_mesh(mesh, mesh["replicate"], mesh["expert_shard"], device.type)
    first, last = _ends(model)
    # Inner units first: fully_shard takes the parameters that no unit inside has taken.
    blocks: list[list[nn.Module]] = []
    for block in model.blocks:
        blocks.append([block])
        if expert is not None and block.routed:
            blocks[-1].append(cast(MoE, block.mlp).experts)
            _shard(blocks[-1][1:], mesh, "expert_shard", expert, policy, frees=frees)
        _shard([block], mesh, "shard", dense, policy, frees=frees)
    _shard(first, mesh, "shard", dense, policy, frees=frees)
    _shard(last, mesh, "shard", dense, policy, frees=False)
    # The root takes what is left, a tied matrix for example, and orders the collectives of all units.
    _shard([model], mesh, "shard", dense, policy, frees=False)
    _prefetch([first[:1] or [model], *blocks, last[:1] or [model]])
    for module in sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "stage")


def _shard(
    unit: list[nn.Module], mesh: Mesh, group: str, ranks: DeviceMesh, policy: MixedPrecisionPolicy, *, frees: bool
) -> None:
    """Shard modules that are gathered together over the ranks of `group`. `ranks`: mesh of these and their replicas."""
    if not unit:
        return

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dim(parameter.shape, mesh[group].size))

    fully_shard(unit, mesh=ranks, reshard_after_forward=frees, mp_policy=policy, shard_placement_fn=placement)
    module, replicas = cast(FSDPModule, unit[0]), mesh["replicate"]
    if mesh[group].size * replicas.size > 1:  # on one rank the division would copy every gradient
        module.set_gradient_divide_factor(1.0)
    # Every collective of the module is reported to the traffic of its two groups.
    module.set_custom_all_gather(_CountedGather(mesh[group]))  # type: ignore[arg-type]  # the protocol, structurally
    module.set_custom_reduce_scatter(_CountedScatter(mesh[group]))  # type: ignore[arg-type]  # the protocol, structurally
    if replicas.size > 1:
        module.set_all_reduce_hook(partial(_after_all_reduce, replicas))


def _after_all_reduce(replicas: Group, total: Tensor) -> None:
    """Report the sum of a shard over its replicas, which has begun on the stream of this call."""
    replicas.tell_all_reduce(total)
    if not replicas.overlaps:
        compat.join_stream(total.device)


class _CountedCollective:
    """A collective of fully_shard, which takes any callable that can also allocate. Reports to its group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def alone(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which a collective overlaps with no other work if the layout asks for that."""
        return nullcontext() if self.group.overlaps else compat.joined_streams(device)

    @takes("buffers")
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedGather(_CountedCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.group.tell_all_gather(input_tensor)
        with self.alone(input_tensor.device):
            return compat.all_gather_into(output_tensor, input_tensor, group, async_op)


class _CountedScatter(_CountedCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.group.tell_reduce_scatter(input_tensor)
        with self.alone(input_tensor.device):
            return compat.reduce_scatter_into(output_tensor, input_tensor, group, op, async_op)


def _ends(model: Transformer) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules before the blocks and those behind them, each to be gathered together.

    A tied head's matrix is in both. The ends are then left to the model as a whole, gathered from its beginning to its
    end.
    """
    children = {} if model.shape.tied else dict(model.named_children())
    first, last = ([children[name] for name in names if name in children] for names in (FIRST, LAST))
    return first, last


def _prefetch(units: Sequence[Sequence[nn.Module]]) -> None:
    """Have each unit prefetch the next one in the forward pass, and the one before in the backward pass.

    By default FSDP prefetches when the host comes by, which in a routed layer waits for the device. And experts that
    are gathered only there would be gathered inside selective recomputation, which must repeat exactly the operations
    of the forward pass.
    """
    for unit, following in pairwise(units):
        unit[0].set_modules_to_forward_prefetch(list(following))  # type: ignore[operator]  # fully sharded modules
        following[0].set_modules_to_backward_prefetch(list(unit))  # type: ignore[operator]  # fully sharded modules


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """List the modules under fully_shard."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def widen_gradients(model: Transformer, mesh: Mesh, dtype: torch.dtype) -> list[GradientSum]:
    """Have gradients added up and reduced in a dtype other than the parameter's, and return their sums.

    The sums must live as long as the model. When a stage keeps whole gradients, whole parameters are gathered once, one
    block at a time: this creates the parameters that have gradients.
    """
    modules, sums = sharded_modules(model), list[GradientSum]()
    if mesh.layout.zero == 1 or mesh["pp"].size > 1:
        for module in modules:
            module.unshard()
            _widen(model, dtype, sums)
            module.reshard()
    compat.fsdp_keep_reduce_dtype(modules)
    _widen(model, dtype, sums)
    return sums


def _widen(model: Transformer, dtype: torch.dtype, sums: list[GradientSum]) -> None:
    """Widen the gradients of a model. A shard's gradient comes from a reduction: nothing is added to it here."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.grad_dtype = dtype
        elif parameter.requires_grad and sum_of(parameter) is None:
            allocate = partial(torch.empty_like, parameter, dtype=dtype, memory_format=torch.contiguous_format)
            sums.append(GradientSum(parameter, dtype, allocate, meets=parameter in doubly_used(model)))


def doubly_used(model: Transformer) -> set[Tensor]:
    """Return the parameters with two gradients in one backward pass: a matrix that both ends share."""
    tied = model.shape.tied and model.first and model.last
    return {model.embed.weight} if tied else set()


def before_micro_batch(model: Transformer, zero: int, *, last: bool) -> None:
    """Set which collectives the passes of a micro-batch make. `last`: it is the last of the step."""
    if not zero:
        return
    assert isinstance(model, FSDPModule)  # its modules are set along with it
    # ZeRO-1 adds whole gradients up and reduces them once; 2 and 3 reduce every micro-batch.
    model.set_requires_gradient_sync(zero >= 2 or last)
    # Replicas sum their shards once a step.
    model.set_requires_all_reduce(last)
    # Parameters stay gathered until the optimizer changes them.
    if zero < 3:
        model.set_reshard_after_backward(last)


def set_reducing(modules: list[FSDPModule], reduces: bool) -> None:
    """Set whether the next backward pass reduces gathered gradients and reshards parameters, in all these modules."""
    for module in modules:
        module.set_requires_gradient_sync(reduces)
        module.set_requires_all_reduce(reduces)
        module.set_reshard_after_backward(reduces)


def reduce_now(modules: list[FSDPModule]) -> None:
    """Reduce gradients and reshard parameters outside of a backward pass. The root module comes first."""
    set_reducing(modules, True)
    compat.fsdp_post_backward(modules)


def take_codes(weight: QuantizedWeight, matrix: QuantizedMatrix) -> None:
    """Set a frozen matrix to this rank's part of the codes of a whole one, ZeRO's cut included."""
    if weight.run is None:
        weight.take(matrix)
        return
    whole = tuple(weight.run.shape)
    share = local_box(weight.run, Box(whole=whole, offsets=(0, 0), sizes=whole))
    weight.take(matrix, local(weight.run.detach()), share.offsets[0])


@contextmanager
def gather_codes(block: nn.Module) -> Iterator[None]:
    """Gather the codes of a block inside, if ranks share them. Those of experts spread over ep stay as they are."""
    if not isinstance(block, FSDPModule) or not any(map(is_run, dict(block.named_parameters()))):
        yield
        return
    block.unshard()
    try:
        yield
    finally:
        block.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded. It shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(parameter: Tensor, box: Box) -> Box:
    """Return the box of `local(parameter)`."""
    if not isinstance(parameter, DTensor):
        return box
    mesh = parameter.device_mesh
    # The last dimension of the mesh shards; one before it holds replicas.
    return shard(box, mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))


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
    """The buffer of this step. CUDA graphs provide one with a fixed address (parallel/pipeline/pass_graphs.py)."""
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

    def __init__(self, buckets: Iterable[Bucket], meeting: Container[Tensor] = (), *, overlaps: bool = True) -> None:
        self.buckets = list(buckets)
        self.overlaps = overlaps
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
        self.expecting, self.only = last and self.overlaps, only

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

    No two stages of a rank share a parameter: a plan refuses that together with data parallelism.
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
    return Replicas(buckets, doubly_used(model), overlaps=mesh.layout.overlap == "on")


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
