"""Products whose matrices are split by rows (outputs) over tp ranks, with the collectives that go before them.

    y = enter(x) W^T        W (out / t, in); enter = f (identity), or g with sp (all-gather along the sequence)

           with sp: start gathering x again
    dX     gradient W, this rank's part of the sum
           start summing dX: all-reduce, or reduce-scatter with sp
    dW     gradient^T x
           wait for dX

so that the backward pass's collectives run beside products. What is kept of x is its slice with sp: an activation of
S / t positions like all others between the blocks (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.linear import as_leaf, in_halves, input_gradient, parameter_gradients, products
from meshwright.parallel.group import Group, Pending

SEQUENCE = 1
"""The dim of x (B, S, D) that sp splits."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What takes the place of kernels.linear and kernels.linears, with their signatures."""

    group: Group
    sp: bool

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (B, S or S / t, in) -> (B, S, out / t)."""
        return self.linears(x, (weight,), (bias,))[0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def linears(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """x (B, S or S / t, in) -> (B, S, out / t) of each."""
        found: tuple[Tensor, ...] = _Columns.apply(x, self, *weights, *biases)  # type: ignore[no-untyped-call]
        return found


class _Columns(torch.autograd.Function):
    """Arguments after the columns: n weights, then n biases (or None)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Columns, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = in_halves(parameters)
        ctx.save_for_backward(x, *weights)
        ctx.columns, ctx.leaves = columns, tuple(map(as_leaf, weights))
        return products(columns.group.all_gather(x, SEQUENCE) if columns.sp else x, weights, biases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        group, sp = ctx.columns.group, ctx.columns.sp
        whole = total = None
        if any(ctx.needs_input_grad[2 : 2 + len(weights)]):
            whole = group.start_all_gather(x, SEQUENCE) if sp else Pending(x)
        if ctx.needs_input_grad[0]:
            part = input_gradient(gradients, weights)
            total = group.start_reduce_scatter(part, SEQUENCE) if sp else group.start_all_reduce(part)
        x = None if whole is None else whole.wait()
        found = tuple(parameter_gradients(ctx, x, gradients, weights))
        return None if total is None else total.wait(), None, *found
