"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).

Attention is split by heads, the MLP by its inner width, embedding and head by vocabulary. The model's own layers do the
local products. Collectives are at the borders of attention and MLP:

    without sp    f: identity, backward all-reduce          f*: all-reduce, backward identity
    with sp       g: all-gather along the sequence,         g*: reduce-scatter along the sequence,
                     backward reduce-scatter                    backward all-gather

With sp norms, residuals and dropout work on S / tp positions. Either way there are two collectives of B S D elements
per layer and pass (an all-reduce is one reduce-scatter and one all-gather).

f and g are fused with the products that read their output (`ColumnParallelProducts`): in the backward pass the products
of the weights' gradients overlap with the collective, and g keeps only its slice and gathers again. f* and g* are fused
with the products before them (`RowParallelProducts`). They stand alone before the head, and if something else reads or
makes the tensor too (a router, experts).

Column-parallel products split matrices by rows (outputs) over tp ranks, with the collective before them:

    y = enter(x) W^T        W (out / t, in); enter = f (identity), or g with sp (all-gather along the sequence)

           with sp: start gathering x again
    dX     gradient W, this rank's part of the sum
           start summing dX: all-reduce, or reduce-scatter with sp
    dW     gradient^T x
           wait for dX

This order hides the backward pass's collectives behind products. In the forward pass a sequence is gathered in pieces
(sequence.py): one is multiplied while the next is under way. With sp only this rank's slice of x is kept: S / t
positions, like all activations between blocks (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Row-parallel products split matrices by columns (inputs), with the sum over the ranks behind them:

    y = leave(x W^T)        W (out, in / t); leave = f* (all-reduce), or g* with sp (reduce-scatter along the sequence)

The sum of one piece is under way while the next is multiplied. With sp the backward pass gathers the gradient of y
likewise, and multiplies the pieces that have arrived. With one piece, a whole product is followed by its collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.cpu_product import pays
from meshwright.kernels.linear.linear import (
    SAME,
    EarlySave,
    in_halves,
    input_gradient,
    needs_wide,
    parameter_gradients,
    products,
    products_of_pieces,
)
from meshwright.kernels.linear.weight_gradients import Leaf, as_leaf, leaf_at, waits
from meshwright.kernels.loss.cross_entropy import Vocabulary, linear_cross_entropy, linear_log_probabilities
from meshwright.kernels.loss.linear_divergence import linear_divergence, linear_top
from meshwright.model import Transformer
from meshwright.model.layers import Linear
from meshwright.model.low_rank import ExpertLoRA, LoRA
from meshwright.parallel.axes.sequence import SEQUENCE, Gathering, Scattering, SequenceSlices, gather, resize, scatter
from meshwright.parallel.groups.group import Group, Pending, find_group
from meshwright.spec.weights.boxes import share


@dataclass(frozen=True, slots=True)
class RowParallelProducts:
    """Products and their sums at a border of a model (model.seams.Border.write)."""

    slices: SequenceSlices
    form: str = SAME
    """The form of the products (kernels.linear)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x (B, S, in / t) -> (B, S or S / t, out), summed over the ranks. One of them has the bias."""
        pieces = self.slices.of_whole(x)
        if torch.compiler.is_compiling():
            later = x.requires_grad and waits(weight)
            traced: Tensor = rows(x, weight, bias, self.slices.group.number, self.slices.sp, pieces, self.form, later)
            return traced
        saved = EarlySave()
        (x,) = saved(x, weight, changed=1, bias=bias)
        total: Tensor = _Rows.apply(x, weight, bias, self, saved)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return total

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `linear` without a gradient."""
        return _product(x, weight, bias, self.slices.group, self.slices.sp, self.slices.of_whole(x), self.form)

    def gradient(self, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's part (B, S, out) and of x, given that of the sum."""
        return _gradient(gradient, weight, self.slices.group, self.slices.sp, self.slices.of_slice(gradient), self.form)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: bool, pieces: int, form: str) -> Tensor:
    # One call for each piece, and contiguous: selective recomputation keeps products of matrices.
    chunks = (piece.contiguous() for piece in x.chunk(pieces, SEQUENCE))
    parts = (part for (part,) in products_of_pieces(chunks, (weight,), (bias,), form))
    if sp:
        scattering = Scattering(group, pieces)
        for part in parts:
            scattering.start(part)
        return scattering.wait()
    if pieces == 1:
        return group.all_reduce(next(parts).clone())  # recomputation may keep the product, so it must not change
    pending = [group.start_all_reduce(part.clone()) for part in parts]
    return torch.cat([total.wait() for total in pending], SEQUENCE)


def _gradient(
    gradient: Tensor, weight: Tensor, group: Group, sp: bool, pieces: int, form: str
) -> tuple[Tensor, Tensor]:
    if not sp:
        return gradient, input_gradient((gradient,), (weight,), form)
    gathering = Gathering(group, gradient, pieces)
    if pieces == 1:
        whole = gathering.whole()
        return whole, input_gradient((whole,), (weight,), form)
    # Pieces are multiplied as they arrive, each into its part of one tensor.
    x_gradient = gradient.new_empty(*resize(gradient.shape[:-1], group.size, 1), weight.shape[1])
    columns = fp8.narrow(weight.t()) if form != SAME else None  # rounded once for all pieces
    for piece, output in zip(gathering.pieces(), x_gradient.chunk(pieces, SEQUENCE), strict=True):
        if columns is not None:
            output.copy_(fp8.input_gradient((piece,), (columns,)))
        elif needs_wide(piece) or pays(piece, weight.shape[1]):
            output.copy_(input_gradient((piece,), (weight,)))
        elif len(output) == 1:
            torch.mm(piece[0], weight, out=output[0])
        else:
            torch.bmm(piece, weight.expand(len(output), -1, -1), out=output)
    return gathering.whole(), x_gradient


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, summed: RowParallelProducts, saved: EarlySave
    ) -> Tensor:
        ctx.summed, ctx.leaves, ctx.saved = summed, (as_leaf(weight),), saved
        return summed.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved.tensors
        whole, x_gradient = ctx.summed.gradient(gradient, weight)
        form = ctx.summed.form
        parameter_parts = parameter_gradients(ctx.needs_input_grad[1:3], ctx.leaves, x, (whole,), (weight,), form)
        return x_gradient, *parameter_parts, None, None


@torch.library.custom_op("meshwright::rows", mutates_args=())
def rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: int, sp: bool, pieces: int, form: str, later: bool
) -> Tensor:
    """Compute RowParallelProducts.linear as one operator. `later`: the weight's gradient is left for later."""
    return _product(x, weight, bias, find_group(group), sp, pieces, form)


@rows.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: int, sp: bool, pieces: int, form: str, later: bool
) -> Tensor:
    return x.new_empty(*resize(x.shape[:-1], 1, find_group(group).size if sp else 1), len(weight))


@torch.library.custom_op("meshwright::rows_backward", mutates_args=())
def rows_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], group: int, sp: bool, pieces: int, form: str,
    later: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradient of x and those `wanted` of weight and bias. The weight's may be left for `later`."""
    whole, x_gradient = _gradient(gradient.contiguous(), weight, find_group(group), sp, pieces, form)
    parameter_parts = parameter_gradients(wanted, [leaf_at(weight) if later else None], x, (whole,), (weight,), form)
    return [x_gradient, *(gradient for gradient in parameter_parts if gradient is not None)]


@rows_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], group: int, sp: bool, pieces: int, form: str,
    later: bool,
) -> list[Tensor]:  # fmt: skip
    like, is_returned = (weight, weight[:, 0]), (wanted[0] and not later, wanted[1])
    return [
        x.new_empty(x.shape),
        *(tensor.new_empty(tensor.shape) for tensor, returned in zip(like, is_returned, strict=True) if returned),
    ]


def _set_up_row(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later = inputs
    ctx.save_for_backward(x, weight)


def _row_backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[1:3])
    x_gradient, *parameter_parts = rows_backward(
        gradient, x, weight, wanted, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later
    )
    present = iter(parameter_parts)
    is_returned = wanted[0] and not ctx.later, wanted[1]
    return x_gradient, *(next(present) if returned else None for returned in is_returned), *[None] * 5


rows.register_autograd(_row_backward, setup_context=_set_up_row)


@dataclass(frozen=True, slots=True)
class ColumnParallelProducts:
    """Replacement of kernels.linears at a border of a model (model.seams.Border.read)."""

    slices: SequenceSlices
    form: str = SAME
    """The form of the products (kernels.linear)."""

    def linears(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Multiply x (B, S or S / t, in) by each weight -> (B, S, out / t) each."""
        if torch.compiler.is_compiling():
            # A list argument of an operator holds no None, so `biased` tells where the present ones belong.
            present = [bias for bias in biases if bias is not None]
            biased = [bias is not None for bias in biases]
            numbers = self.slices.group.number, self.slices.sp, self.slices.of_slice(x)
            waiting = [x.requires_grad and waits(weight) for weight in weights]
            return tuple(columns(x, list(weights), present, biased, *numbers, self.form, waiting))
        outputs: tuple[Tensor, ...] = _Columns.apply(x, self, *weights, *biases)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return outputs


class _Columns(torch.autograd.Function):
    """Autograd function whose arguments after `columns` are n weights, then n biases (or None)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: ColumnParallelProducts, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = in_halves(parameters)
        # The gradient of x reads only the weights, so x is kept only where one of these is trained.
        learns = any(ctx.needs_input_grad[2 : 2 + len(weights)])
        ctx.save_for_backward(x if learns else None, *weights)
        ctx.leaves = tuple(map(as_leaf, weights))
        slices = columns.slices
        ctx.options = slices.group, slices.sp, slices.of_slice(x), columns.form
        return _products(x, weights, biases, *ctx.options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        wants_x, _, *others = ctx.needs_input_grad
        x_gradient, *parameter_parts = _gradients([wants_x, *others], ctx.leaves, x, weights, gradients, *ctx.options)
        return x_gradient, None, *parameter_parts


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: Group, sp: bool, pieces: int,
    form: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Multiply each piece of the sequence while the next is gathered, then join the pieces."""
    if not sp:
        return products(x, weights, biases, form)
    gathered = (piece.contiguous() for piece in Gathering(group, x, pieces).pieces())
    outputs = list(products_of_pieces(gathered, weights, biases, form))
    return outputs[0] if pieces == 1 else tuple(torch.cat(parts, SEQUENCE) for parts in zip(*outputs, strict=True))


def _gradients(
    wanted: Sequence[bool], leaves: Sequence[Leaf | None], x: Tensor | None, weights: Sequence[Tensor],
    gradients: Sequence[Tensor], group: Group, sp: bool, pieces: int, form: str,
) -> list[Tensor | None]:  # fmt: skip
    """Return the `wanted` gradients of x, of each weight and of each bias.

    `leaves` are the weights whose gradients may be left for later. Without x no weight is trained.
    """
    # Two collectives at once: x is gathered again, and its gradient is summed, during the products of dW.
    total: Scattering | Pending | None = None
    weighed = any(wanted[1 : 1 + len(weights)])
    gathering = Gathering(group, x, pieces) if x is not None and sp and weighed else None
    if wanted[0]:
        part = input_gradient(gradients, weights, form)
        total = Scattering(group, pieces).start_all(part) if sp else group.start_all_reduce(part)
    rows = gathering.whole() if gathering else x if weighed else None
    parameter_parts = list(parameter_gradients(wanted[1:], leaves, rows, gradients, weights, form))
    return [None if total is None else total.wait(), *parameter_parts]


@torch.library.custom_op("meshwright::columns", mutates_args=())
def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Compute ColumnParallelProducts.linears as one operator of compiled code.

    `biases` are those of the products that are `biased`. `waiting` tells which weights' gradients are left for later.
    """
    present = iter(biases)
    all_biases = [next(present) if has else None for has in biased]
    return list(_products(x, weights, all_biases, find_group(group), sp, pieces, form))


@columns.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    rows = resize(x.shape, find_group(group).size if sp else 1, 1)[:-1]
    return [x.new_empty(*rows, len(weight)) for weight in weights]


@torch.library.custom_op("meshwright::columns_backward", mutates_args=())
def columns_backward(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the `wanted` gradients of x, each weight and each bias, its collective overlapping with its products.

    Gradients of `waiting` weights are left for later.
    """
    leaves = [leaf_at(weight) if later else None for weight, later in zip(weights, waiting, strict=True)]
    all_gradients = _gradients(wanted, leaves, x, weights, gradients, find_group(group), sp, pieces, form)
    return [gradient for gradient in all_gradients if gradient is not None]


@columns_backward.register_fake
def _(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    return [
        tensor.new_empty(tensor.shape)
        for tensor, returned in zip(like, _returned(wanted, waiting), strict=True)
        if returned
    ]


def _returned(wanted: Sequence[bool], waiting: Sequence[bool]) -> list[bool]:
    """Return which gradients of x, weights and biases an operator returns: those of waiting weights come later."""
    later = [False, *waiting, *[False] * len(waiting)]
    return [wants and not waits for wants, waits in zip(wanted, later, strict=True)]


def _set_up_column(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, _, ctx.biased, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.waiting = inputs
    ctx.save_for_backward(x, *weights)


def _column_backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    x, *weights = ctx.saved_tensors
    wants_x, wants_weights, wants_biases, *_ = ctx.needs_input_grad
    wants_bias = iter(wants_biases)
    wanted = [wants_x, *wants_weights, *(has and next(wants_bias) for has in ctx.biased)]
    options = ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.waiting
    # An operator returns no None either: put its gradients back into their slots.
    present = iter(columns_backward(gradients, x, weights, wanted, *options))
    all_gradients = [next(present) if returned else None for returned in _returned(wanted, ctx.waiting)]
    biases = [gradient for gradient, has in zip(all_gradients[-len(weights) :], ctx.biased, strict=True) if has]
    return all_gradients[0], all_gradients[1 : 1 + len(weights)], biases, *[None] * 6


columns.register_autograd(_column_backward, setup_context=_set_up_column)


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
                module.lora.first_input = share(module.in_features, group.size, group.index)[0]
        elif isinstance(module, ExpertLoRA) and name.endswith("down_lora") and not own_tokens_in_experts:
            assert model.shape.moe is not None
            module.first_input = share(model.shape.moe.ffn, group.size, group.index)[0]
    # Embedding and head are split by vocabulary: no rank ever has all rows or all logits.
    first, number = share(model.shape.vocab, group.size, group.index)
    seams.tp_index = group.index
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
