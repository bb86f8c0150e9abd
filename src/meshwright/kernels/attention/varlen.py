"""Attention of packed documents and of sliding windows: only visible pairs are multiplied.

On a CPU the compiled loops do both by tiles (c/sequence_attention.py). Without a C compiler each document is a
call of its own, and a window goes over its queries in stretches. The blockwise form does both in blocks, and dropout.

On a GPU the flash kernel takes rows of documents by their borders (cu_seqlens) and the window as a number (Dao 2023,
arXiv:2307.08691). No mask of S x S is made. Saved for the backward pass are queries, keys, values, the result and its
log-sum-exp.

A GPU's flash kernels take 16-bit numbers only. In fp32 strips of queries, each with the keys that one of them may see,
run in torch's memory-efficient kernel (Rabe and Staats 2021, arXiv:2112.05682). Masks are made for one strip at a time:
STRIP_QUERIES x S numbers. The host knows what a strip can see (the window, the longest document), so nothing waits for
the device.

Letters: B batch, S sequence, H query heads, K key heads, E and V widths; R queries and T keys of a strip.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.compat import torch_compile
from meshwright.kernels.attention import blockwise
from meshwright.kernels.attention.blockwise import RowTile, blocks, rows_of, stretches
from meshwright.kernels.attention.partial import fused_width, padded
from meshwright.kernels.c import sequence_attention
from meshwright.kernels.chooser import device_kind, simulated_kind
from meshwright.kernels.linear.linear import needs_wide
from meshwright.kernels.norm.dropout import AttentionDropout

STRIP_QUERIES = 512
"""Queries of a strip: few enough that hidden pairs cost little, enough to fill a GPU."""
APART = 16
"""Multiple to which rows of a bias are padded."""
SUMS = 32
"""Multiple to which rows of the log-sum-exp are padded."""


class AttentionForm(NamedTuple):
    """Hidden keys, and the kernel that runs."""

    documents: Tensor | None
    """Document of each position, (B, S), ascending along a row."""
    borders: Tensor | None
    """Starts of documents in the B S positions laid end to end, (N + 1,) int32, for a GPU; see `borders_of`."""
    longest: Tensor | None
    """Positions of the longest document, () int on the host. None = a row.

    A tensor, because compiled code would make a constant of a number.
    """
    window: int
    scale: float
    way: str = "flash"
    """Kernel that runs.

    flash: fused, by documents or stretches, on a GPU by borders; flash-4: the same by FlashAttention 4; strips:
    `query_strips`; blocks: blockwise.py; loops: c/sequence_attention.py.
    """
    rate: float = 0.0
    """Rate of dropout of the weights, by blocks alone."""
    rows: Tensor | None = None
    """Keys of queries and heads (B, S, H) for dropout, int32. None = no dropout."""


def borders_of(documents: Tensor, number: int) -> Tensor:
    """Return the starts of documents (B, S) among their B S positions, and B S at the end: (number + 1,) int32.

    `number` of documents is known to the host, so the device need not be waited for. 0 = count them, which waits.
    """
    begins = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True).flatten()
    size = number or int(begins.sum())
    borders = torch.nonzero_static(begins, size=size + 1, fill_value=begins.numel()).flatten().to(torch.int32)
    if not simulated_kind():
        torch_compile.let_vary(borders)
    return borders


def attend(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
    """Attend q (B, S, H, E) over k (B, S, K, E) and v (B, S, K, V). Returns (B, S, H, V)."""
    if torch.compiler.is_compiling():
        compiled: Tensor = varlen_attention(q, k, v, *form)[0]
        return compiled
    out: Tensor = _Varlen.apply(q, k, v, form)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        out, lse = _forward(q, k, v, form)
        ctx.save_for_backward(q, k, v, *((None, None) if form.way == "blocks" else (out, lse)))
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        form = ctx.form
        # A second derivative is wanted, which torch can take of blocks.
        if form.way == "loops" and torch.is_grad_enabled():
            form = form._replace(way="blocks")
        return *_backward(gradient, q, k, v, out, lse, form), None


def _forward(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
    """Return the result and its log-sum-exp.

    That has the kernel's layout: (B, H, S), for a GPU's flash kernel (H, B S), empty for blocks.
    """
    if form.way == "blocks":
        return blockwise.forward(q, k, v, *_block_arguments(q, form)), q.new_empty(0)
    if form.way == "strips":
        return strips_forward(q, k, v, form.documents, **_strip_options(form, q))
    if form.way == "loops":
        rows = rows_of(form.documents, q)
        return sequence_attention.attend(q, k, v, rows, window=form.window, scale=form.scale)
    if device_kind(q) != "cpu":
        return _forward_by_borders(q, k, v, form)
    return _forward_by_stretches(q, k, v, form)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, form: AttentionForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if form.way == "blocks":
        return blockwise.backward(gradient, q, k, v, *_block_arguments(q, form))
    assert out is not None and lse is not None
    if form.way == "strips":
        return strips_backward(gradient, q, k, v, out, lse, form.documents, **_strip_options(form, q))
    if form.way == "loops":
        rows = rows_of(form.documents, q)
        return sequence_attention.gradients(gradient, q, k, v, out, lse, rows, window=form.window, scale=form.scale)
    if device_kind(q) != "cpu":
        return _backward_by_borders(gradient, q, k, v, out, lse, form)
    return _backward_by_stretches(gradient, q, k, v, out, lse, form)


def _block_arguments(q: Tensor, form: AttentionForm) -> tuple[Iterator[RowTile], int, float, AttentionDropout | None]:
    """Return the arguments of the blockwise form after its tensors."""
    dropout = None if form.rows is None else AttentionDropout(form.rate, form.rows)
    return blocks(rows_of(form.documents, q), form.window, q), form.window, form.scale, dropout


def _strip_options(form: AttentionForm, q: Tensor) -> dict[str, Any]:
    """Return the arguments of the strips after their tensors."""
    return {"longest": _longest(form, q), "window": form.window, "scale": form.scale}


def _forward_by_stretches(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
    out, lse = _output_like(q, v), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for tile in stretches(rows_of(form.documents, q), form.window):
        queries, keys, values = _read(q, k, v, tile)
        part, sums = compat.flash_attention(
            queries, keys, values, mask=_bias(tile, form.window, queries), causal=tile.is_causal(form.window),
            scale=form.scale, device="cpu",
        )  # fmt: skip
        part = part.transpose(1, 2)[..., : v.shape[-1]]
        # One tile of all rows needs no copy into the result.
        if part.shape == out.shape:
            return part.to(q.dtype).contiguous(), sums
        out[tile.rows, tile.queries] = part
        lse[tile.rows, :, tile.queries] = sums
    return out, lse


def _backward_by_stretches(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: AttentionForm
) -> tuple[Tensor, Tensor, Tensor]:
    width = _width(q, v)
    of_q, of_k, of_v = q.new_empty(q.shape), _gradient_buffer(k, form.window), _gradient_buffer(v, form.window)
    for tile in stretches(rows_of(form.documents, q), form.window):
        queries, keys, values = _read(q, k, v, tile)
        incoming, outcome = (_part(x, tile.rows, tile.queries, width) for x in (gradient, out))
        gradients = compat.flash_attention_backward(
            incoming, queries, keys, values, outcome, lse[tile.rows, :, tile.queries].contiguous(),
            mask=_bias(tile, form.window, queries), causal=tile.is_causal(form.window), scale=form.scale, device="cpu",
        )  # fmt: skip
        of_q[tile.rows, tile.queries] = gradients[0].transpose(1, 2)[..., : q.shape[3]]
        for sums, part in zip((of_k, of_v), gradients[1:], strict=True):
            part, here = part.transpose(1, 2)[..., : sums.shape[-1]], sums[tile.rows, tile.keys]
            here.add_(part) if form.window else here.copy_(part)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _gradient_buffer(x: Tensor, window: int) -> Tensor:
    """Allocate the gradient of keys or values. A window's stretches share keys, so their parts are added."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device) if window else x.new_empty(x.shape)


def _read(q: Tensor, k: Tensor, v: Tensor, tile: RowTile) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a tile."""
    width = _width(q, v)
    keys, values = (_part(x, tile.rows, tile.keys, width) for x in (k, v))
    return _part(q, tile.rows, tile.queries, width), keys, values


def _part(x: Tensor, rows: slice, at: slice, width: int) -> Tensor:
    """Slice (B, S, heads, E or V) to (rows, heads, positions, E), in a dtype that this CPU multiplies."""
    part = x[rows, at].transpose(1, 2)
    return padded(part.float() if needs_wide(part) else part, width)


def _width(q: Tensor, v: Tensor) -> int:
    """Return the common width of keys and values that fused kernels need, on a GPU in rows of 16 bytes."""
    width = max(q.shape[3], v.shape[3])
    return width if device_kind(q) == "cpu" else fused_width(width)


def _output_like(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _bias(tile: RowTile, window: int, like: Tensor) -> Tensor | None:
    """Return (queries, keys) of a stretch, -inf where hidden. None for a causal square."""
    if tile.is_causal(window):
        return None
    return like.new_zeros(()).where(~tile.hidden(window, like.device), float("-inf"))


def _forward_by_borders(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
    attend: Callable[..., tuple[Tensor, Tensor]] = compat.varlen_attention
    if form.way == "flash-4":
        attend = compat.flash_4_attention
    packed, rows = _packed(form, q, v, (q, k, v)), (_borders(form, q), _longest(form, q))
    out, lse = attend(*packed, *rows, window=form.window, scale=form.scale)
    return out[..., : v.shape[-1]].contiguous().unflatten(0, q.shape[:2]), lse


def _backward_by_borders(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: AttentionForm
) -> tuple[Tensor, Tensor, Tensor]:
    differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]] = compat.varlen_attention_backward
    if form.way == "flash-4":
        differentiate = compat.flash_4_attention_backward
    packed, rows = _packed(form, q, v, (gradient, q, k, v, out)), (_borders(form, q), _longest(form, q))
    gradients = differentiate(*packed, lse, *rows, window=form.window, scale=form.scale)
    of_q, of_k, of_v = (
        x[..., : like.shape[3]].unflatten(0, q.shape[:2]) for x, like in zip(gradients, (q, k, v), strict=True)
    )
    return of_q, of_k, of_v


def _packed(form: AttentionForm, q: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Lay tensors (B, S, heads, E or V) end to end as (B S, heads, width). FlashAttention 2 needs one width."""
    unequal = form.way == "flash-4"
    return [padded(x.flatten(0, 1), fused_width(x.shape[3]) if unequal else _width(q, v)) for x in tensors]


def _borders(form: AttentionForm, q: Tensor) -> Tensor:
    """Return the borders of documents. Without any, rows are documents."""
    if form.borders is not None:
        return form.borders
    rows, length = q.shape[:2]
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)


def _longest(form: AttentionForm, q: Tensor) -> int:
    """Return the longest document, at least 2: of one position the kernel takes heads for positions."""
    if form.longest is None or compat.is_fake(form.longest):
        return max(2, q.shape[1])
    return max(2, int(form.longest))


def strips_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend q (B, S, H, E) over k (B, S, K, E) and v (B, S, K, V).

    Returns (B, S, H, V), and the log-sum-exp (B, H, S up to a multiple of 32).

    Args:
        documents: (B, S), ascending along a row, of at most `longest` positions.
        window: Visible positions. 0 = all.
    """
    batch, length, heads = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1])
    # The kernel pads the log-sum-exp of each strip. Strips are multiples of 32, so only the last one is padded.
    lse = q.new_empty(batch, heads, -(-length // SUMS) * SUMS, dtype=torch.float32)
    for tile in query_strips(length, longest, window):
        bias = _strip_bias(tile, documents, window, q)
        part, sums = compat.efficient_attention(*_read_strip(q, k, v, tile), bias, causal=bias is None, scale=scale)
        out[:, tile.queries] = part.transpose(1, 2)[..., : v.shape[-1]]
        lse[..., tile.queries.start : tile.queries.start + sums.shape[-1]] = sums
    return out, lse


def strips_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, *,
    longest: int, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    of_q = q.new_empty(q.shape)
    of_k, of_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for tile in query_strips(q.shape[1], longest, window):
        bias = _strip_bias(tile, documents, window, q)
        incoming, outcome = (_transposed(x[:, tile.queries]) for x in (gradient, out))
        start, count = tile.queries.start, tile.queries.stop - tile.queries.start
        sums = lse[..., start : start + -(-count // SUMS) * SUMS].contiguous()
        gradients = compat.efficient_attention_backward(
            incoming, *_read_strip(q, k, v, tile), bias, outcome, sums, causal=bias is None, scale=scale
        )
        of_q[:, tile.queries] = gradients[0].transpose(1, 2)[..., : q.shape[-1]]
        # Strips share keys, and query heads repeat them: both kinds of parts are added in fp32.
        for total, part in ((of_k, gradients[1]), (of_v, gradients[2])):
            per_head = part.transpose(1, 2)[..., : total.shape[-1]]
            total[:, tile.keys] += per_head.unflatten(2, (total.shape[2], -1)).sum(3)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def query_strips(length: int, longest: int, window: int) -> Iterator[RowTile]:
    """Yield strips of all rows. A query sees `longest` positions at most, and those of its window."""
    reach = min(window or length, longest, length)
    for start in range(0, length, STRIP_QUERIES):
        stop = min(start + STRIP_QUERIES, length)
        yield RowTile(slice(None), slice(start, stop), slice(max(0, start - reach + 1), stop))


def _read_strip(q: Tensor, k: Tensor, v: Tensor, tile: RowTile) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, H, R, E), keys and values (B, H, T, .), one per query head, as the kernel takes them."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x[:, tile.keys].repeat_interleave(group, dim=2) if group > 1 else x[:, tile.keys] for x in (k, v))
    return _transposed(q[:, tile.queries]), _transposed(keys), _transposed(values)


def _transposed(x: Tensor) -> Tensor:
    """Transpose (B, R, H, E) to (B, H, R, E), padded to a width that the kernel reads."""
    return padded(x, fused_width(x.shape[-1])).transpose(1, 2)


def _strip_bias(tile: RowTile, documents: Tensor | None, window: int, like: Tensor) -> Tensor | None:
    """Return (B, H, R, T), -inf where hidden. None where only later keys are hidden."""
    if documents is None and tile.is_causal(window):
        return None
    hidden = tile.hidden(window, like.device)[None]
    if documents is not None:
        hidden = hidden | (documents[:, tile.queries, None] != documents[:, None, tile.keys])
    # The kernel wants rows that begin at multiples of 16 numbers. Cut off, the padding stays between rows.
    size = (*hidden.shape[:2], -(-hidden.shape[2] // APART) * APART)
    bias = like.new_zeros(size)[..., : hidden.shape[2]].masked_fill_(hidden, float("-inf"))
    return bias[:, None].expand(like.shape[0], like.shape[2], -1, -1)


@torch.library.custom_op("meshwright::varlen_attention", mutates_args=())
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, borders: Tensor | None, longest: Tensor | None,
    window: int, scale: float, way: str, rate: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend as one operator of compiled code. Also returns the log-sum-exp."""
    out, lse = _forward(q, k, v, AttentionForm(documents, borders, longest, window, scale, way, rate, rows))
    return out.contiguous(), lse.contiguous()


@varlen_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, borders: Tensor | None, longest: Tensor | None,
    window: int, scale: float, way: str, rate: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, heads = q.shape[:3]
    if way == "blocks":
        return _output_like(q, v), q.new_empty(0)
    size: tuple[int, ...] = (batch, heads, length) if q.device.type == "cpu" else (heads, batch * length)
    if way == "strips":
        size = (batch, heads, -(-length // SUMS) * SUMS)
    return _output_like(q, v), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("meshwright::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None,
    documents: Tensor | None, borders: Tensor | None, longest: Tensor | None, rows: Tensor | None, window: int,
    scale: float, way: str, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    form = AttentionForm(documents, borders, longest, window, scale, way, rate, rows)
    of_q, of_k, of_v = _backward(gradient, q, k, v, out, lse, form)
    return of_q.contiguous(), of_k.contiguous(), of_v.contiguous()


@varlen_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None,
    documents: Tensor | None, borders: Tensor | None, longest: Tensor | None, rows: Tensor | None, window: int,
    scale: float, way: str, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, borders, longest, *ctx.options, rows = inputs
    # Blocks recompute the weights, so they need neither the result nor its log-sum-exp.
    saved = (None, None) if ctx.options[2] == "blocks" else output
    ctx.save_for_backward(q, k, v, *saved, documents, borders, longest, rows)


def _operator_backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *varlen_attention_backward(gradient, *ctx.saved_tensors, *ctx.options), *(None,) * 8


varlen_attention.register_autograd(_operator_backward, setup_context=_save_for_backward)
