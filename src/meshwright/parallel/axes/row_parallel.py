"""Products whose matrices are split by columns (inputs) over tp ranks, with the sum over the ranks behind them.

y = leave(x W^T)        W (out, in / t); leave = f* (all-reduce), or g* with sp (reduce-scatter along the sequence)

A sequence passes in pieces (sequence.py): the sum of one is under way while the next is multiplied. With sp the
backward pass gathers the gradient of y likewise, and multiplies the pieces that have arrived. With one piece, a whole
product is followed by its collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.cpu_product import pays
from meshwright.kernels.linear.linear import (
    SAME,
    EarlySave,
    input_gradient,
    needs_wide,
    parameter_gradients,
    products_of_pieces,
)
from meshwright.kernels.linear.weight_gradients import as_leaf, leaf_at, waits
from meshwright.parallel.axes.sequence import SEQUENCE, Gathering, Scattering, SequenceSlices, resize
from meshwright.parallel.groups.group import Group, find_group


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


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: bool, pieces: int, form: str
) -> Tensor:  # fmt: skip
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[1:3])
    x_gradient, *parameter_parts = rows_backward(
        gradient, x, weight, wanted, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later
    )
    present = iter(parameter_parts)
    is_returned = wanted[0] and not ctx.later, wanted[1]
    return x_gradient, *(next(present) if returned else None for returned in is_returned), *[None] * 5


rows.register_autograd(_backward, setup_context=_setup)
