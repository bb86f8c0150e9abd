"""Linear products, and those of experts, of operands rounded to 8 bits: e4m3, 4 bits of exponent and 3 of mantissa.

    y  = x W^T     x scaled by rows, W by rows (outputs)
    dX = G W       G scaled by rows, W by columns (inputs)
    dW = G^T x     form FP8: unscaled in 16 bits, since one outlier spoils a whole row of tokens
                   form FP8_ALL: both scaled by columns, each over all tokens

Each row has its own scale: the power of two that brings its largest number just below 448, so scaling itself rounds
nothing (Micikevicius et al. 2022, arXiv:2209.05433). The two forms are torchao's `rowwise_with_gw_hp` and `rowwise`.
Gradients are e4m3 too, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Sums are fp32.

A device without such a product rounds the same way and multiplies in fp32. Its results differ only by the order of
sums, and it is slower.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import device_kind, simulated_kind, uses_triton
from meshwright.kernels.linear.weight_gradients import as_leaf, is_taken

SAME, FP8, FP8_ALL = "same", "fp8", "fp8-all"
"""Forms of a product, as in recipe.products: operands unchanged, or rounded to 8 bits.

FP8 excludes gradients of weights, and experts.
"""
LARGEST = 448.0
"""Largest number of e4m3."""
SMALLEST = 1e-12
"""Least magnitude that a row's largest number counts as, which gives zeros a scale."""
MULTIPLE = 16
"""Multiple that both dims of a matrix must be for products of tensor cores."""
LEAST = (8, 9)
"""Lowest compute capability whose tensor cores multiply 8-bit numbers."""
Counts = list[int] | Tensor
"""Same as kernels.experts.experts.Counts."""
PIECE = 2**26
"""Elements of a stack that are rounded at a time, if no expert has more."""
GROUPED_ON = (9, 0)
"""The only compute capability with a scale for each row of a grouped product (torch 2.11 to 2.13)."""


class Narrow(NamedTuple):
    """x (N, K) as e4m3 values times a scale of each row (N, 1) fp32."""

    values: Tensor
    scales: Tensor

    def wide(self) -> Tensor:
        """Return the represented numbers in fp32."""
        return self.values.float() * self.scales


def missing(device: torch.device) -> str:
    """Return why a device has no 8-bit products. Empty = it has."""
    if device.type != "cuda":
        return f"a {device.type.upper()} multiplies no 8-bit numbers"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}) multiplies no 8-bit numbers"
    return ""


def narrow(x: Tensor | Narrow, prefer: str = "auto") -> Narrow:
    """Round x (..., N, K) to e4m3, unless it already is. `prefer` is one of chooser.PREFERENCES."""
    if isinstance(x, Narrow):
        return x
    if in_one_kernel(x, prefer):
        from meshwright.kernels.triton import row_rounding

        # A transposed view has contiguous columns: they are read as they lie, not copied first.
        if x.stride(-1) != 1 and x.stride(-2) == 1:
            return Narrow(*row_rounding.turned(x.mT, x.shape[-1]))
        codes, scales = row_rounding.rounded(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        return Narrow(codes.view(x.shape), scales.view(*x.shape[:-1], 1))
    # A dry run holds what the kernel writes, not what plain code would.
    if simulated_kind() == "cuda" and compat.is_fake(x):
        codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        return Narrow(codes, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
    scales = scales_of(x, -1)
    return Narrow((x * scales.to(x.dtype)).to(torch.float8_e4m3fn).contiguous(), 1 / scales)


def in_one_kernel(x: Tensor, prefer: str = "auto") -> bool:
    """Return whether the kernels of triton/row_rounding.py convert x, without a copy of it."""
    return x.numel() > 0 and uses_triton("narrow", x, prefer=prefer)


def narrow_columns(x: Tensor | Narrow, prefer: str = "auto") -> Narrow:
    """Round the columns of x (N, C) to (C, N), padded with zeros to a multiple over which products can add."""
    if isinstance(x, Narrow):
        return x
    # Rows become the inner dimension, which tensor cores take in multiples. Zeros add nothing to a sum.
    missing_rows = -len(x) % MULTIPLE
    if x.stride(-1) == 1 and in_one_kernel(x, prefer):
        from meshwright.kernels.triton import row_rounding

        return Narrow(*row_rounding.turned(x, len(x) + missing_rows))
    return narrow((F.pad(x, (0, 0, 0, missing_rows)) if missing_rows else x).t())


def scales_of(x: Tensor, dim: int) -> Tensor:
    """Return scales fp32, of size 1 at `dim`, that bring the largest number along it just below LARGEST."""
    peaks = x.abs().amax(dim, keepdim=True).float().clamp(min=SMALLEST)
    return torch.exp2(torch.floor(torch.log2(LARGEST / peaks)))


def product(a: Narrow, b: Narrow, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply a (N, K) by b (M, K) transposed and add bias (M,). Returns (N, M), rounded once."""
    if device_kind(a.values) == "cuda" and (simulated_kind() or not missing(a.values.device)):
        return compat.scaled_product(*a, *b, bias, dtype)
    y = F.linear(a.values.float(), b.values.float()) * a.scales * b.scales.t()
    return (y if bias is None else y + bias).to(dtype)


def products(x: Tensor, weights: Iterable[Tensor | Narrow], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Multiply x (..., in) by each weight (out, in) transposed and add its bias. x is rounded once."""
    rows = narrow(x.reshape(-1, x.shape[-1]))
    outputs = (product(rows, narrow(weight), x.dtype, bias) for weight, bias in zip(weights, biases, strict=True))
    return tuple(y.view(*x.shape[:-1], -1) for y in outputs)


def products_with(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return `products` with fixed weights, which are rounded once for several x."""
    return partial(products, weights=[narrow(weight) for weight in weights], biases=biases)


def input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor | Narrow]) -> Tensor:
    """Return the gradient of x (..., in) from the gradients (..., out) of several products of x."""
    first, total = gradients[0], None
    for gradient, weight in zip(gradients, weights, strict=True):
        columns = narrow(weight if isinstance(weight, Narrow) else weight.t())
        part = product(narrow(gradient.reshape(-1, gradient.shape[-1])), columns, first.dtype)
        # torch's scaled product adds to no sum, so each part is rounded before it is added.
        total = part if total is None else total + part
    assert total is not None
    return total.view(*first.shape[:-1], -1)


def weight_gradient(gradient: Tensor, x: Tensor | Narrow, dtype: torch.dtype) -> Tensor:
    """Return gradient^T x (out, in) from gradient (N, out) and x (N, in), or x's `narrow_columns`."""
    if not len(gradient):
        assert isinstance(x, Tensor)
        return gradient.new_zeros(gradient.shape[1], x.shape[1], dtype=dtype)
    return product(narrow_columns(gradient), narrow_columns(x), dtype)


class _ReferenceProduct(torch.autograd.Function):
    """The three products written out in plain torch, on the numbers that the rounded operands represent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.form = form
        return (narrow(x, "eager").wide() @ narrow(weight, "eager").wide().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_gradient = (narrow(gradient, "eager").wide() @ narrow(weight.t(), "eager").wide().t()).to(x.dtype)
        if ctx.form == FP8_ALL and len(x):
            columns = narrow(gradient.t(), "eager").wide(), narrow(x.t(), "eager").wide()
            return x_gradient, (columns[0] @ columns[1].t()).to(weight.dtype), None
        return x_gradient, (gradient.float().t() @ x.float()).to(weight.dtype), None


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = FP8) -> Tensor:
    """Multiply x (..., in) by weight (out, in) transposed and add bias (out,)."""
    y: Tensor = _ReferenceProduct.apply(x.reshape(-1, x.shape[-1]), weight, form)  # type: ignore[no-untyped-call]  # torch has no annotations there
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def linears_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = FP8
) -> tuple[Tensor, ...]:
    """Apply several linear layers to one x."""
    return tuple(linear_reference(x, weight, bias, form) for weight, bias in zip(weights, biases, strict=True))


def swiglu_linear_reference(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, summed: Any = None, form: str = FP8
) -> Tensor:
    """Compute as kernels.swiglu.swiglu_linear_reference does."""
    product = summed.linear if summed else partial(linear_reference, form=form)
    y: Tensor = product(F.silu(gate) * up, weight, bias)
    return y


def groups_scaled(rows: Tensor) -> bool:
    """Return whether one kernel takes all runs."""
    if not (compat.HAS_SCALED_GROUPS and device_kind(rows) == "cuda" and len(rows)):
        return False
    return bool(simulated_kind()) or torch.cuda.get_device_capability(rows.device) == GROUPED_ON


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Multiply rows (N, in), sorted by expert, by weights (X, out, in). Returns (N, out)."""
    parts = zip(torch.split(rows, _on_host(counts)), weights, strict=True)
    return torch.cat([linear_reference(part, weight, form=FP8_ALL) for part, weight in parts])


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
    products = [product(narrow(part), narrow(weight), rows.dtype) for part, weight in parts if len(part)]
    return torch.cat(products) if products else rows.new_zeros(0, weights.shape[1])


def narrow_stack(weights: Tensor) -> Narrow:
    """Round weights (X, out, in), some experts at a time: scaled copies take twice the memory of the result."""
    experts = max(1, PIECE // weights[0].numel())
    if experts >= len(weights) or in_one_kernel(weights):
        return narrow(weights)
    # Written into the result piece by piece: a list of pieces would be joined in a second copy.
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
        # A kernel may leave anything as an empty sum.
        return stack.masked_fill_((counts == 0).view(-1, 1, 1), 0.0)
    parts = zip(torch.split(gradient, _on_host(counts)), torch.split(rows, _on_host(counts)), strict=True)
    return torch.stack([weight_gradient(part, run, dtype) for part, run in parts])


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
    if x.stride(-1) == 1 and in_one_kernel(x):
        from meshwright.kernels.triton import row_rounding

        codes, column_scales = row_rounding.turned(x, length, places)
        # A column has one scale over all tokens. The product asks for one in each run.
        return codes, column_scales.view(-1).repeat(runs)
    scales = scales_of(x, 0)
    low = (x * scales.to(x.dtype)).to(torch.float8_e4m3fn).view(torch.uint8)  # torch copies 8-bit integers anywhere
    aligned = low.new_zeros(length, x.shape[1]).index_copy_(0, places, low)
    return aligned.t().contiguous().view(torch.float8_e4m3fn), (1 / scales).view(-1).repeat(runs)


def _flat(x: Narrow) -> tuple[Tensor, Tensor]:
    return x.values, x.scales.squeeze(-1)


def _on_host(counts: Counts) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else counts
