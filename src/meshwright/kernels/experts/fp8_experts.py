"""Products of a mixture of experts with operands rounded to 8 bits as in kernels.fp8 (form FP8_ALL).

On a GPU with scaled grouped products one kernel takes the runs of all experts and reads their lengths from the device.
Elsewhere each run is a product of kernels.fp8.

The gradient of the stack adds over tokens. A run must then begin and end at a multiple of 16, so runs are copied apart,
with zeros between them. All runs share the scales of the columns of all rows: any power of two rounds the same, except
numbers that become subnormal.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.fp8 import FP8_ALL, MULTIPLE, Narrow, narrow, scales_of
from meshwright.kernels.linear.weight_gradients import as_leaf, is_taken
from meshwright.kernels.target import device_kind, simulated_kind

Counts = list[int] | Tensor
"""Same as kernels.experts.experts.Counts."""
PIECE = 2**26
"""Elements of a stack that are rounded at a time, if no expert has more."""
GROUPED_ON = (9, 0)
"""The only compute capability with a scale for each row of a grouped product (torch 2.11 to 2.13)."""


def groups_scaled(rows: Tensor) -> bool:
    """Return whether one kernel takes all runs."""
    if not (compat.HAS_SCALED_GROUPS and device_kind(rows) == "cuda" and len(rows)):
        return False
    return bool(simulated_kind()) or torch.cuda.get_device_capability(rows.device) == GROUPED_ON


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Multiply rows (N, in), sorted by expert, by weights (X, out, in). Returns (N, out)."""
    parts = zip(torch.split(rows, _on_host(counts)), weights, strict=True)
    return torch.cat([fp8.linear_reference(part, weight, form=FP8_ALL) for part, weight in parts])


def expert_linear(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Multiply as the reference does."""
    product: Tensor = _Experts.apply(rows, weights, counts)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return product


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.leaf = as_leaf(weights)
        ctx.counts = counts if groups_scaled(rows) else _on_host(counts)
        return products_of_runs(rows, weights, ctx.counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        rows_gradients = weights_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradients = rows_gradient(gradient, weights, ctx.counts)
        if ctx.needs_input_grad[1]:
            product = partial(stack_gradient, gradient, rows.detach(), ctx.counts, weights.dtype)
            weights_gradient = None if is_taken(ctx.leaf, product) else product()
        return rows_gradients, weights_gradient, None


def products_of_runs(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Multiply each run of rows (N, in) by its matrix of weights (X, out, in) transposed. Returns (N, out)."""
    if isinstance(counts, Tensor) and groups_scaled(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        return compat.scaled_grouped_product(*_flat(narrow(rows)), *_flat(narrow_stack(weights)), ends, rows.dtype)
    parts = zip(torch.split(rows, _on_host(counts)), weights, strict=True)
    products = [fp8.product(narrow(part), narrow(weight), rows.dtype) for part, weight in parts if len(part)]
    return torch.cat(products) if products else rows.new_zeros(0, weights.shape[1])


def narrow_stack(weights: Tensor) -> Narrow:
    """Round weights (X, out, in), some experts at a time: scaled copies take twice the memory of the result."""
    experts = max(1, PIECE // weights[0].numel())
    if experts >= len(weights) or fp8.in_one_kernel(weights):
        return narrow(weights)
    values = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales = torch.empty((*weights.shape[:2], 1), device=weights.device)
    for start in range(0, len(weights), experts):
        part = narrow(weights[start : start + experts])
        values[start : start + experts].copy_(part.values)
        scales[start : start + experts].copy_(part.scales)
    return Narrow(values, scales)


def rows_gradient(gradient: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Compute the gradient of rows (N, in) from gradient (N, out) and weights (X, out, in)."""
    return products_of_runs(gradient, weights.transpose(1, 2), counts)


def stack_gradient(gradient: Tensor, rows: Tensor, counts: Counts, dtype: torch.dtype) -> Tensor:
    """Compute the gradient (X, out, in) from gradient (N, out) and rows (N, in). Zero for empty experts."""
    if isinstance(counts, Tensor) and groups_scaled(rows):
        places, ends, length = aligned_positions(counts, len(rows))
        operands = (_aligned_columns(x, places, length, len(counts)) for x in (gradient, rows))
        stack = compat.scaled_grouped_product(*next(operands), *next(operands), ends, dtype)
        return stack.masked_fill_((counts == 0).view(-1, 1, 1), 0.0)  # a kernel may leave anything as an empty sum
    parts = zip(torch.split(gradient, _on_host(counts)), torch.split(rows, _on_host(counts)), strict=True)
    return torch.stack([fp8.weight_gradient(part, run, dtype) for part, run in parts])


def aligned_positions(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Place consecutive runs so that each begins at a multiple of 16, without a wait for the device.

    counts (X,). Returns the new position of each row (rows,), the ends of runs (X,) int32, and a length that none
    exceeds.
    """
    room = (counts + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    ends = room.cumsum(0)
    shift = (ends - room) - (counts.cumsum(0) - counts)
    places = torch.arange(rows, device=counts.device) + shift.repeat_interleave(counts, output_size=rows)
    length = (rows + (MULTIPLE - 1) * len(counts) + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return places, ends.to(torch.int32), length


def _aligned_columns(x: Tensor, places: Tensor, length: int, runs: int) -> tuple[Tensor, Tensor]:
    """Return the columns (C, length) of x (N, C) with aligned runs, and their scales (runs C,)."""
    if x.stride(-1) == 1 and fp8.in_one_kernel(x):
        from meshwright.kernels.triton import row_rounding

        codes, column_scales = row_rounding.turned(x, length, places)
        return codes, column_scales.view(-1).repeat(runs)
    scales = scales_of(x, 0)
    low = (x * scales.to(x.dtype)).to(torch.float8_e4m3fn).view(torch.uint8)  # torch copies 8-bit integers anywhere
    aligned = low.new_zeros(length, x.shape[1]).index_copy_(0, places, low)
    return aligned.t().contiguous().view(torch.float8_e4m3fn), (1 / scales).view(-1).repeat(runs)


def _flat(x: Narrow) -> tuple[Tensor, Tensor]:
    return x.values, x.scales.squeeze(-1)


def _on_host(counts: Counts) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else counts
