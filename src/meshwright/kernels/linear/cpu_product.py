"""Matrix products of fp32 on processors for which torch's BLAS library has no good code.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors only. On AMD's it is left with AVX2.
oneDNN, which torch ships too, asks the processor what it can. It is about twice as fast on an EPYC of Zen 5, 1.1 to 1.5
times on one of Zen 4 (`python -m benchmarks.product_rates`). On such a processor the functions below call oneDNN,
elsewhere torch.

Autograd functions call them. Where a backward pass is recorded for a second derivative, products are torch's. The
product is a custom operator, opaque to the compiler, which supports oneDNN's product with frozen weights only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.compat import cpu
from meshwright.kernels.chooser import device_kind, simulated_kind
from meshwright.spec.memory.held import ADDED_AT_ONCE

LEAST = 2**20
"""Multiplications from which oneDNN is faster: a call costs some 10 microseconds more."""
WIDENED_AT_ONCE = 2**20
"""Elements of a 16-bit matrix widened at a time for fp32 products: 4 MiB, which the cache holds.

glibc returns blocks of more than 32 MiB to the system at once, and paging them in again costs more than a product of
few rows.
"""
_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("cpu_product(Tensor a, Tensor b, Tensor? bias) -> Tensor")


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN's linear product has plain loops for matrices with gaps.
    has_gaps = not b.is_contiguous() and not b.t().is_contiguous()
    if not has_gaps and (a.is_contiguous() or a.dim() > 2):
        return compat.onednn_product(a.contiguous(), b, bias)
    product = cpu.multiply_fp32(a.reshape(-1, a.shape[-1]), b.t()).view(*a.shape[:-1], b.shape[0])
    return product if bias is None else product.add_(bias)


_library.impl("cpu_product", _product, "CPU")
torch.library.register_fake("meshwright::cpu_product", lambda a, b, bias: a.new_empty(*a.shape[:-1], b.shape[0]))


def pays(a: Tensor, columns: int) -> bool:
    """Return whether the product of a (..., K) with a matrix (K, columns) is oneDNN's."""
    if a.dtype != torch.float32 or not compat.blas_is_slow() or device_kind(a) != "cpu":
        return False
    return a.numel() * columns >= LEAST and compat.lies_in_memory(a) and cpu.fp32_products_are_exact()


def _is_recorded(*operands: Tensor | None) -> bool:
    """Return whether autograd records these: the operator has no gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(operand is not None and operand.requires_grad for operand in operands)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., K) by weight (N, K) transposed and add bias (N,). Returns (..., N)."""
    if not pays(x, weight.shape[0]) or _is_recorded(x, weight, bias):
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.meshwright.cpu_product(x, weight, bias)
    return product


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a (M, K) by b (K, N). Returns (M, N)."""
    if not pays(a, b.shape[1]) or _is_recorded(a, b):
        return torch.mm(a, b)
    product: Tensor = torch.ops.meshwright.cpu_product(a, b.t(), None)
    return product


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
    """Set total (M, N) fp32 = beta total + a (M, K) times b (K, N), in place. With beta = 0 total is not read.

    A GPU adds inside the product, for which a dry run takes no memory. A CPU rounds its 16-bit product and adds some
    rows at a time, while the cache holds them: torch would widen the whole summand. The compiler gets a separate
    product and fuses the sum.
    """
    if torch.compiler.is_compiling():
        return total.add_(multiply(a, b)) if beta else total.copy_(multiply(a, b))
    if device_kind(total) != "cpu":
        if not simulated_kind():
            compat.add_wide_product(total, a, b, beta)
        return total
    if total.dtype != a.dtype:
        rows = max(1, ADDED_AT_ONCE // max(1, total.shape[1]))
        for start in range(0, len(total), rows):
            part, product = total[start : start + rows], torch.mm(a[start : start + rows], b)
            part.add_(product) if beta else part.copy_(product)
        return total
    if not pays(a, b.shape[1]):
        return total.addmm_(a, b, beta=beta)
    return cpu.add_fp32_product(total if beta else total.zero_(), a, b)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x (..., K) by weight (N, K) transposed, add bias (N,), and round once. Returns (..., N).

    The weight has x's dtype, or 16 bits where x is fp32. Then it is widened some rows at a time.

    Args:
        dtype: Dtype of the result. None = that of x.
    """
    rows = _widened_rows(x, weight)
    if rows >= len(weight):
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype or x.dtype)
    products = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    for start in range(0, len(weight), rows):
        outputs = slice(start, start + rows)
        products[..., outputs] = linear(x, weight[outputs].float(), None if bias is None else bias[outputs].float())
    return products


def widened_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a (M, K) by b (K, N), where b has a's dtype, or 16 bits where a is fp32, as in `widened_linear`."""
    rows = _widened_rows(a, b)
    if rows >= len(b):
        return multiply(a, b.to(a.dtype))
    total = multiply(a[:, :rows], b[:rows].float())
    for start in range(rows, len(b), rows):
        add_product(total, a[:, start : start + rows], b[start : start + rows].float())
    return total


def _widened_rows(x: Tensor, matrix: Tensor) -> int:
    """Return how many rows of a matrix are widened at a time. All in compiled code, which would unroll the loop."""
    takes_all = matrix.dtype == x.dtype or torch.compiler.is_compiling()
    return len(matrix) if takes_all else max(1, WIDENED_AT_ONCE // max(1, matrix.shape[1]))
