"""Attention of packed queries over keys and values that lie in blocks.

Queries of many sequences are rows of one tensor. A call takes a run of rows: some sequences with as many queries each,
over keys that are gathered block by block, or are the run's own.

Letters: N packed rows, B sequences of a call, S queries of each, T keys of each, H query heads, K key heads, E and V
widths of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.chooser import NARROW, choice, uses_triton
from meshwright.kernels.compiled.library import Loops
from meshwright.kernels.gpu_attention import attend_past, choose_past
from meshwright.kernels.kept_numbers import KeptNumbers
from meshwright.kernels.linear import needs_wide
from meshwright.kernels.partial import can_fuse
from meshwright.kernels.target import kind
from meshwright.spec.graph_sizes import WIDEST

HIDDEN = float("-inf")
"""Added to the score of a key that a query does not see."""
LINE_BYTES = 64
"""At multiples of which memory begins that is allocated."""
QUERIES = 4
"""Of a key head in one call on a CPU are a multiple of it: each thread has room for scores behind that of others, which
begins where sums have one order only if every thread's is a multiple of 16 bytes."""


STRIP = 512
"""Queries of a chunk whose mask is made at once, where no kernel knows borders as numbers: 256 MiB in fp32 over 131,072
keys, where that of a chunk of 8,192 queries takes 4 GiB."""


class SeenBand(NamedTuple):
    """The last queries of a sequence, each of which sees what comes before it."""

    keys: int
    """Of the call's keys, how many there are; those behind pad the last block."""
    window: int
    """Keys that a query sees at most; 0 = all."""


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
    band: SeenBand | None = None
    """The same as numbers, of one sequence: a chunk of a prompt, whose mask would be large."""

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.begin + self.sequences * self.queries


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Queries of several sequences, one each, over keys in one piece for each sequence."""

    rows: Tensor | None
    """(B,) which of R rows of keys each query reads; None = all, in order."""
    bias: Tensor
    """(R, 1, 1, T) fp32, added to scores: 0 or HIDDEN. A row that no query reads sees something all the same."""


@dataclass(frozen=True, slots=True)
class RowsCall:
    """Rows that are attended one by one, each over its own sequence up to its own position."""

    tables: Tensor
    """(all,) int64: blocks of the sequences, one sequence behind the other."""
    offsets: Tensor
    """(R,) int64: where in the tables the sequence of each row begins."""
    last: Tensor
    """(R,) int64: position of each row."""
    longest: int
    """Positions that a row sees at most."""


def attend_rows_reference(
    q: Tensor, keys: Tensor, values: Tensor, call: RowsCall, *, width: int, window: int, scale: float
) -> Tensor:
    """q (R, H, E), keys (blocks, block, K, E), values (blocks, block, K, V or more), of which `width` are taken ->
    (R, H, width). `window`: positions that are seen, 0 = all."""
    size, group, found = keys.shape[1], q.shape[1] // keys.shape[2], []
    for row, offset, last in zip(q, call.offsets.tolist(), call.last.tolist(), strict=True):
        seen = torch.arange(max(0, last + 1 - window) if window else 0, last + 1)
        blocks = call.tables[offset + seen // size]
        seen_k, seen_v = keys[blocks, seen % size], values[blocks, seen % size][..., :width]
        scores = torch.einsum("hke,tke->hkt", _per_key_head(row, group), seen_k.float()) * scale
        summed = torch.einsum("hkt,tkv->hkv", scores.softmax(-1), seen_v.float())
        found.append(summed.transpose(0, 1).flatten(0, 1).to(q.dtype))
    return torch.stack(found)


def row_kernel(like: Tensor, width: int, prefer: str) -> tuple[bool, str]:
    """Whether a kernel attends to blocks row by row for tensors like this one and heads of at most a width, and what
    does it, with the reason."""
    feature = f"heads are {width} wide, more than {WIDEST}" if width > WIDEST else ""
    if not uses_triton("paged_attention", like, prefer=prefer, feature=feature) and like.device.type == "cpu":
        return False, "torch (a CPU)"
    found = choice("paged_attention", like.device, like.dtype, prefer=prefer, feature=feature)
    return found.by == "triton", f"{found.by} ({found.reason})"


def prompt_kernel(like: Tensor, width: int, value_width: int, group: int) -> str:
    """What attends to chunks of prompts for tensors like this one, with the reason; empty where there is no choice. It
    is tried at once, so that no request waits for that."""
    if like.device.type != "cuda" or like.dtype not in NARROW or max(width, value_width) > WIDEST:
        return ""
    kernel, reason = choose_past(like.device, like.dtype, width, value_width, group)
    return f"{kernel} ({reason})"


def attend_rows(
    own: Loops | None, q: Tensor, keys: KeptNumbers, values: KeptNumbers, call: RowsCall, *, width: int, window: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """As the reference: in fp32 by compiled loops, else by a Triton kernel. What a row gets follows from its own
    sequence alone."""
    if own is None:
        from meshwright.kernels.triton import paged

        stores = paged.BlockStore(keys.codes, keys.scales), paged.BlockStore(values.codes, values.scales)
        places = paged.RowPlaces(call.tables, call.offsets, call.last, call.longest)
        return paged.attend_rows(q, *stores, places, width=width, window=window, scale=scale)
    where = call.tables, call.offsets, call.last, call.longest
    scales = None if keys.scales is None or values.scales is None else (keys.scales, values.scales)
    return own.attend(q, keys.codes, values.codes, scales, *where, width=width, window=window, scale=scale)


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
                if call.band is not None:
                    end = call.band.keys - call.queries + query + 1
                    begin = max(0, end - call.band.window) if call.band.window else 0
                    seen_k, seen_v = seen_k[begin:end], seen_v[begin:end]
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
    q: Tensor, k: Tensor, v: Tensor, keys: KeptNumbers, values: KeptNumbers, calls: Sequence[PagedCall], *,
    scale: float,
) -> Tensor:  # fmt: skip
    """As the reference, by torch's fused attention. What a query gets follows from its own call's T, S and keys alone;
    with S = 1 never from how many sequences are in the call."""
    width = v.shape[-1]
    parts = [_attend(call, q, k, v, keys, values, scale)[..., :width] for call in calls]
    end = calls[-1].end if calls else 0
    if end < len(q):
        parts.append(q.new_zeros(len(q) - end, q.shape[1], width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, call: DenseCall, *, scale: float, width: int) -> Tensor:
    """q (B, H, E), keys (R, T, K, E), values (R, T, K, V or more) -> (B, H, width): as `attend_paged` with blocks of T
    positions, of which each sequence has one. What a query gets follows from its own row alone."""
    rows, _, heads, _ = keys.shape
    if call.rows is not None:
        q = q.new_zeros(rows, *q.shape[1:]).index_copy_(0, call.rows, q)
    seen_k, seen_v = (_in_lines(kept).transpose(1, 2) for kept in (keys, values))
    found = _one_query(q.unflatten(1, (heads, -1)), seen_k, seen_v, call.bias, scale)[..., :width]
    return found if call.rows is None else found[call.rows]


def _attend(
    call: PagedCall, q: Tensor, k: Tensor, v: Tensor, keys: KeptNumbers, values: KeptNumbers, scale: float
) -> Tensor:  # fmt: skip
    """(B S, H, width of keys or values)."""
    rows = slice(call.begin, call.end)
    seen_k, seen_v = (_seen(call, *pair) for pair in ((k[rows], keys), (v[rows], values)))
    if call.queries == 1:
        return _one_query(q[rows].unflatten(1, (k.shape[1], -1)), seen_k, seen_v, call.bias, scale)
    queries = q[rows].unflatten(0, (call.sequences, call.queries)).transpose(1, 2)
    band = SeenBand(call.queries, 0) if call.blocks is None else call.band
    if band is not None and kind(q) == "cuda" and can_fuse(queries.transpose(1, 2), seen_k.transpose(1, 2)):
        tensors = (x.transpose(1, 2) for x in (queries, seen_k[:, :, : band.keys], seen_v[:, :, : band.keys]))
        return attend_past(*tensors, window=band.window, scale=scale).flatten(0, 1)
    if call.band is not None:
        return _in_strips(queries, seen_k, seen_v, call.band, scale).transpose(1, 2).flatten(0, 1)
    return _fused(queries, seen_k, seen_v, call.bias, scale).transpose(1, 2).flatten(0, 1)


def _one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One query of each sequence, q (B, K, H / K, E) -> (B, H, width of k). Otherwise as `_fused`."""
    group = q.shape[2]
    more = -group % QUERIES if q.device.type == "cpu" else 0
    found = _fused(F.pad(q, (0, 0, 0, more)) if more else q, k, v, bias, scale)
    return found[:, :, :group].flatten(1, 2)


def _in_strips(q: Tensor, k: Tensor, v: Tensor, band: SeenBand, scale: float) -> Tensor:
    """q (1, H, S, E), k and v (1, K, T, width) -> (1, H, S, width of k), with a mask for some queries at a time."""
    count, parts = q.shape[2], list[Tensor]()
    for begin in range(0, count, STRIP):
        end = min(count, begin + STRIP)
        query = torch.arange(begin, end, device=q.device)[:, None] + (band.keys - count)
        key = torch.arange(k.shape[2], device=q.device)
        hidden = (key > query) | (key <= query - band.window) if band.window else key > query
        bias = q.new_zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
        parts.append(_fused(q[:, :, begin:end], k, v, bias, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """q (B, heads, queries, E), k and v (B, K, T, width) -> (B, heads, queries, width of k); causal without a bias. One
    query of a sequence comes as K heads with H / K queries each."""
    dtype, width = q.dtype, k.shape[-1]
    q, v = (F.pad(one, (0, width - one.shape[-1])) if one.shape[-1] < width else one for one in (q, v))
    if needs_wide(q):
        q, k, v = q.float(), k.float(), v.float()
    bias = None if bias is None else bias.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=grouped, attn_mask=bias, is_causal=bias is None
    )  # fmt: skip
    return out.to(dtype)


def _seen(call: PagedCall, own: Tensor, kept: KeptNumbers) -> Tensor:
    """(B, K, T, width) of a call's keys or values: its own (B S, K, width), or what its blocks keep."""
    if call.blocks is None:
        return own.unsqueeze(0).transpose(1, 2)
    if isinstance(call.blocks, slice):
        found = kept.taken(call.blocks).unsqueeze(0)
    else:
        found = kept.taken(call.blocks.flatten()).view(*call.blocks.shape, *kept.sizes[1:])
    return _in_lines(found).flatten(1, 2).transpose(1, 2).expand(call.sequences, -1, -1, -1)


def _in_lines(heads: Tensor) -> Tensor:
    """(..., width), on a CPU with zeros up to whole lines: MKL sums in another order where a head begins elsewhere, and
    where it does follows from what lies before it."""
    more = -heads.shape[-1] % (LINE_BYTES // heads.element_size())
    return F.pad(heads, (0, more)) if more and heads.device.type == "cpu" else heads
