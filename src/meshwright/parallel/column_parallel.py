"""Products whose matrices are split by rows (outputs) over tp ranks, with the collectives that go before them.

    y = enter(x) W^T        W (out / t, in); enter = f (identity), or g with sp (all-gather along the sequence)

           with sp: start gathering x again
    dX     gradient W, this rank's part of the sum
           start summing dX: all-reduce, or reduce-scatter with sp
    dW     gradient^T x
           wait for dX

so that the backward pass's collectives run beside products. Forward a sequence is gathered in pieces (sequence.py): one
is multiplied while the next is under way. What is kept of x is its slice with sp: an activation of
S / t positions like all others between the blocks (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.linear import (
    SAME,
    in_halves,
    input_gradient,
    parameter_gradients,
    products,
    products_of_pieces,
)
from meshwright.kernels.weight_gradients import Leaf, as_leaf, leaf_at, waits
from meshwright.parallel.group import Group, Pending, numbered
from meshwright.parallel.sequence import SEQUENCE, Gathering, Scattering, SequenceSlices, resized


@dataclass(frozen=True, slots=True)
class ColumnParallelProducts:
    """What takes the place of kernels.linears at a border of a model (model.seams.Border.read)."""

    slices: SequenceSlices
    form: str = SAME
    """Of kernels.linear."""

    def linears(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """x (B, S or S / t, in) -> (B, S, out / t) of each."""
        if torch.compiler.is_compiling():
            present = [bias for bias in biases if bias is not None]
            biased = [bias is not None for bias in biases]
            numbers = self.slices.group.number, self.slices.sp, self.slices.of_slice(x)
            waiting = [x.requires_grad and waits(weight) for weight in weights]
            return tuple(columns(x, list(weights), present, biased, *numbers, self.form, waiting))
        found: tuple[Tensor, ...] = _Columns.apply(x, self, *weights, *biases)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return found


class _Columns(torch.autograd.Function):
    """Arguments after the columns: n weights, then n biases (or None)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: ColumnParallelProducts, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = in_halves(parameters)
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
        found = _gradients([wants_x, *others], ctx.leaves, x, weights, gradients, *ctx.options)
        return found[0], None, *found[1:]


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: Group, sp: bool, pieces: int,
    form: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of each piece of the sequence, while the next is gathered; then put together."""
    if not sp:
        return products(x, weights, biases, form)
    gathered = (piece.contiguous() for piece in Gathering(group, x, pieces).pieces())
    made = list(products_of_pieces(gathered, weights, biases, form))
    return made[0] if pieces == 1 else tuple(torch.cat(parts, SEQUENCE) for parts in zip(*made, strict=True))


def _gradients(
    wanted: Sequence[bool], leaves: Sequence[Leaf | None], x: Tensor | None, weights: Sequence[Tensor],
    gradients: Sequence[Tensor], group: Group, sp: bool, pieces: int, form: str,
) -> list[Tensor | None]:  # fmt: skip
    """Those `wanted` of x, of each weight, of each bias; `leaves` are the weights that may be left for later. Without x
    no weight is trained."""
    total: Scattering | Pending | None = None
    weighed = any(wanted[1 : 1 + len(weights)])
    gathering = Gathering(group, x, pieces) if x is not None and sp and weighed else None
    if wanted[0]:
        part = input_gradient(gradients, weights, form)
        total = Scattering(group, pieces).start_all(part) if sp else group.start_all_reduce(part)
    rows = gathering.whole() if gathering else x if weighed else None
    found = list(parameter_gradients(wanted[1:], leaves, rows, gradients, weights, form))
    return [None if total is None else total.wait(), *found]


@torch.library.custom_op("meshwright::columns", mutates_args=())
def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """As Columns.linears, one operator of compiled code; `biases` are those of the products that are `biased`,
    `waiting` says which weights' gradients are left for later."""
    given = iter(biases)
    every = [next(given) if has else None for has in biased]
    return list(_products(x, weights, every, numbered(group), sp, pieces, form))


@columns.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    rows = resized(x.shape, numbered(group).size if sp else 1, 1)[:-1]
    return [x.new_empty(*rows, len(weight)) for weight in weights]


@torch.library.custom_op("meshwright::columns_backward", mutates_args=())
def columns_backward(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients that are `wanted` of x, each weight and each bias; its collective runs beside its products. Those
    of `waiting` weights are left for later."""
    leaves = [leaf_at(weight) if later else None for weight, later in zip(weights, waiting, strict=True)]
    every = _gradients(wanted, leaves, x, weights, gradients, numbered(group), sp, pieces, form)
    return [found for found in every if found is not None]


@columns_backward.register_fake
def _(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool], group: int, sp: bool,
    pieces: int, form: str, waiting: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    return [one.new_empty(one.shape) for one, made in zip(like, _made(wanted, waiting), strict=True) if made]


def _made(wanted: Sequence[bool], waiting: Sequence[bool]) -> list[bool]:
    """Which gradients of x, of each weight and of each bias a backward pass makes at once."""
    later = [False, *waiting, *[False] * len(waiting)]
    return [wants and not waits for wants, waits in zip(wanted, later, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, _, ctx.biased, ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.waiting = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    x, *weights = ctx.saved_tensors
    of_x, of_weights, of_biases, *_ = ctx.needs_input_grad
    given = iter(of_biases)
    wanted = [of_x, *of_weights, *(has and next(given) for has in ctx.biased)]
    options = ctx.group, ctx.sp, ctx.pieces, ctx.form, ctx.waiting
    found = iter(columns_backward(gradients, x, weights, wanted, *options))
    every = [next(found) if made else None for made in _made(wanted, ctx.waiting)]
    biases = [gradient for gradient, has in zip(every[-len(weights) :], ctx.biased, strict=True) if has]
    return every[0], every[1 : 1 + len(weights)], biases, *[None] * 6


columns.register_autograd(_backward, setup_context=_setup)
