"""Matrix products of fp32 on processors that torch's BLAS library has no good code for.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors only; on AMD's it is left with AVX2.
oneDNN, which torch ships too, asks the processor what it can: about twice as fast on an EPYC of Zen 5, 1.1 to 1.5 times
on one of Zen 4 (`python -m benchmarks.product_rates`). On such a processor the functions below are oneDNN's, elsewhere
torch's own. Autograd functions call them; where one's backward pass is recorded for a second derivative, products are
torch's. The product is an operator of its own, so that the compiler, which knows oneDNN's with frozen weights alone,
does not look inside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.compat import onednn_products
from meshwright.kernels.target import acts, kind
from meshwright.spec.head_chunk import ADDED_AT_ONCE

LEAST = 2**20
"""Multiplications from which on oneDNN is the faster one: a call of it costs some 10 microseconds more."""
WIDENED_AT_ONCE = 2**20
"""Elements of a matrix of 16 bits that are widened at a time, where products are taken in fp32: 4 MiB, which the cache
holds. Of more than 32 MiB glibc has the system give every page anew, which costs more than a product of few rows."""
_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("cpu_product(Tensor a, Tensor b, Tensor? bias) -> Tensor")


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    gaps = not b.is_contiguous() and not b.t().is_contiguous()  # oneDNN's linear product has plain loops for them
    if not gaps and (a.is_contiguous() or a.dim() > 2):
        return compat.onednn_product(a.contiguous(), b, bias)
    found = onednn_products.multiply(a.reshape(-1, a.shape[-1]), b.t()).view(*a.shape[:-1], b.shape[0])
    return found if bias is None else found.add_(bias)


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0])


_library.impl("cpu_product", _product, "CPU")
torch.library.register_fake("meshwright::cpu_product", _shape)


def pays(a: Tensor, columns: int) -> bool:
    """Whether the product of a (..., K) with a matrix (K, columns) is oneDNN's."""
    if a.dtype != torch.float32 or not compat.blas_is_slow() or kind(a) != "cpu":
        return False
    return a.numel() * columns >= LEAST and compat.lies_in_memory(a) and onednn_products.are_exact()


def _is_recorded(*operands: Tensor | None) -> bool:
    """Whether autograd would follow: the operator has no gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(one is not None and one.requires_grad for one in operands)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,) -> (..., N)."""
    if not pays(x, weight.shape[0]) or _is_recorded(x, weight, bias):
        return F.linear(x, weight, bias)
    found: Tensor = torch.ops.meshwright.cpu_product(x, weight, bias)
    return found


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N) -> (M, N)."""
    if not pays(a, b.shape[1]) or _is_recorded(a, b):
        return torch.mm(a, b)
    found: Tensor = torch.ops.meshwright.cpu_product(a, b.t(), None)
    return found


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
    """total (M, N) fp32 = beta total + a (M, K) times b (K, N), in place; with beta = 0 the total is not read. A GPU
    adds inside of the product, for which a dry run takes no memory. A CPU's product of 16 bits is rounded and added
    some rows at a time, while the cache holds it: torch widens all that it adds. The compiler gets a product of its
    own: it fuses the sum."""
    if torch.compiler.is_compiling():
        return total.add_(multiply(a, b)) if beta else total.copy_(multiply(a, b))
    if kind(total) != "cpu":
        if not acts():
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
    return onednn_products.add_product(total if beta else total.zero_(), a, b)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,) -> (..., N), rounded to `dtype` once (None: as x). The
    weight is of x's dtype, or of 16 bits beside fp32: then it is widened some rows at a time."""
    rows = _widened_rows(x, weight)
    if rows >= len(weight):
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype or x.dtype)
    found = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    for start in range(0, len(weight), rows):
        some = slice(start, start + rows)
        found[..., some] = linear(x, weight[some].float(), None if bias is None else bias[some].float())
    return found


def widened_multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N) -> (M, N), b of a's dtype, or of 16 bits beside fp32: as `widened_linear`."""
    rows = _widened_rows(a, b)
    if rows >= len(b):
        return multiply(a, b.to(a.dtype))
    total = multiply(a[:, :rows], b[:rows].float())
    for start in range(rows, len(b), rows):
        add_product(total, a[:, start : start + rows], b[start : start + rows].float())
    return total


def _widened_rows(x: Tensor, matrix: Tensor) -> int:
    """Of a matrix, as many as are widened at a time for x. The compiler would unroll the loop."""
    whole = matrix.dtype == x.dtype or torch.compiler.is_compiling()
    return len(matrix) if whole else max(1, WIDENED_AT_ONCE // max(1, matrix.shape[1]))
