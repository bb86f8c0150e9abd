"""Cross-entropy of rows of logits, its gradient in their place, and the likeliest token of each row.

Each row is a program. For the loss it reads its logits once for the running maximum and sum (Milakov and Gimelshein
2018, arXiv:1805.02867) and once more, from the cache, for the gradient, which overwrites them. Where a row lies on
several devices, two kernels do one half each, and the host combines their results in between. The likeliest token takes
one reading.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, power_of_two

BLOCK = 8192
"""Logits of a row that a program holds at a time."""


@triton.jit
def _gather(row: Arg, target: Arg, columns: Arg, BLOCK: tl.constexpr) -> Arg:
    """Return the maximum of a row, the sum of exp(logit - maximum), the sum of logits, and the logit of `target`."""
    # That logit is read before the sums, which all warps wait for: later, another warp may have written its gradient.
    mine = (target >= 0) & (target < columns)
    chosen = tl.load(row + tl.where(mine, target, 0), mask=mine, other=0.0).to(tl.float32)
    peak = float("-inf")
    total = 0.0
    plain = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(logits, 0))
        # Of -inf alone nothing is subtracted: the difference would be NaN, and exp(-inf) is 0.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(logits - shift), 0)
        # Columns past the end were loaded as -inf, which is right for the maximum only.
        plain += tl.sum(tl.where(at < columns, logits, 0.0), 0)
        peak = higher
    return peak, total, plain, chosen


@triton.jit
def _write_gradient(
    row: Arg, target: Arg, columns: Arg, vocabulary: Arg, lse: Arg, factor: Arg, smoothing: Arg, z: Arg,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write factor * (softmax * (1 + 2 z lse) - (1 - smoothing) onehot - smoothing / V) over a row's logits."""
    softmax_factor = factor * (1.0 + 2.0 * z * lse)
    smoothing_share = factor * smoothing / vocabulary
    target_share = factor * (1.0 - smoothing)
    # A target on another device equals no column here, so its share is left out.
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(logits - lse) * softmax_factor - smoothing_share - tl.where(at == target, target_share, 0.0)
        tl.store(row + at, gradient.to(row.dtype.element_ty), mask=at < columns)


@triton.jit
def _clear(row: Arg, columns: Arg, BLOCK: tl.constexpr) -> None:
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(row + at, tl.zeros((BLOCK,), row.dtype.element_ty), mask=at < columns)


@triton.jit
def loss_rows(
    logits: Arg, stride: Arg, targets: Arg, factors: Arg, factor_stride: Arg, losses: Arg, columns: Arg,
    smoothing: Arg, z: Arg, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, FACTORS: tl.constexpr, SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the loss of each row: 0 where ignored, nan for a target without a column. GRADIENT overwrites logits."""
    # Rows times a vocabulary pass 2^31 numbers.
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    target = tl.load(targets + at)
    if target == IGNORED:
        tl.store(losses + at, 0.0)
        if GRADIENT:
            _clear(row, columns, BLOCK)
    else:
        peak, total, plain, chosen = _gather(row, target, columns, BLOCK)
        lse = peak + tl.log(total)
        loss = lse - chosen + z * lse * lse
        # Skipped without smoothing, where a logit of -inf would give 0 times infinity.
        if SMOOTH:
            loss += smoothing * (chosen - plain / columns)
        known = (target >= 0) & (target < columns)
        tl.store(losses + at, tl.where(known, loss, float("nan")))
        if GRADIENT:
            factor = 1.0
            if FACTORS:
                factor = tl.load(factors + at * factor_stride).to(tl.float32)
            _write_gradient(row, target, columns, columns, lse, factor, smoothing, z, BLOCK)


@triton.jit
def gather_rows(
    logits: Arg, stride: Arg, targets: Arg, sums: Arg, rows: Arg, columns: Arg, first: Arg, BLOCK: tl.constexpr
) -> None:
    """Compute maximum, sum of exp(logit - maximum), sum of logits, and target's logit or 0 of each row: (4, R)."""
    at = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + at) - first
    peak, total, plain, chosen = _gather(logits + at * stride, target, columns, BLOCK)
    tl.store(sums + at, peak)
    tl.store(sums + rows + at, total)
    tl.store(sums + 2 * rows + at, plain)
    tl.store(sums + 3 * rows + at, chosen)


@triton.jit
def gradient_rows(
    logits: Arg, stride: Arg, targets: Arg, sums: Arg, factors: Arg, columns: Arg, first: Arg, vocabulary: Arg,
    smoothing: Arg, z: Arg, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient over logits of rows with a known log-sum-exp over all devices. 0 where the factor is 0."""
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    factor = tl.load(factors + at)
    if factor == 0.0:
        _clear(row, columns, BLOCK)
    else:
        target = tl.load(targets + at) - first
        _write_gradient(row, target, columns, vocabulary, tl.load(sums + at), factor, smoothing, z, BLOCK)


def _block(columns: int) -> tuple[int, int]:
    """Return the logits that a program holds, and its warps."""
    block = min(BLOCK, power_of_two(columns))
    return block, max(1, min(16, block // 512))


def losses(
    logits: Tensor, targets: Tensor, factor: Tensor | None, *, ignored: int, gradient: bool, smoothing: float, z: float
) -> Tensor:
    """Return -log softmax (R,) fp32 of `logits` (R, V), overwritten by factor x gradient; factor () or (R,) fp32."""
    rows, columns = logits.shape
    factor = None if factor is None else factor.to(logits.device)
    row_losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block, warps = _block(columns)
    loss_rows[(rows,)](
        logits, logits.stride(0), targets.contiguous(), row_losses if factor is None else factor,
        0 if factor is None or not factor.dim() else factor.stride(0), row_losses, columns, smoothing, z,
        IGNORED=ignored, GRADIENT=gradient, FACTORS=factor is not None, SMOOTH=smoothing != 0.0, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return row_losses


def gathered(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return maximum, sum of exp(logit - maximum), sum of logits, and the target's logit or 0, as (4, R) fp32."""
    rows, columns = logits.shape
    sums = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    block, warps = _block(columns)
    gather_rows[(rows,)](
        logits, logits.stride(0), targets.contiguous(), sums, rows, columns, first, BLOCK=block, num_warps=warps
    )
    return sums


def write_gradients(
    logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, *, first: int, vocabulary: int, smoothing: float,
    z: float,
) -> None:  # fmt: skip
    """Overwrite `logits` (R, V'), columns from `first` on, with gradients, from log-sum-exps (R,)."""
    rows, columns = logits.shape
    block, warps = _block(columns)
    gradient_rows[(rows,)](
        logits, logits.stride(0), targets.contiguous(), sums.contiguous(), factors.contiguous(), columns, first,
        vocabulary, smoothing, z, BLOCK=block, num_warps=warps,
    )  # fmt: skip


@triton.jit
def likeliest_rows(logits: Arg, stride: Arg, out: Arg, vocab: Arg, BLOCK: tl.constexpr) -> None:
    """Compute out (R, 2): the first token with the largest logit, and its log-probability.

    fp32 holds tokens exactly below 2^24. The log-probability is NaN where a logit is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    peak, token = float("-inf"), tl.full((), 0, tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chunk = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        largest, index = tl.max(chunk, 0, return_indices=True)
        # Of equal logits the first wins, as in torch's argmax.
        token = tl.where(largest > peak, (index + start).to(tl.int32), token)
        higher = tl.maximum(peak, largest)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peak - shift) + tl.exp(chunk - shift)
        peak = higher
    tl.store(out + 2 * row, token.to(tl.float32))
    # The token's own logit is the maximum, so log p is 0 less the log of the sum.
    tl.store(out + 2 * row + 1, -tl.log(tl.sum(sums, 0)))


def likeliest(logits: Tensor) -> Tensor:
    """Return tokens and their log-probabilities (R, 2) fp32 from logits (R, V)."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, power_of_two(vocab))
    likeliest_rows[(rows,)](logits, logits.stride(0), out, vocab, BLOCK=block, num_warps=max(1, min(16, block // 256)))
    return out
