"""Matrix product of a mixture of experts: rows sorted by expert, each run of rows times its expert's matrix.

On a GPU with grouped products one kernel takes all runs and reads their lengths from the device. Elsewhere the host
knows the lengths and calls one product for each run. Compiled code calls one operator, whatever the lengths: its input
and output have a fixed number of rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.chooser import device_kind, simulated_kind, uses_triton
from meshwright.kernels.linear import cpu_product, fp8
from meshwright.kernels.linear.linear import FP8_ALL, SAME, linear, linear_reference, product_dtype, weight_product
from meshwright.kernels.linear.weight_gradients import as_leaf, is_taken, leaf_at, splits, waits, whole

Counts = list[int] | Tensor
"""Rows of each expert: X numbers that the host knows, or (X,) on the device, which need not be waited for."""


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Multiply rows (N, in), sorted by expert, by their expert's matrix. Returns (N, out).

    weights (X, out, in); counts: rows per expert, summing to N.
    """
    parts = torch.split(rows, _on_host(counts))
    return torch.cat([linear_reference(part, weight) for part, weight in zip(parts, weights, strict=True)])


def expert_linear(rows: Tensor, weights: Tensor, counts: Counts, prefer: str = "auto", form: str = SAME) -> Tensor:
    """Multiply as the reference does, or in form FP8_ALL as that of kernels.linear.fp8.

    An expert without rows costs nothing and still gets a gradient of zero. The stack is unbound, not indexed: that
    stacks the gradients once, while each index would fill a whole stack.
    """
    if torch.compiler.is_compiling() and isinstance(counts, Tensor):
        compiled: Tensor = expert_product(rows, weights, counts, prefer, form, rows.requires_grad and waits(weights))
        return compiled
    if form == FP8_ALL:
        return fp8.expert_linear(rows, weights, counts)
    grouped = isinstance(counts, Tensor) and groups_on_device(rows, weights)
    if splits():
        product: Tensor = _StackProduct.apply(rows, weights, counts, grouped)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return product
    if isinstance(counts, Tensor) and not grouped and _groups_in_triton(rows, weights, prefer):
        from meshwright.kernels.triton import expert_rows

        return expert_rows.expert_linear(rows, weights, counts)
    if isinstance(counts, Tensor) and grouped:
        return expert_linear_grouped(rows, weights, counts)
    parts = zip(torch.split(rows, _on_host(counts)), weights.unbind(), strict=True)
    products = [linear(part, weight) for part, weight in parts if len(part)]
    # Without any row the product of none keeps the graph, so weights still get a gradient of zeros.
    return torch.cat(products) if products else linear(rows, weights[0])


def keeps_counts(rows: Tensor, weights: Tensor, prefer: str) -> bool:
    """Return whether counts may stay on the device.

    They may for torch's grouped product, for Triton's (except in a split pass), and for the operator of compiled code.
    """
    if torch.compiler.is_compiling():
        return True
    return groups_on_device(rows, weights) or (not splits() and _groups_in_triton(rows, weights, prefer))


def _groups_in_triton(rows: Tensor, weights: Tensor, prefer: str) -> bool:
    return bool(len(rows)) and rows.dtype == weights.dtype and uses_triton("grouped", rows, prefer=prefer)


def groups_on_device(rows: Tensor, weights: Tensor) -> bool:
    """Return whether torch's grouped product runs: for bf16 with rows of a multiple of 16 bytes.

    Counts may then stay on the device. Without a row the host knows all counts, and reading them would be a wait.
    Before compute capability 9 torch itself falls back to a loop that waits for the counts.
    """
    if not (hasattr(F, "grouped_mm") and device_kind(rows) == "cuda" and rows.dtype == weights.dtype == torch.bfloat16):
        return False
    if not len(rows):
        return False
    aligned = weights.shape[-1] % 8 == 0 and weights.shape[-2] % 8 == 0
    return aligned and (bool(simulated_kind()) or torch.cuda.get_device_capability(rows.device) >= (9, 0))


def leaves_garbage(device: torch.device) -> bool:
    """Return whether torch's grouped product leaves stale memory as the gradient of experts without rows.

    It does on B200 (pytorch issue 172439). Elsewhere zeroing would be a pass over every gradient for nothing.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def zero_of_empty(stack: Tensor, counts: Tensor) -> Tensor:
    """Zero the gradient of a stack (X, out, in) in place for experts without rows, where the device needs it."""
    return stack.masked_fill_((counts == 0).view(-1, 1, 1), 0.0) if leaves_garbage(stack.device) else stack


def grouped_product(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Call torch's grouped product, with `counts` (X,) in each group.

    Multiplies rows of a (N, I) by matrices b (X, I, O) to (N, O), or columns of a (O, N) by rows of b (N, I) to (X, O,
    I).
    """
    # torch refuses either an empty matrix or its transpose, whatever their strides.
    if not a.numel():
        return a.new_zeros((*counts.shape, len(a), b.shape[1]) if b.dim() == 2 else (len(a), b.shape[2]))
    ends = counts.cumsum(0, dtype=torch.int32)
    product: Tensor = F.grouped_mm(_as_operand(a), _as_operand(b), offs=ends)
    return product


def _as_operand(x: Tensor) -> Tensor:
    """Return x (..., M, N), copied where torch would refuse it (aten/src/ATen/native/GroupedMMUtils.h).

    Its rows or its columns must be contiguous, and start at multiples of 16 bytes. The gradient of a plain sum, say, is
    one number with strides of 0.
    """
    step = 16 // x.element_size()
    for inner, outer in ((-1, -2), (-2, -1)):
        is_dense = x.stride(inner) == 1 and x.stride(outer) >= max(1, x.shape[inner])
        if is_dense and x.stride(outer) % step == x.storage_offset() % step == 0:
            return x
    # Rows would begin between multiples of 16 bytes, so columns must be contiguous.
    if x.shape[-1] % step:
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    return x.clone(memory_format=torch.contiguous_format)


def expert_linear_grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply as the reference does in one kernel, for counts (X,) on the device. Gradients are grouped too."""
    product: Tensor = _StackProduct.apply(rows, weights, counts, True)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return product


class _StackProduct(torch.autograd.Function):
    """Products with one gradient of the whole stack, which may be deferred.

    torch's own gradients of grouped products refuse a gradient whose strides are not a product's.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Counts, grouped: bool) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.leaf = as_leaf(weights)
        ctx.counts = counts if grouped else _on_host(counts)
        if isinstance(ctx.counts, Tensor):
            return grouped_product(rows, weights.transpose(-2, -1), ctx.counts)
        parts = zip(torch.split(rows, ctx.counts), weights, strict=True)
        return torch.cat([linear(part, weight) for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        rows_gradient = weights_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = _rows_gradient(gradient, weights, ctx.counts)
        if ctx.needs_input_grad[1]:
            product = partial(_stack_gradient, gradient, rows.detach(), ctx.counts, weights.dtype)
            weights_gradient = None if is_taken(ctx.leaf, product) else product()
        return rows_gradient, weights_gradient, None, None


def _rows_gradient(gradient: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Compute the gradient of rows (N, in) from gradient (N, out) and weights (X, out, in)."""
    if isinstance(counts, Tensor):
        return grouped_product(gradient, weights, counts)
    wide = product_dtype(gradient)
    parts = zip(torch.split(gradient, counts), weights, strict=True)
    return torch.cat(
        [cpu_product.multiply(part.to(wide), weight.to(wide)).to(gradient.dtype) for part, weight in parts]
    )


def _stack_gradient(gradient: Tensor, rows: Tensor, counts: Counts, dtype: torch.dtype) -> Tensor:
    """Compute the gradient (X, out, in) from gradient (N, out) and rows (N, in). Zero for empty experts."""
    if isinstance(counts, Tensor):
        return zero_of_empty(grouped_product(gradient.t(), rows, counts), counts)
    parts = zip(torch.split(gradient, counts), torch.split(rows, counts), strict=True)
    return torch.stack([weight_product(part, run, dtype) for part, run in parts])


def _on_host(counts: Counts) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else counts


@torch.library.custom_op("meshwright::expert_product", mutates_args=())
def expert_product(rows: Tensor, weights: Tensor, counts: Tensor, prefer: str, form: str, later: bool) -> Tensor:
    """Multiply as expert_linear does, as one operator of compiled code. `later` defers the weights' gradient."""
    # The operator's own backward function defers (`later`), so nothing inside has to be splittable.
    with whole():
        return expert_linear(rows, weights, counts, prefer, form)


@expert_product.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor, prefer: str, form: str, later: bool) -> Tensor:
    return rows.new_empty(len(rows), weights.shape[1])


@torch.library.custom_op("meshwright::expert_product_backward", mutates_args=())
def expert_product_backward(
    gradient: Tensor, rows: Tensor, weights: Tensor, counts: Tensor, prefer: str, form: str, later: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the `wanted` gradients of rows and weights. Those of the weights may be deferred with `later`."""
    rows_gradient, weights_gradient = _gradient_functions(gradient, rows, weights, counts, prefer, form)
    gradients = [rows_gradient()] if wanted[0] else []
    if wanted[1] and not (later and is_taken(leaf_at(weights), weights_gradient)):
        gradients.append(weights_gradient())
    return gradients


@expert_product_backward.register_fake
def _(
    gradient: Tensor, rows: Tensor, weights: Tensor, counts: Tensor, prefer: str, form: str, later: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    wants = zip((rows, weights), (wanted[0], wanted[1] and not later), strict=True)
    return [like.new_empty(like.shape) for like, is_wanted in wants if is_wanted]


def _gradient_functions(
    gradient: Tensor, rows: Tensor, weights: Tensor, counts: Counts, prefer: str, form: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions that compute the gradients of rows and of weights, as expert_linear would."""
    if form == FP8_ALL:
        return (
            partial(fp8.rows_gradient, gradient, weights, counts),
            partial(fp8.stack_gradient, gradient, rows, counts, weights.dtype),
        )
    grouped = groups_on_device(rows, weights)
    if isinstance(counts, Tensor) and not grouped and _groups_in_triton(rows, weights, prefer):
        from meshwright.kernels.triton import expert_rows

        return expert_rows.gradients(gradient, rows, weights, counts)
    counts = counts if grouped else _on_host(counts)
    return (
        partial(_rows_gradient, gradient, weights, counts),
        partial(_stack_gradient, gradient, rows, counts, weights.dtype),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weights, counts, ctx.prefer, ctx.form, ctx.later = inputs
    ctx.save_for_backward(rows, weights, counts)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    rows, weights, counts = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    options = ctx.prefer, ctx.form, ctx.later
    gradients = iter(expert_product_backward(gradient, rows, weights, counts, *options, wanted))
    wants = wanted[0], wanted[1] and not ctx.later
    return *(next(gradients) if is_wanted else None for is_wanted in wants), None, None, None, None


expert_product.register_autograd(_backward, setup_context=_save_for_backward)


class _Spread(torch.autograd.Function):
    """Copies of rows: x (N, D) -> (N k, D), where row i is x[order[i] // k].

    The gradient is gathered and summed over k.

    Left to autograd it would be added row by row into zeros: slower, and on a GPU in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        rows = gradient.index_select(0, inverse)
        return rows if ctx.k == 1 else rows.view(-1, ctx.k, rows.shape[1]).sum(1), None, None, None


def spread(x: Tensor, order: Tensor, inverse: Tensor, k: int = 1, prefer: str = "auto") -> Tensor:
    """Copy each row of x (N, D) k times, in an `order` (N k,) of the copies with its `inverse` (N k,)."""
    if len(order) and uses_triton("permute", x, prefer=prefer):
        from meshwright.kernels.triton import expert_rows

        return expert_rows.spread(x, order, inverse, k)
    rows: Tensor = _Spread.apply(x, order, inverse, k)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rows


def combine_reference(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Sum the k rows of each token, times weights (N, k) rounded to the rows' dtype. Returns (N, D).

    rows (N k, D); `inverse` (N k,) says where each token's rows are.
    """
    mine = rows.index_select(0, inverse).view(*weights.shape, -1)
    return (mine * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


def combine(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, prefer: str = "auto") -> Tensor:
    """Combine as the reference does. The rows' gradient is gathered by `order`, the inverse of `inverse`."""
    if len(order) and uses_triton("permute", rows, prefer=prefer):
        from meshwright.kernels.triton import expert_rows

        return expert_rows.combine(rows, weights, inverse)
    mine = spread(rows, inverse, order, prefer=prefer).view(*weights.shape, -1)
    return (mine * weights.unsqueeze(-1).to(mine.dtype)).sum(1)
