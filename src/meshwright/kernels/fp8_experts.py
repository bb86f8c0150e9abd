"""The products of a mixture of experts, of operands rounded to 8 bits as in kernels.fp8 (form FP8_ALL).

On a GPU with scaled grouped products one kernel takes the runs of all experts and reads their lengths from the device;
elsewhere each run is a product of kernels.fp8. The gradient of the stack adds over tokens: a run must then begin and
end at a multiple of 16, so that runs are copied apart, with zeros between them. All runs have the scales of the columns
of all rows: powers of two round the same whatever they are, but for what becomes subnormal.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fp8
from meshwright.kernels.fp8 import FP8_ALL, MULTIPLE, Narrow, narrow, scales_of
from meshwright.kernels.target import acts, kind
from meshwright.kernels.weight_gradients import as_leaf, is_taken

Counts = list[int] | Tensor
"""As kernels.experts.Counts."""
PIECE = 2**26
"""Elements of a stack that are rounded at a time, if no expert has more."""
GROUPED_ON = (9, 0)
"""The only compute capability with a scale for each row of a grouped product (torch 2.11 to 2.13)."""


def groups_scaled(rows: Tensor) -> bool:
    """Whether one kernel takes all runs."""
    if not (compat.HAS_SCALED_GROUPS and kind(rows) == "cuda" and len(rows)):
        return False
    return bool(acts()) or torch.cuda.get_device_capability(rows.device) == GROUPED_ON


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """rows (N, in) sorted by expert, weights (X, out, in), counts: rows of each -> (N, out)."""
    parts = zip(torch.split(rows, _known(counts)), weights, strict=True)
    return torch.cat([fp8.linear_reference(part, weight, form=FP8_ALL) for part, weight in parts])


def expert_linear(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """As the reference."""
    found: Tensor = _Experts.apply(rows, weights, counts)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.leaf = as_leaf(weights)
        ctx.counts = counts if groups_scaled(rows) else _known(counts)
        return products_of_runs(rows, weights, ctx.counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = rows_gradient(gradient, weights, ctx.counts)
        if ctx.needs_input_grad[1]:
            product = partial(stack_gradient, gradient, rows.detach(), ctx.counts, weights.dtype)
            of_weights = None if is_taken(ctx.leaf, product) else product()
        return of_rows, of_weights, None


def products_of_runs(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """rows (N, in), weights (X, out, in) -> each run times its matrix transposed (N, out)."""
    if isinstance(counts, Tensor) and groups_scaled(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        return compat.scaled_grouped_product(*_flat(narrow(rows)), *_flat(narrow_stack(weights)), ends, rows.dtype)
    parts = zip(torch.split(rows, _known(counts)), weights, strict=True)
    made = [fp8.product(narrow(part), narrow(weight), rows.dtype) for part, weight in parts if len(part)]
    return torch.cat(made) if made else rows.new_zeros(0, weights.shape[1])


def narrow_stack(weights: Tensor) -> Narrow:
    """weights (X, out, in), some experts at a time: scaled copies are twice as large as what comes of them."""
    experts = max(1, PIECE // weights[0].numel())
    if experts >= len(weights) or fp8.in_one_kernel(weights):
        return narrow(weights)
    values = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales = torch.empty((*weights.shape[:2], 1), device=weights.device)
    for start in range(0, len(weights), experts):
        some = narrow(weights[start : start + experts])
        values[start : start + experts].copy_(some.values)
        scales[start : start + experts].copy_(some.scales)
    return Narrow(values, scales)


def rows_gradient(gradient: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """gradient (N, out), weights (X, out, in) -> (N, in)."""
    return products_of_runs(gradient, weights.transpose(1, 2), counts)


def stack_gradient(gradient: Tensor, rows: Tensor, counts: Counts, dtype: torch.dtype) -> Tensor:
    """gradient (N, out), rows (N, in) -> (X, out, in); zero for an expert without rows."""
    if isinstance(counts, Tensor) and groups_scaled(rows):
        places, ends, length = places_apart(counts, len(rows))
        sides = (_columns_apart(one, places, length, len(counts)) for one in (gradient, rows))
        found = compat.scaled_grouped_product(*next(sides), *next(sides), ends, dtype)
        return found.masked_fill_((counts == 0).view(-1, 1, 1), 0.0)  # whatever a kernel makes of a sum of nothing
    parts = zip(torch.split(gradient, _known(counts)), torch.split(rows, _known(counts)), strict=True)
    return torch.stack([fp8.weight_gradient(part, run, dtype) for part, run in parts])


def places_apart(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """counts (X,) of rows that follow one another -> where each row lies (rows,) when every run begins at a multiple of
    16, the ends of runs then (X,) int32, and a length that none goes beyond; without a wait for the device."""
    room = (counts + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    ends = room.cumsum(0)
    shift = (ends - room) - (counts.cumsum(0) - counts)
    places = torch.arange(rows, device=counts.device) + shift.repeat_interleave(counts, output_size=rows)
    length = (rows + (MULTIPLE - 1) * len(counts) + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return places, ends.to(torch.int32), length


def _columns_apart(x: Tensor, places: Tensor, length: int, runs: int) -> tuple[Tensor, Tensor]:
    """x (N, C) -> columns (C, length) with runs apart, and their scales (runs C,)."""
    if x.stride(-1) == 1 and fp8.in_one_kernel(x):
        from meshwright.kernels.triton import narrowing

        codes, own_scales = narrowing.turned(x, length, places)
        return codes, own_scales.view(-1).repeat(runs)
    scales = scales_of(x, 0)
    low = (x * scales.to(x.dtype)).to(torch.float8_e4m3fn).view(torch.uint8)  # torch copies 8-bit integers anywhere
    apart = low.new_zeros(length, x.shape[1]).index_copy_(0, places, low)
    return apart.t().contiguous().view(torch.float8_e4m3fn), (1 / scales).view(-1).repeat(runs)


def _flat(x: Narrow) -> tuple[Tensor, Tensor]:
    return x.values, x.scales.squeeze(-1)


def _known(counts: Counts) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else counts
