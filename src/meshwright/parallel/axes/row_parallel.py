"""Products whose matrices are split by columns (inputs) over tp ranks, with the sum over the ranks behind them.

y = leave(x W^T)        W (out, in / t); leave = f* (all-reduce), or g* with sp (reduce-scatter along the sequence)

A sequence passes in pieces (sequence.py): the sum of one is under way while the next is multiplied. With sp the
backward pass gathers the gradient of y likewise, and multiplies the pieces that have arrived. With one piece, a whole
product is followed by its collective.
"""

from collections.abc import Iterable, Sequence
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
from meshwright.parallel.axes.sequence import SEQUENCE, Gathering, Scattering, SequenceSlices, resized
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
    made = (part for (part,) in products_of_pieces(chunks, (weight,), (bias,), form))
    if sp:
        scattering = Scattering(group, pieces)
        for part in made:
            scattering.start(part)
        return scattering.wait()
    if pieces == 1:
        return group.all_reduce(next(made).clone())  # recomputation may keep the product, so it must not change
    pending = [group.start_all_reduce(part.clone()) for part in made]
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
    of_x = gradient.new_empty(*resized(gradient.shape[:-1], group.size, 1), weight.shape[1])
    _gradients_into(of_x.chunk(pieces, SEQUENCE), gathering.pieces(), weight, form)
    return gathering.whole(), of_x


def _gradients_into(
    outputs: Sequence[Tensor], pieces: Iterable[Tensor], weight: Tensor, form: str = SAME
) -> None:  # fmt: skip
    """Write the gradients of x (B, s, in) for one piece (B, s, out) after the other."""
    if form != SAME:
        # Rounded once for all pieces.
        columns = fp8.narrow(weight.t())
        for piece, output in zip(pieces, outputs, strict=True):
            output.copy_(fp8.input_gradient((piece,), (columns,)))
        return
    for piece, output in zip(pieces, outputs, strict=True):
        _multiply_into(output, piece, weight)


def _multiply_into(output: Tensor, gradient: Tensor, weight: Tensor) -> None:
    """Set output (B, s, in) to gradient (B, s, out) times weight (out, in)."""
    if needs_wide(gradient) or pays(gradient, weight.shape[1]):
        output.copy_(input_gradient((gradient,), (weight,)))
    elif len(output) == 1:
        torch.mm(gradient[0], weight, out=output[0])
    else:
        torch.bmm(gradient, weight.expand(len(output), -1, -1), out=output)


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
        whole, of_x = ctx.summed.gradient(gradient, weight)
        form = ctx.summed.form
        of_parameters = parameter_gradients(ctx.needs_input_grad[1:3], ctx.leaves, x, (whole,), (weight,), form)
        return of_x, *of_parameters, None, None


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
    return x.new_empty(*resized(x.shape[:-1], 1, find_group(group).size if sp else 1), len(weight))


@torch.library.custom_op("meshwright::rows_backward", mutates_args=())
def rows_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], group: int, sp: bool, pieces: int, form: str,
    later: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradient of x and those `wanted` of weight and bias. The weight's may be left for `later`."""
    whole, of_x = _gradient(gradient.contiguous(), weight, find_group(group), sp, pieces, form)
    of_parameters = parameter_gradients(wanted, [leaf_at(weight) if later else None], x, (whole,), (weight,), form)
    return [of_x, *(gradient for gradient in of_parameters if gradient is not None)]


@rows_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], group: int, sp: bool, pieces: int, form: str,
    later: bool,
) -> list[Tensor]:  # fmt: skip
    like, made = (weight, weight[:, 0]), (wanted[0] and not later, wanted[1])
    return [
        x.new_empty(x.shape),
        *(each.new_empty(each.shape) for each, is_made in zip(like, made, strict=True) if is_made),
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[1:3])
    of_x, *of_parameters = rows_backward(
        gradient, x, weight, wanted, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.later
    )
    present = iter(of_parameters)
    made = wanted[0] and not ctx.later, wanted[1]
    return of_x, *(next(present) if is_made else None for is_made in made), *[None] * 5


rows.register_autograd(_backward, setup_context=_setup)
