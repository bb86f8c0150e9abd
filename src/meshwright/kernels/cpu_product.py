"""Matrix products of fp32 on processors that torch's BLAS library has no good code for.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors only; on AMD's it is left with AVX2.
oneDNN, which torch ships too, asks the processor what it can: about twice as fast on an EPYC of Zen 5, 1.1 to 1.5 times
on one of Zen 4 where no operand is copied (`python -m benchmarks.product_rates`). On such a processor the functions
below are oneDNN's, elsewhere torch's own. None has a gradient: autograd functions call them. The product is an operator
of its own, so that the compiler, which knows oneDNN's with frozen weights alone, does not look inside. A transposed
first operand is copied in the operator, part by part: the compiler would make all copies of a backward pass at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels import training_rows
from meshwright.kernels.compiled.training_library import VECTOR
from meshwright.kernels.target import kind

LEAST = 2**20
"""Multiplications from which on oneDNN is the faster one: a call of it costs some 10 microseconds more."""
AT_ONCE = 2**18
"""Elements of a product that is added to another, or of its first operand, beside which no more are made: 1 MiB."""
COPIED_AT_ONCE, FEWEST_ROWS = 2**20, 512
"""Elements of a transposed first operand that are copied at a time, since oneDNN reads rows: 4 MiB. Below 512 rows a
product is slower; from there on it is as fast as of one copy, or faster: that one leaves the cache."""
WIDENED_AT_ONCE = 2**20
"""Elements of a matrix of 16 bits that are widened at a time, where products are taken in fp32: 4 MiB, which the cache
holds. Of more than 32 MiB glibc has the system give every page anew, which costs more than a product of few rows."""

_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("cpu_product(Tensor a, Tensor b, Tensor? bias) -> Tensor")


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.is_contiguous() or a.dim() > 2:
        return compat.onednn_product(a.contiguous(), b, bias)
    if _is_tall(a, b, bias):
        return a.new_empty(a.shape[0], b.shape[0]).copy_(_by_parts(b, a, None, _rows_at_once(b, a)).t())
    return _by_parts(a, b, bias, _rows_at_once(a, b))


def _is_tall(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether b, not a, is copied, and the result transposed: it is so much smaller."""
    return bias is None and 2 * a.shape[0] > 3 * b.shape[0] and a.shape[1] > b.shape[0]


def _rows_at_once(a: Tensor, b: Tensor) -> int:
    """Of K, of which the columns of a are copied and multiplied at a time."""
    rows = max(FEWEST_ROWS, COPIED_AT_ONCE // a.shape[0])
    whole = a.shape[1] <= max(rows, 2 * b.shape[0])  # parts of the result would be as large as the copy
    return a.shape[1] if whole else rows


def scratch_bytes(a: Tensor, b: Tensor, bias: Tensor | None = None) -> int:
    """What the operator takes beside its result and gives back: copies of operands, and the part that is added."""
    if a.is_contiguous():
        return 0
    if a.dim() > 2:
        return a.nbytes
    if _is_tall(a, b, bias):
        return _parts_bytes(b, a) + a.shape[0] * b.shape[0] * a.element_size()
    return _parts_bytes(a, b)


def _parts_bytes(a: Tensor, b: Tensor) -> int:
    """What `_by_parts` takes beside its result."""
    rows = _rows_at_once(a, b)
    gaps = rows < a.shape[1] and not b.t().is_contiguous()
    return (a.shape[0] * (rows + b.shape[0]) + gaps * rows * b.shape[0]) * a.element_size()


def _by_parts(a: Tensor, b: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """a (M, K) times b (N, K) transposed, summed over runs of K. The result, which lives on, is taken before the
    copies: malloc would keep the room of each below it. Of a part of b whose rows have gaps oneDNN makes a product a
    thousand times as slow: it is copied, too."""
    total = a.new_empty(a.shape[0], b.shape[0])
    for number, (left, right) in enumerate(zip(a.split(rows, 1), b.split(rows, 1), strict=True)):
        right = right if right.t().is_contiguous() else right.contiguous()
        part = compat.onednn_product(_copied(left), right, None if number else bias)
        total = total.add_(part) if number else total.copy_(part)
        del part  # else it stands beside the next
    return total


def _copied(a: Tensor) -> Tensor:
    """a (M, K) contiguous, where its columns are."""
    rows = a.t()
    fits = rows.dtype == torch.float32 and rows.stride(-1) == 1 and len(rows) % VECTOR == 0
    if fits and training_rows.takes(rows):
        return training_rows.transposed(rows)
    return a.contiguous()


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0])


_library.impl("cpu_product", _product, "CPU")
torch.library.register_fake("meshwright::cpu_product", _shape)


def pays(a: Tensor, columns: int) -> bool:
    """Whether the product of a (..., K) with a matrix (K, columns) is oneDNN's."""
    if a.dtype != torch.float32 or not compat.blas_is_slow() or kind(a) != "cpu":
        return False
    copied = a.dim() == 2 and not a.is_contiguous()
    return a.numel() * columns >= LEAST and (compat.blas_takes_half() or not copied)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,) -> (..., N)."""
    if not pays(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    found: Tensor = torch.ops.meshwright.cpu_product(x, weight, bias)
    return found


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N) -> (M, N)."""
    if not pays(a, b.shape[1]):
        return torch.mm(a, b)
    found: Tensor = torch.ops.meshwright.cpu_product(a, b.t(), None)
    return found


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (M, N) += a (M, K) times b (K, N), in place; by rows, since oneDNN's product is a tensor of its own."""
    if not pays(a, b.shape[1]):
        return total.addmm_(a, b)
    rows = max(1, AT_ONCE // max(a.shape[1], b.shape[1]))
    for some, part in zip(total.split(rows), a.split(rows), strict=True):
        some.add_(multiply(part, b))
    return total


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
