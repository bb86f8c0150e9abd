"""Cross-entropy of rows of logits on a CPU, and its gradient in their place, by logit_rows.c; as triton/loss_rows.py.

Logits (R, V) in fp32 or bf16, a row's numbers side by side; targets (R,) int64.
"""

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.compiled import training_library
from meshwright.kernels.compiled.training_library import DTYPES, library
from meshwright.kernels.target import kind
from meshwright.kernels.training_rows import LEAST


def takes(logits: Tensor) -> bool:
    """Whether these are worth a compiler's second, and no second derivative is wanted: the loops have no graph."""
    if logits.numel() < LEAST or logits.dtype not in DTYPES or torch.is_grad_enabled():
        return False
    plain = not torch.compiler.is_compiling() and kind(logits) == "cpu" and logits.stride(-1) == 1
    return plain and compat.lies_in_memory(logits) and training_library.is_compiled()


def losses(
    logits: Tensor, targets: Tensor, factor: Tensor | None, *, ignored: int, gradient: bool, smoothing: float, z: float
) -> Tensor:
    """-log softmax (R,) fp32 of `logits`, which become factor x gradient; factor () or (R,) fp32."""
    found = logits.new_empty(len(logits), dtype=torch.float32)
    if not compat.is_fake(logits):
        places, factors = _each(targets.long(), logits), None if factor is None else _each(factor.float(), logits)
        library().losses_of_rows(
            *_rows(logits), places.data_ptr(), None if factors is None else factors.data_ptr(), found.data_ptr(),
            *logits.shape, ignored, gradient, smoothing, z, *_kind(logits),
        )  # fmt: skip
    return found


def gathered(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """(4, R) fp32: maximum, sum of exp(logit - maximum), sum of logits, the target's logit where it is here, else 0."""
    found = logits.new_empty(4, len(logits), dtype=torch.float32)
    if not compat.is_fake(logits):
        places = _each(targets.long(), logits)
        library().gather_rows(
            *_rows(logits), places.data_ptr(), first, found.data_ptr(), *logits.shape, *_kind(logits)
        )  # fmt: skip
    return found


def write_gradients(
    logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, *, first: int, vocabulary: int, smoothing: float,
    z: float,
) -> None:  # fmt: skip
    """Over `logits` (R, V') of which this process holds columns `first` on: the gradients, from log-sum-exps (R,)."""
    if compat.is_fake(logits):
        return
    places, sums, factors = (_each(x, logits) for x in (targets.long(), sums.float(), factors.float()))
    library().gradient_rows(
        *_rows(logits), places.data_ptr(), first, sums.data_ptr(), factors.data_ptr(), *logits.shape, vocabulary,
        smoothing, z, *_kind(logits),
    )  # fmt: skip


def _each(x: Tensor, logits: Tensor) -> Tensor:
    """() or (R,) -> (R,); of another number of rows an error: C would read what lies behind them."""
    return x.expand(len(logits)).contiguous()


def _rows(logits: Tensor) -> tuple[int, int]:
    return logits.data_ptr(), logits.stride(0)


def _kind(logits: Tensor) -> tuple[bool, int]:
    """Whether they have 16 bits, and threads."""
    return logits.dtype == torch.bfloat16, torch.get_num_threads()
