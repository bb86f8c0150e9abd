"""Likeliest token of each row of logits and its log-probability, in one pass and one tensor for the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, power_of_two

WARPS, BLOCK = 16, 8192


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
        token = tl.where(largest > peak, (index + start).to(tl.int32), token)
        higher = tl.maximum(peak, largest)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peak - shift) + tl.exp(chunk - shift)
        peak = higher
    tl.store(out + 2 * row, token.to(tl.float32))
    tl.store(out + 2 * row + 1, -tl.log(tl.sum(sums, 0)))


def likeliest(logits: Tensor) -> Tensor:
    """Return tokens and their log-probabilities (R, 2) fp32 from logits (R, V)."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, power_of_two(vocab))
    likeliest_rows[(rows,)](
        logits, logits.stride(0), out, vocab, BLOCK=block, num_warps=max(1, min(WARPS, block // 256))
    )
    return out
