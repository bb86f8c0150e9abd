"""Norms, rotation and the gate of an MLP on a CPU, forward and backward, for training, by training_rows.c.

Rows of D numbers in fp32 or bf16; x (..., D) is contiguous but for rotation.
"""

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.compiled import training_library
from meshwright.kernels.compiled.training_library import DTYPES, VECTOR, library
from meshwright.kernels.target import kind

LEAST = 2**17
"""Numbers of a tensor from which on these pay: below, a process would rather not wait for the C compiler."""
BLOCK = 32
"""Rows whose part of a weight's gradient is one sum: a sum of all rows in one order loses digits."""


def takes(x: Tensor, *others: Tensor, width: int = 0) -> bool:
    """Whether x is large enough, its rows, or parts of them of `width`, are whole vectors, and others have its dtype
    and its shape or, as a weight, that of a row. Not where a second derivative is wanted: the loops have no graph."""
    if x.numel() < LEAST or x.dtype not in DTYPES or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    alike = all(one.dtype == x.dtype and one.shape in (x.shape, x.shape[-1:]) for one in others)
    fit = alike and kind(x) == "cpu" and (width or x.shape[-1]) % VECTOR == 0 and compat.lies_in_memory(x, *others)
    return fit and training_library.is_compiled()


def takes_tables(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """The same of x (B, S, H, E) that is turned by tables (B or 1, S, 1, E / 2) in fp32."""
    rows, positions, _, width = x.shape
    fit = cos.shape == sin.shape == (len(cos), positions, 1, width // 2) and len(cos) in (1, rows)
    fit = fit and cos.dtype == sin.dtype == torch.float32 and compat.lies_in_memory(cos, sin)
    return fit and takes(x, width=width // 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., D), weight (D,) -> the norm (..., D), and 1 / rms (..., 1) in fp32."""
    x, weight = x.contiguous(), weight.contiguous()
    out, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if not compat.is_fake(x):
        library().norm_rows(*_at(x, weight), eps, *_at(out, scales), *_sizes(x))
    return out, scales


def rms_norm_gradients(gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """From that of the norm (..., D): of x (..., D) and of weight (D,)."""
    gradient, x, weight = gradient.contiguous(), x.contiguous(), weight.contiguous()
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    of_x, sums = torch.empty_like(x), x.new_empty(-(-rows // BLOCK), width, dtype=torch.float32)
    if not compat.is_fake(x):
        count, wide, *rest = _sizes(x)
        library().norm_gradients(*_at(gradient, x, weight, scales, of_x, sums), count, wide, BLOCK, *rest)
    return of_x, sums.sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all (..., F)."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if not compat.is_fake(gate):
        library().gate_rows(*_at(gate, up, out), *_sizes(gate))
    return out


def swiglu_gradients(inner: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """From that of the product, which is written over where it is contiguous: of gate and of up, and the product where
    it is wanted; all (..., F)."""
    inner, gate, up = inner.contiguous(), gate.contiguous(), up.contiguous()
    of_up, out = torch.empty_like(up), torch.empty_like(gate) if again else None
    if not compat.is_fake(gate):
        library().gate_gradients(
            *_at(inner, gate, up, inner, of_up), None if out is None else out.data_ptr(), *_sizes(gate)
        )
    return inner, of_up, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x (B, S, H, E), cos and sin (B or 1, S, 1, E / 2) fp32 -> (B, S, H, E), turned by `sign` times the angles."""
    rows, positions, heads, width = x.shape
    x, cos, sin = x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    apart = positions * (width // 2) if len(cos) > 1 else 0
    if not compat.is_fake(x):
        library().turn_rows(
            x.data_ptr(), *x.stride()[:3], *_at(cos, sin), apart, sign, out.data_ptr(), rows, positions, heads,
            width // 2, x.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
    return out


def _at(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _sizes(x: Tensor) -> tuple[int, int, bool, int]:
    """Rows, numbers of each, whether they have 16 bits, and threads."""
    return x.numel() // x.shape[-1], x.shape[-1], x.dtype == torch.bfloat16, torch.get_num_threads()
