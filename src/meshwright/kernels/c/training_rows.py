"""Compiled loops over rows for training on a CPU: norms, rotation, the gate of an MLP, and losses.

Forward and backward, by training_rows.c and logit_rows.c. Rows of D numbers in fp32 or bf16; x (..., D) is contiguous,
except for rotation. Logits (R, V) with contiguous rows and targets (R,) int64 come in the functions of
triton/logit_rows.py, so either module serves the loss.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c import build
from meshwright.kernels.chooser import device_kind

STEPS = ("sequence_attention.c", "training_rows.c", "logit_rows.c")
"""C sources of a training step."""
VECTOR = 16
"""Numbers of a vector. Widths of rows and heads must be multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)
LEAST = 2**17
"""Least numbers of a tensor for which the loops pay off: below, a process would rather not wait for the C compiler."""
BLOCK = 32
"""Rows whose part of a weight's gradient is one sum. A sum of all rows in one order loses digits."""


@cache
def _library() -> ctypes.CDLL | None:
    return build.load(*STEPS, threads=build.THREADS[:1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def is_compiled() -> bool:
    """Return whether a C compiler for this processor supports OpenMP: one thread would be slower than all of torch's.

    The first answer on a machine compiles the library: one to two seconds of processor time.
    """
    return _library() is not None


def library() -> ctypes.CDLL:
    """Return the library, where it `is_compiled`."""
    loaded = _library()
    assert loaded is not None, "a loop was chosen without a library"
    return loaded


def takes(x: Tensor, *others: Tensor, width: int = 0) -> bool:
    """Return whether the loops take x: large enough, with rows, or parts of them of `width`, of whole vectors.

    The others must have x's dtype and shape, or, as weights, the shape of a row. Not where a second derivative is
    wanted: the loops have no graph.
    """
    if x.numel() < LEAST or x.dtype not in DTYPES or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    alike = all(other.dtype == x.dtype and other.shape in (x.shape, x.shape[-1:]) for other in others)
    fit = (
        alike and device_kind(x) == "cpu" and (width or x.shape[-1]) % VECTOR == 0 and compat.lies_in_memory(x, *others)
    )
    return fit and is_compiled()


def takes_tables(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the loops take x (B, S, H, E) with tables (B or 1, S, 1, E / 2) in fp32."""
    rows, positions, _, width = x.shape
    fit = cos.shape == sin.shape == (len(cos), positions, 1, width // 2) and len(cos) in (1, rows)
    fit = fit and cos.dtype == sin.dtype == torch.float32 and compat.lies_in_memory(cos, sin)
    return fit and takes(x, width=width // 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm (..., D) of x (..., D) with weight (D,), and 1 / rms (..., 1) in fp32."""
    x, weight = x.contiguous(), weight.contiguous()
    out, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if not compat.is_fake(x):
        library().norm_rows(*_at(x, weight), eps, *_at(out, scales), *_sizes(x))
    return out, scales


def rms_norm_gradients(gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (..., D) and weight (D,) from that of the norm (..., D)."""
    gradient, x, weight = gradient.contiguous(), x.contiguous(), weight.contiguous()
    rows, width, *rest = _sizes(x)
    x_gradient, sums = torch.empty_like(x), x.new_empty(-(-rows // BLOCK), width, dtype=torch.float32)
    if not compat.is_fake(x):
        library().norm_gradients(*_at(gradient, x, weight, scales, x_gradient, sums), rows, width, BLOCK, *rest)
    return x_gradient, sums.sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all (..., F)."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if not compat.is_fake(gate):
        library().gate_rows(*_at(gate, up, out), *_sizes(gate))
    return out


def swiglu_gradients(inner: Tensor, gate: Tensor, up: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate and up, and the product if `again`; all (..., F).

    The incoming gradient is overwritten where it is contiguous.
    """
    inner, gate, up = inner.contiguous(), gate.contiguous(), up.contiguous()
    up_gradient, out = torch.empty_like(up), torch.empty_like(gate) if again else None
    if not compat.is_fake(gate):
        library().gate_gradients(
            *_at(inner, gate, up, inner, up_gradient), None if out is None else out.data_ptr(), *_sizes(gate)
        )
    return inner, up_gradient, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate x (B, S, H, E) by `sign` times the angles of cos and sin (B or 1, S, 1, E / 2) fp32."""
    rows, positions, heads, width = x.shape
    x, cos, sin = x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Rows that share one table read it again from its start.
    apart = positions * (width // 2) if len(cos) > 1 else 0
    if not compat.is_fake(x):
        library().rotate_rows(
            x.data_ptr(), *x.stride()[:3], *_at(cos, sin), apart, sign, out.data_ptr(), rows, positions, heads,
            width // 2, x.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
    return out


def _at(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _sizes(x: Tensor) -> tuple[int, int, bool, int]:
    """Return rows, numbers of each, whether they have 16 bits, and threads."""
    return x.numel() // x.shape[-1], x.shape[-1], x.dtype == torch.bfloat16, torch.get_num_threads()


def takes_logits(logits: Tensor) -> bool:
    """Return whether the loops take these logits.

    They must be large enough. The loops have no graph, so no second derivative may be wanted.
    """
    if logits.numel() < LEAST or logits.dtype not in DTYPES or torch.is_grad_enabled():
        return False
    plain = not torch.compiler.is_compiling() and device_kind(logits) == "cpu" and logits.stride(-1) == 1
    return plain and compat.lies_in_memory(logits) and is_compiled()


def losses(
    logits: Tensor, targets: Tensor, factor: Tensor | None, *, ignored: int, gradient: bool, smoothing: float, z: float
) -> Tensor:
    """Return the loss of each row, (R,) fp32: -log softmax with `smoothing` and z-loss.

    0 = ignored, NaN = target out of range. With `gradient`, `logits` are overwritten by factor times their gradient.
    `factor` is () or (R,) fp32.
    """
    row_losses = logits.new_empty(len(logits), dtype=torch.float32)
    if not compat.is_fake(logits):
        target_ids, factors = (
            _per_row(targets.long(), logits),
            None if factor is None else _per_row(factor.float(), logits),
        )
        library().losses_of_rows(
            *_rows(logits), target_ids.data_ptr(), None if factors is None else factors.data_ptr(),
            row_losses.data_ptr(), *logits.shape, ignored, gradient, smoothing, z, *_format(logits),
        )  # fmt: skip
    return row_losses


def gathered(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return maximum, sum of exp(logit - maximum), sum of logits, and the target's logit or 0, as (4, R) fp32."""
    sums = logits.new_empty(4, len(logits), dtype=torch.float32)
    if not compat.is_fake(logits):
        target_ids = _per_row(targets.long(), logits)
        library().gather_rows(
            *_rows(logits), target_ids.data_ptr(), first, sums.data_ptr(), *logits.shape, *_format(logits)
        )
    return sums


def write_gradients(
    logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, *, first: int, vocabulary: int, smoothing: float,
    z: float,
) -> None:  # fmt: skip
    """Overwrite `logits` (R, V'), columns from `first` on, with gradients, from log-sum-exps (R,)."""
    if compat.is_fake(logits):
        return
    target_ids, sums, factors = (_per_row(x, logits) for x in (targets.long(), sums.float(), factors.float()))
    library().gradient_rows(
        *_rows(logits), target_ids.data_ptr(), first, sums.data_ptr(), factors.data_ptr(), *logits.shape, vocabulary,
        smoothing, z, *_format(logits),
    )  # fmt: skip


def _per_row(x: Tensor, logits: Tensor) -> Tensor:
    """Expand () or (R,) to (R,). Another number of rows is an error: C would read past the end."""
    return x.expand(len(logits)).contiguous()


def _rows(logits: Tensor) -> tuple[int, int]:
    return logits.data_ptr(), logits.stride(0)


def _format(logits: Tensor) -> tuple[bool, int]:
    """Return whether they have 16 bits, and the number of threads."""
    return logits.dtype == torch.bfloat16, torch.get_num_threads()
