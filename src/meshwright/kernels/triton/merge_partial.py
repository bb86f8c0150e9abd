"""Merge of attention over a part of the keys into the result so far, in place and in one pass (kernels.partial)."""

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
    """Set out = out exp(lse - both) + part exp(shift - both); both = log(exp lse + exp part_lse) becomes lse."""
    at = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = at // heads, at % heads
    query = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_query = query < queries
    old_at = lse + batch * lse_batch + head * lse_head + query * lse_query
    old = tl.load(old_at, mask=is_query, other=0.0)
    new = tl.load(part_lse + at * queries + query, mask=is_query, other=0.0)
    new_shift = tl.load(shift + at * queries + query, mask=is_query, other=0.0)
    peak = tl.maximum(old, new)
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # neither has seen a key
    both = safe + tl.log(tl.exp(old - safe) + tl.exp(new - safe))
    tl.store(old_at, both, mask=is_query)
    seen = both != float("-inf")
    old_share = tl.where(seen, tl.exp(old - tl.where(seen, both, 0.0)), 0.0)[:, None]
    new_share = tl.where(seen, tl.exp(new_shift - tl.where(seen, both, 0.0)), 0.0)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = is_query[:, None] & (column < width)
    here = out + batch * out_batch + head * out_head + query[:, None] * out_query + column
    there = part + batch * part_batch + head * part_head + query[:, None] * part_query + column
    merged = tl.load(here, mask=inside, other=0.0) * old_share
    merged += tl.load(there, mask=inside, other=0.0).to(tl.float32) * new_share
    tl.store(here, merged, mask=inside)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, shift: Tensor) -> None:
    """Merge as kernels.partial._merge: out (B, H, S, V) fp32 and lse (B, H, S) in place."""
    batch, heads, queries, width = out.shape
    part = part if part.stride(-1) == 1 else part.contiguous()
    tiles = ceil_div(queries, ROWS)
    merge_rows[(tiles * batch * heads,)](
        out, *out.stride()[:3], lse, *lse.stride(), part, *part.stride()[:3], part_lse.contiguous(),
        shift.contiguous(), queries, heads, width, tiles, ROWS=ROWS, BLOCK=power_of_two(width), num_warps=4,
    )  # fmt: skip
