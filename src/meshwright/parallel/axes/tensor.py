"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).

Attention is split by heads, the MLP by its inner width, embedding and head by vocabulary. The model's own layers do the
local products. Collectives are at the borders of attention and MLP:

    without sp    f: identity, backward all-reduce          f*: all-reduce, backward identity
    with sp       g: all-gather along the sequence,         g*: reduce-scatter along the sequence,
                     backward reduce-scatter                    backward all-gather

With sp norms, residuals and dropout work on S / tp positions. Either way there are two collectives of B S D elements
per layer and pass (an all-reduce is one reduce-scatter and one all-gather).

f and g are fused with the products that read their output (`column_parallel.py`): in the backward pass the products of
the weights' gradients run beside the collective, and g keeps only its slice and gathers again. f* and g* are fused with
the products before them (`row_parallel.py`). They stand alone before the head, and if something else reads or makes the
tensor too (a router, experts).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.loss.cross_entropy import Vocabulary, linear_cross_entropy, linear_log_probabilities
from meshwright.kernels.loss.linear_divergence import linear_divergence, linear_top
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.low_rank import LoRA
from meshwright.parallel.axes.column_parallel import ColumnParallelProducts
from meshwright.parallel.axes.row_parallel import RowParallelProducts
from meshwright.parallel.axes.sequence import SequenceSlices, gather, resize, scatter
from meshwright.parallel.groups.group import Group, find_group
from meshwright.spec.weights.boxes import share

SUMMED = ("o", "down")
"""Linears whose product is a part of a sum over tp. One rank adds the bias."""


# Compiled code calls collectives as operators, like a product: the compiler does not look inside. Otherwise every
# collective would end a graph, and recomputation, whose body the compiler takes whole or not at all, would run
# uncompiled. An operator takes tensors and plain numbers, so a group is named by its number. Every rank of a group
# compiles the same block, in which collectives depend on one another's outputs, so all ranks call them in one order.
@torch.library.custom_op("meshwright::enter", mutates_args=())
def enter_operator(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    """Compute f, or g with sp."""
    return gather(find_group(group), x, pieces) if sp else x.clone(memory_format=torch.contiguous_format)


@enter_operator.register_fake
def _(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    return x.new_empty(resize(x.shape, find_group(group).size if sp else 1, 1))


@torch.library.custom_op("meshwright::leave", mutates_args=())
def leave_operator(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    """Compute f*, or g* with sp."""
    ranks = find_group(group)
    return scatter(ranks, x, pieces) if sp else ranks.all_reduce(x.clone(memory_format=torch.contiguous_format))


@leave_operator.register_fake
def _(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    return x.new_empty(resize(x.shape, 1, find_group(group).size if sp else 1))


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group, ctx.sp, ctx.pieces = inputs


def _enter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return leave_operator(gradient, ctx.group, ctx.sp, ctx.pieces), None, None, None


def _leave_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return enter_operator(gradient, ctx.group, True, ctx.pieces) if ctx.sp else gradient, None, None, None


enter_operator.register_autograd(_enter_backward, setup_context=_keep_group)
leave_operator.register_autograd(_leave_backward, setup_context=_keep_group)


class _Enter(torch.autograd.Function):
    """f, or g with sp: (B, S or S/tp, D) -> (B, S, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sp: bool, pieces: int) -> Tensor:
        ctx.group, ctx.sp, ctx.pieces = group, sp, pieces
        return gather(group, x, pieces) if sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group = ctx.group
        total = scatter(group, gradient, ctx.pieces) if ctx.sp else group.all_reduce(gradient.clone())
        return total, None, None, None


class _Leave(torch.autograd.Function):
    """f*, or g* with sp: each rank's part of a sum (B, S, D) -> the sum (B, S or S/tp, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sp: bool, pieces: int) -> Tensor:
        ctx.group, ctx.sp, ctx.pieces = group, sp, pieces
        return scatter(group, x, pieces) if sp else group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gather(ctx.group, gradient, ctx.pieces) if ctx.sp else gradient), None, None, None


def enter(x: Tensor, slices: SequenceSlices) -> Tensor:
    """Apply f or g, before a product whose matrix is split by rows (outputs)."""
    if torch.compiler.is_compiling():
        traced: Tensor = enter_operator(x, slices.group.number, slices.sp, slices.of_slice(x))
        return traced
    entered: Tensor = _Enter.apply(x, slices.group, slices.sp, slices.of_slice(x))  # type: ignore[no-untyped-call]  # torch has no annotations there
    return entered


def leave(x: Tensor, slices: SequenceSlices) -> Tensor:
    """Apply f* or g*, after a product whose matrix is split by columns (inputs)."""
    if torch.compiler.is_compiling():
        traced: Tensor = leave_operator(x, slices.group.number, slices.sp, slices.of_whole(x))
        return traced
    total: Tensor = _Leave.apply(x, slices.group, slices.sp, slices.of_whole(x))  # type: ignore[no-untyped-call]  # torch has no annotations there
    return total


def apply_tensor_parallel(model: Transformer, slices: SequenceSlices, *, own_tokens_in_experts: bool) -> None:
    """Put the collectives at the seams of a model, whose parameters are this rank's boxes.

    `own_tokens_in_experts`: routed layers are expert parallel and keep their slice of the sequence.
    """
    seams, group = model.seams, slices.group
    enters, leaves = partial(enter, slices=slices), partial(leave, slices=slices)
    # Attention and MLP: f or g fused with the products that read it, f* or g* with those that write it.
    for border in (seams.dense, *([seams.shared] if own_tokens_in_experts else [])):
        border.read, border.enter = ColumnParallelProducts(slices, model.products).linears, enters
        border.leave = leaves
        border.write = RowParallelProducts(slices, model.products)
        border.gathers = slices.sp
    # Without ep the experts are split by tp too, and every rank sees the whole sequence.
    if not own_tokens_in_experts:
        seams.routed.enter, seams.routed.leave = enters, leaves
    # A bias on every rank would be added tp times.
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.rsplit(".", 1)[-1] in SUMMED:
            module.adds_bias = group.index == 0
            if isinstance(module.lora, LoRA):
                module.lora.over_inputs = partial(_sum_over, group=group)
    # Embedding and head are split by vocabulary: no rank ever has all rows or all logits.
    first, number = share(model.shape.vocab, group.size, group.index)
    seams.look_up = partial(_look_up, first=first, number=number, slices=slices)
    if slices.sp:
        seams.positions = slices.mine
        if own_tokens_in_experts:
            seams.in_routed = slices.mine
    seams.enter_head = enters
    vocabulary = vocabulary_of(group, model.shape.vocab)
    prefer = model.kernels.prefer
    seams.loss = partial(linear_cross_entropy, vocabulary=vocabulary, prefer=prefer)
    seams.log_probabilities = partial(linear_log_probabilities, vocabulary=vocabulary, prefer=prefer)
    seams.divergence = partial(linear_divergence, vocabulary=vocabulary)
    seams.top = partial(linear_top, vocabulary=vocabulary)


def _sum_over(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' x, without a gradient."""
    if torch.compiler.is_compiling():
        traced: Tensor = leave_operator(x, group.number, False, 1)
        return traced
    return group.all_reduce(x.clone())


def _look_up(tokens: Tensor, weight: Tensor, *, first: int, number: int, slices: SequenceSlices) -> Tensor:
    """Embed the tokens in the rows of this rank, and zero for others. The sum over ranks is the embedding."""
    local = tokens - first
    outside = (local < 0) | (local >= number)
    rows = nn.functional.embedding(local.masked_fill(outside, 0), weight)
    return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), slices)


def vocabulary_of(group: Group, vocab: int) -> Vocabulary:
    """Return this rank's rows of the head.

    Each chunk of rows takes two small collectives: the maximum, and the sum of exponentials with the target's logit. No
    rank ever sees another's logits. `enter` before the head sums the gradients of its input.
    """
    first, number = share(vocab, group.size, group.index)
    return Vocabulary(
        first=first,
        number=number,
        most=share(vocab, group.size, 0)[1],
        whole=vocab,
        index=group.index,
        parts=group.size,
        largest=partial(group.all_reduce, op="max"),
        total=group.all_reduce,
    )
