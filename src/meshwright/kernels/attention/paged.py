"""Attention of packed queries over keys and values that lie in blocks.

Queries of many sequences are rows of one tensor. A call takes a run of rows: some sequences with as many queries each,
over keys that are gathered block by block, or over the keys of the run itself.

Letters: N packed rows, B sequences of a call, S queries of each, T keys of each, H query heads, K key heads, E and V
widths of heads.

A store holds keys, or values: numbers, or codes of 8 bits with a scale for each position and head.

    int8    q = round(r / S), S = max |r| / 127
    fp8     q = r / S rounded to e4m3, S = max |r| / 448

Positions lie in blocks. A position's codes depend on its own numbers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention.gpu import attend_past, choose_past
from meshwright.kernels.attention.partial import can_fuse
from meshwright.kernels.attention.rope import rotate_reference
from meshwright.kernels.c.serving_library import Loops
from meshwright.kernels.chooser import NARROW, choice, device_kind, uses_triton
from meshwright.kernels.linear.linear import needs_wide
from meshwright.kernels.norm.norms import rms_norm_reference
from meshwright.kernels.quantized.rounding import E4M3, absmax_scale, e4m3_scale, highest
from meshwright.spec.plan.execution import WIDEST, CacheForm

HIDDEN = float("-inf")
"""Number added to the score of a key that a query does not see."""
LINE_BYTES = 64
"""Alignment of allocated memory."""
QUERIES = 4
"""Multiple of which the queries of a key head are in one call on a CPU.

Threads hold their scores one after the other. Sums have one order only if each thread's scores begin at a multiple of
16 bytes.
"""


STRIP = 512
"""Queries of a chunk whose mask is made at once, where no kernel takes borders as numbers.

That is 256 MiB in fp32 over 131,072 keys, where a chunk of 8,192 queries would take 4 GiB.
"""


@final
class PagedStore:
    """Blocks of positions, initially zero."""

    def __init__(self, size: tuple[int, int, int, int], like: Tensor, form: CacheForm) -> None:
        """Allocate a store.

        Args:
            size: Blocks, positions of a block, K, E.
            like: Tensor whose device and dtype reads have.
            form: Stored format.
        """
        self.form, self.dtype, self.sizes = form, like.dtype, size
        dtypes = {"model": like.dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
        self.codes = torch.zeros(size, dtype=dtypes[form], device=like.device)
        self.scales = None if form == "model" else torch.zeros(size[:3], dtype=torch.float32, device=like.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything stored, by blocks."""
        # torch copies 8-bit integers at an index everywhere, numbers of 8 bits not.
        bits = self.codes.view(torch.uint8) if self.form == "fp8" else self.codes
        return [bits] if self.scales is None else [bits, self.scales]

    @property
    def bytes(self) -> int:
        """Size of all blocks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, slots: Tensor, new: Tensor, loops: Loops | None = None) -> None:
        """Write new (N, K, E) to slots (N,): block * size + position within."""
        if self.scales is None and loops is not None:
            loops.store_floats(new, slots, self.codes)
        elif self.scales is None:
            self.codes.flatten(0, 1).index_copy_(0, slots, new)
        elif self.form == "int8" and loops is not None:
            loops.store_int8(new, slots, self.codes, self.scales)
        else:
            codes, scales = encoded(new, self.form)
            for store, numbers in zip(self.tensors, (codes.view(self.tensors[0].dtype), scales), strict=True):
                store.flatten(0, 1).index_copy_(0, slots, numbers)

    def read(self, blocks: Tensor | slice) -> Tensor:
        """Return the numbers of blocks (M,), or of a run of them: (M, size, K, E)."""
        if isinstance(blocks, slice):
            parts = [tensor[blocks] for tensor in self.tensors]
        else:
            parts = [x.flatten(1).index_select(0, blocks).view(-1, *x.shape[1:]) for x in self.tensors]
        if len(parts) == 1:
            return parts[0]
        codes = parts[0].view(torch.float8_e4m3fn) if self.form == "fp8" else parts[0]
        return codes.float().mul_(parts[1].unsqueeze(-1)).to(self.dtype)


def encoded(numbers: Tensor, form: CacheForm) -> tuple[Tensor, Tensor]:
    """Encode numbers (N, K, E) as codes (N, K, E) and scales (N, K) fp32."""
    peak = numbers.float().abs().amax(-1)
    if form == "fp8":
        scales = e4m3_scale(peak)
        return (numbers.float() / scales.unsqueeze(-1)).clamp_(-E4M3, E4M3).to(torch.float8_e4m3fn), scales
    scales = absmax_scale(peak, 8)
    codes = (numbers.float() / scales.unsqueeze(-1)).round_().clamp_(-highest(8), highest(8))
    return codes.to(torch.int8), scales


def rotate_and_store_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: PagedStore, values: PagedStore, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> None:  # fmt: skip
    """Normalize and rotate q (N, H, E) and k (N, K, E) in place, and write k and v to slots (N,) of the stores.

    cos and sin (N, E / 2) fp32. `norms`: weights (E,) of q and k, and eps.
    """
    for x, weight in zip((q, k), (None, None) if norms is None else norms[:2], strict=True):
        normed = x if weight is None or norms is None else rms_norm_reference(x, weight, norms[2])
        x.copy_(rotate_reference(normed.unsqueeze(0), cos[None, :, None], sin[None, :, None], interleaved)[0])
    keys.write(slots, k)
    values.write(slots, v)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: PagedStore, values: PagedStore, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> bool:  # fmt: skip
    """Run the reference as one Triton kernel. Returns False, changing nothing, if that does not take these tensors."""
    from meshwright.kernels.triton import paged

    if not paged.is_taken(q, k, v) or keys.sizes[3] != q.shape[2] or not (values.sizes[3] == v.shape[2] == k.shape[2]):
        return False
    stores = (paged.BlockStore(store.codes, store.scales) for store in (keys, values))
    paged.rotate_and_store(
        q, k, v, cos, sin, slots, *stores, interleaved=interleaved,
        norms=None if norms is None else paged.HeadNorms(*norms),
    )  # fmt: skip
    return True


class SeenBand(NamedTuple):
    """The last queries of a sequence, each of which sees the positions up to its own."""

    keys: int
    """Number of the call's keys that exist. The rest pads the last block."""
    window: int
    """Most keys that a query sees. 0 = all."""


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
    """(B, T / block) of each sequence, (1, T / block) of all, or a run of blocks of all.

    None = the rows are one sequence from its first position on, whose keys and values are the new ones.
    """
    bias: Tensor | None
    """(B or 1, 1, S, T) fp32, added to scores: 0 or HIDDEN.

    None = all keys are visible; of new keys, those up to the query.
    """
    band: SeenBand | None = None
    """The mask as numbers, for one sequence: a chunk of a prompt, whose mask would be large."""

    @property
    def end(self) -> int:
        """Index after the last row."""
        return self.begin + self.sequences * self.queries


@dataclass(frozen=True, slots=True)
class DenseCall:
    """One query each of several sequences, over keys in one piece for each sequence."""

    rows: Tensor | None
    """Row of R rows of keys that each query reads (B,). None = all, in order."""
    bias: Tensor
    """(R, 1, 1, T) fp32, added to scores: 0 or HIDDEN. A row that no query reads must see something too."""


@dataclass(frozen=True, slots=True)
class RowsCall:
    """Rows that are attended one by one, each over its own sequence up to its own position."""

    tables: Tensor
    """Blocks of the sequences, one sequence after the other, 1D int64."""
    offsets: Tensor
    """Start of each row's sequence in the tables, (R,) int64."""
    last: Tensor
    """Position of each row, (R,) int64."""
    longest: int
    """Most positions that a row sees."""


def row_kernel(like: Tensor, width: int, prefer: str) -> tuple[bool, str]:
    """Return whether a kernel attends to blocks row by row, and the name of what attends, with the reason.

    For tensors like this one and heads of at most `width`.
    """
    feature = f"heads are {width} wide, more than {WIDEST}" if width > WIDEST else ""
    if not uses_triton("paged_attention", like, prefer=prefer, feature=feature) and like.device.type == "cpu":
        return False, "torch (a CPU)"
    implementation = choice("paged_attention", like.device, like.dtype, prefer=prefer, feature=feature)
    return implementation.by == "triton", f"{implementation.by} ({implementation.reason})"


def prompt_kernel(like: Tensor, width: int, value_width: int, group: int) -> str:
    """Name the kernel for chunks of prompts, with the reason. Empty where there is no choice.

    For tensors like this one. The kernel is tried at once, so no request waits for that.
    """
    if like.device.type != "cuda" or like.dtype not in NARROW or max(width, value_width) > WIDEST:
        return ""
    kernel, reason = choose_past(like.device, like.dtype, width, value_width, group)
    return f"{kernel} ({reason})"


def attend_rows(
    loops: Loops | None, q: Tensor, keys: PagedStore, values: PagedStore, call: RowsCall, *, width: int, window: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend q (R, H, E) over paged keys and values, in fp32 by compiled loops, else by a Triton kernel.

    keys (blocks, block, K, E); values (blocks, block, K, V or more), of which `width` are used; `window`: visible
    positions, 0 = all. Returns (R, H, width). A row's result depends on its own sequence alone.
    """
    if loops is None:
        from meshwright.kernels.triton import paged

        stores = paged.BlockStore(keys.codes, keys.scales), paged.BlockStore(values.codes, values.scales)
        rows = paged.RowPlaces(call.tables, call.offsets, call.last, call.longest)
        return paged.attend_rows(q, *stores, rows, width=width, window=window, scale=scale)
    positions = call.tables, call.offsets, call.last, call.longest
    scales = None if keys.scales is None or values.scales is None else (keys.scales, values.scales)
    return loops.attend(q, keys.codes, values.codes, scales, *positions, width=width, window=window, scale=scale)


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, keys: PagedStore, values: PagedStore, calls: Sequence[PagedCall], *,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend q (N, H, E) by torch's fused attention. Returns (N, H, V), zero for rows of no call.

    k (N, K, E) and v (N, K, V) of the same rows are already written into keys (blocks, block, K, E) and values (blocks,
    block, K, V).

    A query's result depends on its own call's T, S and keys alone. With S = 1 it never depends on the number of
    sequences.
    """
    width = v.shape[-1]
    parts = [_attend(call, q, k, v, keys, values, scale)[..., :width] for call in calls]
    end = calls[-1].end if calls else 0
    if end < len(q):
        parts.append(q.new_zeros(len(q) - end, q.shape[1], width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, call: DenseCall, *, scale: float, width: int) -> Tensor:
    """Attend q (B, H, E) over keys (R, T, K, E) and values (R, T, K, V or more). Returns (B, H, width).

    Like `attend_paged` with one block of T positions for each sequence. A query's result depends on its own row alone.
    """
    rows, _, heads, _ = keys.shape
    # Queries move to the rows of their keys: moving keys would copy T times as much.
    if call.rows is not None:
        q = q.new_zeros(rows, *q.shape[1:]).index_copy_(0, call.rows, q)
    seen_k, seen_v = (_padded_to_lines(x).transpose(1, 2) for x in (keys, values))
    out = _one_query(q.unflatten(1, (heads, -1)), seen_k, seen_v, call.bias, scale)[..., :width]
    return out if call.rows is None else out[call.rows]


def _attend(
    call: PagedCall, q: Tensor, k: Tensor, v: Tensor, keys: PagedStore, values: PagedStore, scale: float
) -> Tensor:
    """Attend one call. Returns (B S, H, width of keys or values)."""
    rows = slice(call.begin, call.end)
    seen_k, seen_v = (_call_numbers(call, *pair) for pair in ((k[rows], keys), (v[rows], values)))
    if call.queries == 1:
        return _one_query(q[rows].unflatten(1, (k.shape[1], -1)), seen_k, seen_v, call.bias, scale)
    queries = q[rows].unflatten(0, (call.sequences, call.queries)).transpose(1, 2)
    band = SeenBand(call.queries, 0) if call.blocks is None else call.band
    if band is not None and device_kind(q) == "cuda" and can_fuse(queries.transpose(1, 2), seen_k.transpose(1, 2)):
        tensors = (x.transpose(1, 2) for x in (queries, seen_k[:, :, : band.keys], seen_v[:, :, : band.keys]))
        return attend_past(*tensors, window=band.window, scale=scale).flatten(0, 1)
    if call.band is not None:
        return _in_strips(queries, seen_k, seen_v, call.band, scale).transpose(1, 2).flatten(0, 1)
    return _fused(queries, seen_k, seen_v, call.bias, scale).transpose(1, 2).flatten(0, 1)


def _one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attend one query of each sequence, q (B, K, H / K, E), as `_fused`. Returns (B, H, width of k)."""
    group = q.shape[2]
    # Empty queries keep the scores of each head aligned (see QUERIES), and are cut off again.
    more = -group % QUERIES if q.device.type == "cpu" else 0
    out = _fused(F.pad(q, (0, 0, 0, more)) if more else q, k, v, bias, scale)
    return out[:, :, :group].flatten(1, 2)


def _in_strips(q: Tensor, k: Tensor, v: Tensor, band: SeenBand, scale: float) -> Tensor:
    """Attend q (1, H, S, E) over k and v (1, K, T, width), with a mask for some queries at a time."""
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
    """Attend q (B, heads, queries, E) over k and v (B, K, T, width), causal without a bias.

    Returns (B, heads, queries, width of k). One query of a sequence comes as K heads with H / K queries each.
    """
    dtype, width = q.dtype, k.shape[-1]
    q, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, v))
    if needs_wide(q):
        q, k, v = q.float(), k.float(), v.float()
    bias = None if bias is None else bias.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=grouped, attn_mask=bias, is_causal=bias is None
    )
    return out.to(dtype)


def _call_numbers(call: PagedCall, new: Tensor, store: PagedStore) -> Tensor:
    """Return a call's keys or values (B, K, T, width): the new ones (B S, K, width), or those of its blocks."""
    if call.blocks is None:
        return new.unsqueeze(0).transpose(1, 2)
    if isinstance(call.blocks, slice):
        numbers = store.read(call.blocks).unsqueeze(0)
    else:
        numbers = store.read(call.blocks.flatten()).view(*call.blocks.shape, *store.sizes[1:])
    return _padded_to_lines(numbers).flatten(1, 2).transpose(1, 2).expand(call.sequences, -1, -1, -1)


def _padded_to_lines(heads: Tensor) -> Tensor:
    """Pad (..., width) with zeros to whole cache lines on a CPU.

    MKL sums in another order where a head begins at another offset, which depends on what lies before it.
    """
    more = -heads.shape[-1] % (LINE_BYTES // heads.element_size())
    return F.pad(heads, (0, more)) if more and heads.device.type == "cpu" else heads
