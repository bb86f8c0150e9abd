"""Attention over a part of the keys, taken into the result so far, in place and in one pass (kernels.partial)."""

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two

ROWS = 16
"""Queries of a program."""


@triton.jit
def merge_rows(
    out: Arg, out_batch: Arg, out_head: Arg, out_query: Arg, lse: Arg, lse_batch: Arg, lse_head: Arg, lse_query: Arg,
    part: Arg, part_batch: Arg, part_head: Arg, part_query: Arg, part_lse: Arg, shift: Arg, queries: Arg, heads: Arg,
    width: Arg, tiles: Arg, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out = out exp(lse - both) + part exp(shift - both) with both = log(exp lse + exp part_lse), which becomes lse."""
    at = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = at // heads, at % heads
    query = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    known = query < queries
    old_at = lse + batch * lse_batch + head * lse_head + query * lse_query
    old = tl.load(old_at, mask=known, other=0.0)
    own = tl.load(part_lse + at * queries + query, mask=known, other=0.0)
    by = tl.load(shift + at * queries + query, mask=known, other=0.0)
    peak = tl.maximum(old, own)
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # neither has seen a key
    both = safe + tl.log(tl.exp(old - safe) + tl.exp(own - safe))
    tl.store(old_at, both, mask=known)
    seen = both != float("-inf")
    kept = tl.where(seen, tl.exp(old - tl.where(seen, both, 0.0)), 0.0)[:, None]
    new = tl.where(seen, tl.exp(by - tl.where(seen, both, 0.0)), 0.0)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = known[:, None] & (column < width)
    here = out + batch * out_batch + head * out_head + query[:, None] * out_query + column
    there = part + batch * part_batch + head * part_head + query[:, None] * part_query + column
    found = tl.load(here, mask=inside, other=0.0) * kept
    found += tl.load(there, mask=inside, other=0.0).to(tl.float32) * new
    tl.store(here, found, mask=inside)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, shift: Tensor) -> None:
    """As kernels.partial._merge: out (B, H, S, V) fp32 and lse (B, H, S) in place."""
    batch, heads, queries, width = out.shape
    part = part if part.stride(-1) == 1 else part.contiguous()
    tiles = ceil_div(queries, ROWS)
    merge_rows[(tiles * batch * heads,)](
        out, *out.stride()[:3], lse, *lse.stride(), part, *part.stride()[:3], part_lse.contiguous(),
        shift.contiguous(), queries, heads, width, tiles, ROWS=ROWS, BLOCK=power_of_two(width), num_warps=4,
    )  # fmt: skip
