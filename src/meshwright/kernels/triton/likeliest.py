"""The likeliest token of each row of logits and its log-probability, in one pass and one tensor for the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, power_of_two

WARPS, BLOCK = 16, 8192


@triton.jit
def likeliest_rows(logits: Arg, stride: Arg, out: Arg, vocab: Arg, BLOCK: tl.constexpr) -> None:
    """out (R, 2): the first token with the largest logit, which fp32 holds exactly below 2^24, and its logit less the
    logarithm of the sum of exponentials. Not a number where a logit is none."""
    row = tl.program_id(0).to(tl.int64)
    peak, token = float("-inf"), tl.full((), 0, tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        most, place = tl.max(some, 0, return_indices=True)
        token = tl.where(most > peak, (place + start).to(tl.int32), token)
        higher = tl.maximum(peak, most)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peak - shift) + tl.exp(some - shift)
        peak = higher
    tl.store(out + 2 * row, token.to(tl.float32))
    tl.store(out + 2 * row + 1, -tl.log(tl.sum(sums, 0)))


def likeliest(logits: Tensor) -> Tensor:
    """logits (R, V) -> (R, 2) fp32: tokens, and their log-probabilities."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, power_of_two(vocab))
    likeliest_rows[(rows,)](
        logits, logits.stride(0), out, vocab, BLOCK=block, num_warps=max(1, min(WARPS, block // 256))
    )  # fmt: skip
    return out
