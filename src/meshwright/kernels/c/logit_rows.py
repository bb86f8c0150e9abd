"""Cross-entropy of rows of logits on a CPU, and its gradient in their place, by logit_rows.c.

Same functions as triton/loss_rows.py. Logits (R, V) in fp32 or bf16 with contiguous rows; targets (R,) int64.
"""

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c import training_rows
from meshwright.kernels.c.training_rows import DTYPES, LEAST, library
from meshwright.kernels.target import device_kind


def takes(logits: Tensor) -> bool:
    """Return whether the loops take these logits.

    They must be large enough. The loops have no graph, so no second derivative may be wanted.
    """
    if logits.numel() < LEAST or logits.dtype not in DTYPES or torch.is_grad_enabled():
        return False
    plain = not torch.compiler.is_compiling() and device_kind(logits) == "cpu" and logits.stride(-1) == 1
    return plain and compat.lies_in_memory(logits) and training_rows.is_compiled()


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
