"""Products whose matrices are split by rows (outputs) over tp ranks, with the collectives before them.

    y = enter(x) W^T        W (out / t, in); enter = f (identity), or g with sp (all-gather along the sequence)

           with sp: start gathering x again
    dX     gradient W, this rank's part of the sum
           start summing dX: all-reduce, or reduce-scatter with sp
    dW     gradient^T x
           wait for dX

This order hides the backward pass's collectives behind products. In the forward pass a sequence is gathered in pieces
(sequence.py): one is multiplied while the next is under way. With sp only this rank's slice of x is kept: S / t
positions, like all activations between blocks (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.linear.linear import (
    SAME,
    in_halves,
    input_gradient,
    parameter_gradients,
    products,
    products_of_pieces,
)
from meshwright.kernels.linear.weight_gradients import Leaf, as_leaf, leaf_at, waits
from meshwright.parallel.axes.sequence import SEQUENCE, Gathering, Scattering, SequenceSlices, resize
from meshwright.parallel.groups.group import Group, Pending, find_group


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
    # Two collectives at once: x is gathered again, and its gradient is summed, beside the products of dW.
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
    """Return the `wanted` gradients of x, each weight and each bias, its collective running beside its products.

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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, _, ctx.biased, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.waiting = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
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


columns.register_autograd(_backward, setup_context=_setup)
