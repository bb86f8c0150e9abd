"""Attention of packed queries over keys and values that lie in blocks.

Queries of many sequences are rows of one tensor. A call takes a run of rows: some sequences with as many queries each,
over keys that are gathered block by block, or are the run's own.

Letters: N packed rows, B sequences of a call, S queries of each, T keys of each, H query heads, K key heads, E and V
widths of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.linear import needs_wide

HIDDEN = float("-inf")
"""Added to the score of a key that a query does not see."""


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Rows that are attended in one call."""

    begin: int
    """First row."""
    sequences: int
    """B."""
    queries: int
    """S of each: rows begin + s + S b."""
    blocks: Tensor | slice | None
    """(B, T / block) of each sequence, (1, T / block) of all, or a run of blocks of all; None = the rows are one
    sequence from its first position on, whose keys and values were just made."""
    bias: Tensor | None
    """(B or 1, 1, S, T) fp32, added to scores: 0 or HIDDEN. None = all keys are seen; of own keys, those before."""

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.begin + self.sequences * self.queries


def attend_paged_reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, calls: Sequence[PagedCall], *, scale: float
) -> Tensor:
    """q (N, H, E), k (N, K, E) and v (N, K, V) of the same rows; keys (blocks, block, K, E), values (blocks, block, K,
    V), into which k and v are written already -> (N, H, V). Rows of no call are zero."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    group = q.shape[1] // k.shape[1]
    for call in calls:
        for row in range(call.begin, call.end):
            sequence, query = divmod(row - call.begin, call.queries)
            if call.blocks is None:
                seen_k, seen_v, bias = k[call.begin : row + 1], v[call.begin : row + 1], None
            else:
                blocks = call.blocks
                own = blocks if isinstance(blocks, slice) else blocks[min(sequence, len(blocks) - 1)]
                seen_k, seen_v, bias = keys[own].flatten(0, 1), values[own].flatten(0, 1), call.bias
            scores = torch.einsum("hke,tke->hkt", _per_key_head(q[row], group), seen_k.float()) * scale
            if bias is not None:
                scores = scores + bias[min(sequence, len(bias) - 1), 0, query]
            found = torch.einsum("hkt,tkv->khv", scores.softmax(-1), seen_v.float())
            out[row] = found.flatten(0, 1).to(q.dtype)
    return out


def _per_key_head(row: Tensor, group: int) -> Tensor:
    """(H, E) -> (H / K, K, E) fp32: query head h reads key head h // (H / K)."""
    found: Tensor = row.float().unflatten(0, (-1, group))
    return found.transpose(0, 1)


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, calls: Sequence[PagedCall], *, scale: float
) -> Tensor:
    """As the reference, by torch's fused attention. What a row gets follows from its own call's T, S and keys alone;
    with S = 1 never from how many sequences are in the call."""
    width = v.shape[-1]
    parts = [_attend(call, q, k, v, keys, values, scale)[..., :width] for call in calls]
    end = calls[-1].end if calls else 0
    if end < len(q):
        parts.append(q.new_zeros(len(q) - end, q.shape[1], width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(call: PagedCall, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """(B S, H, width of keys)."""
    rows = slice(call.begin, call.end)
    heads, wide = q.shape[1], needs_wide(q)
    # one query: all heads of a key head are queries of it
    fold = (call.sequences, k.shape[1], -1) if call.queries == 1 else (call.sequences, call.queries, heads)
    queries = q[rows].view(*fold, q.shape[-1])
    queries = queries if call.queries == 1 else queries.transpose(1, 2)
    seen_k, seen_v = (_seen(call, *pair) for pair in ((k[rows], keys), (v[rows], values)))
    if seen_v.shape[-1] < seen_k.shape[-1]:
        seen_v = F.pad(seen_v, (0, seen_k.shape[-1] - seen_v.shape[-1]))
    if wide:
        queries, seen_k, seen_v = queries.float(), seen_k.float(), seen_v.float()
    out = F.scaled_dot_product_attention(
        queries, seen_k, seen_v, scale=scale, enable_gqa=queries.shape[1] != k.shape[1],
        attn_mask=None if call.bias is None else call.bias.to(queries.dtype), is_causal=call.blocks is None,
    )  # fmt: skip
    out = out if call.queries == 1 else out.transpose(1, 2)
    return out.reshape(-1, heads, out.shape[-1]).to(q.dtype)


def _seen(call: PagedCall, own: Tensor, kept: Tensor) -> Tensor:
    """(B, K, T, width) of a call's keys or values: its own (B S, K, width), or what its blocks keep."""
    if call.blocks is None:
        return own.unsqueeze(0).transpose(1, 2)
    if isinstance(call.blocks, slice):
        found = kept[call.blocks].unsqueeze(0)
    else:
        found = kept.flatten(1).index_select(0, call.blocks.flatten())
        found = found.view(*call.blocks.shape, *kept.shape[1:])
    return found.flatten(1, 2).transpose(1, 2).expand(call.sequences, -1, -1, -1)
