"""Attention of rows that decode, over keys and values in blocks of 16 positions in any order."""

import torch
from torch import Tensor

from benchmarks.gpu import exact_forms
from benchmarks.gpu.case import ATTENTION, ROWS, Case, Count, Leaf, implementations, taken
from meshwright import compat
from meshwright.kernels.attention.paged import (
    PagedCall,
    PagedStore,
    RowsCall,
    attend_paged,
    attend_rows,
    rotate_and_store,
    rotate_and_store_reference,
)
from meshwright.kernels.triton.logit_rows import likeliest

SIZE = 16
"""Positions of a block."""
PAGE = 256
"""Positions of a page that FlashAttention 2 takes a multiple of (github.com/Dao-AILab/flash-attention/issues/828)."""


def paged_rows(
    sequences: int, positions: int, heads: int, key_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """A row of each sequence at its last position. Ours by torch gathers the blocks, as engines do without the
    kernel."""
    each, scale = -(-positions // SIZE), width**-0.5
    together = PAGE // SIZE if positions % PAGE == 0 else 1  # blocks of a page lie side by side
    pages = torch.randperm(sequences * each // together, generator=torch.Generator().manual_seed(positions)).to(device)
    order = (pages[:, None] * together + torch.arange(together, device=device)).flatten()
    tables = order.view(sequences, each)
    last = torch.full((sequences,), positions - 1, device=device)
    rows = RowsCall(order, torch.arange(0, sequences * each, each, device=device), last, positions)
    bias = torch.zeros(sequences, 1, 1, each * SIZE, device=device)
    bias[..., positions:] = -torch.inf
    call = PagedCall(0, sequences, 1, tables, bias)

    def run(q: Tensor, keys: Tensor, values: Tensor, prefer: str) -> Tensor:
        stores = _store(keys), _store(values)
        if prefer == "triton":
            return attend_rows(None, q, *stores, rows, width=width, window=0, scale=scale)
        new = keys.new_zeros(sequences, key_heads, width)
        return attend_paged(q, new, new, *stores, [call], scale=scale)

    def plain(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Whole scores of gathered keys, a softmax in fp32."""
        group = heads // key_heads
        seen_k, seen_v = (
            store[tables].flatten(1, 2)[:, :positions].repeat_interleave(group, 2) for store in (keys, values)
        )
        scores = torch.einsum("rhe,rthe->rht", q, seen_k) * scale
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return torch.einsum("rht,rthe->rhe", weights, seen_v)

    def varlen(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """torch.nn.attention.varlen with a table of pages, where this torch has a kernel for it; else it fails, and is
        named so."""
        paged = [store.view(-1, together * SIZE, key_heads, width) for store in (keys, values)]
        return compat.varlen_attn(
            q, *paged, borders, borders * positions, 1, positions, scale=scale, seqused_k=used, block_table=page_tables
        )

    borders = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    used = torch.full((sequences,), positions, dtype=torch.int32, device=device)
    page_tables = pages.view(sequences, -1).int()
    store, numbers = (sequences * each, SIZE, key_heads, width), sequences * heads * width
    moved = 2 * numbers + 2 * sequences * positions * key_heads * width
    return Case(
        operation="attention over blocks",
        size=f"{sequences} rows of {positions:,} positions, {heads}/{key_heads} heads of {width}", dtype=dtype,
        leaves=(Leaf((sequences, heads, width)), Leaf(store), Leaf(store)), exact=plain, eager=plain,
        ours=implementations("paged_attention", run, device, dtype), chosen=taken("paged_attention", device, dtype),
        rivals={f"torch varlen, pages of {together * SIZE}": varlen} if device.type == "cuda" else {},
        counts={"forward": Count(dtype.itemsize * moved, 4.0 * numbers * positions)}, kinds=(ATTENTION,), learns=False,
        compiles=False,
    )  # fmt: skip


def turned_and_kept(
    rows: int, heads: int, key_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Rotation of a decode step's rows and the write of their keys and values into the cache, each in a block of its
    own. Contestants turn a copy, since rows are turned in place: its time is in all of them."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.arange(rows, device=device).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    slots = torch.arange(rows, device=device) * SIZE
    like = torch.empty(0, dtype=dtype, device=device)
    keys, values = (PagedStore((rows, SIZE, key_heads, width), like, "model") for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor, prefer: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        if prefer == "triton":
            rotate_and_store(q, k, v, cos, sin, slots, keys, values, interleaved=False, norms=None)
        else:
            rotate_and_store_reference(q, k, v, cos, sin, slots, keys, values, interleaved=False, norms=None)
        return q, keys.codes[:, 0], values.codes[:, 0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tables = (table.to(q.dtype if q.dtype == torch.float64 else torch.float32)[:, None] for table in (cos, sin))
        both = exact_forms.rotated(torch.cat((q, k), 1).to(torch.promote_types(q.dtype, torch.float32)), *tables)
        return both[:, :heads].to(q.dtype), both[:, heads:].to(q.dtype), v.clone()

    moved = 2 * rows * (heads + 2 * key_heads) * width * dtype.itemsize
    return Case(
        operation="rotation and write into the cache", size=f"{rows} rows, {heads}/{key_heads} heads of {width}",
        dtype=dtype, leaves=(Leaf((rows, heads, width)), *(Leaf((rows, key_heads, width)),) * 2), exact=plain,
        eager=plain, ours=implementations("rotate_and_store", run, device, dtype),
        chosen=taken("rotate_and_store", device, dtype), counts={"forward": Count(moved)}, kinds=(ROWS,) * 3,
        learns=False, compiles=False,
    )  # fmt: skip


def likeliest_token(rows: int, vocab: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """The greedy choice of a step: the log-probability of each row's likeliest token, from logits read once."""

    def run(logits: Tensor, prefer: str) -> Tensor:
        return likeliest(logits)[:, 1] if prefer == "triton" else plain(logits)

    def plain(logits: Tensor) -> Tensor:
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).amax(-1)

    return Case(
        operation="likeliest token", size=f"{rows} x {vocab:,}", dtype=dtype, leaves=(Leaf((rows, vocab)),),
        exact=plain, eager=plain, ours=implementations("likeliest", run, device, dtype),
        chosen=taken("likeliest", device, dtype), counts={"forward": Count(rows * vocab * dtype.itemsize)},
        kinds=(ROWS,), learns=False, compiles=False,
    )  # fmt: skip


def _store(numbers: Tensor) -> PagedStore:
    """Blocks that are there already."""
    stored = PagedStore((1, 1, *numbers.shape[2:]), numbers, "model")  # two sizes
    stored.codes, stored.sizes = numbers, tuple(numbers.shape)  # type: ignore[assignment]  # four sizes
    return stored
