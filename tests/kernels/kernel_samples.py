"""The table of launches of Triton kernels: what is compiled for GPUs that are not here.

A row calls the function that launches, on tensors without values, in sizes of a Llama-3-8B. Types, constants and
options are thereby those of a real launch. To add a kernel, add a row that launches it: with each constant that is
true or false at both. `test_triton.py` finds kernels without a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.triton import (
    code_words,
    expert_rows,
    flash,
    gated,
    int8_product,
    logit_rows,
    packed_product,
    paged,
    root_norm,
    rotary,
    row_rounding,
    updates,
)
from meshwright.kernels.triton.code_words import PackedMatrix
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, PositionInWhole, UpdateNumbers, code_books

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, UINT8, INT32, INT64 = torch.int8, torch.uint8, torch.int32, torch.int64
E4M3 = torch.float8_e4m3fn
WIDTH, FFN, HEADS, KEY_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
TOKENS = 8192
EPS = 1e-5
FLASH = ("flash_forward", "queries_backward", "keys_backward")


@dataclass(frozen=True, slots=True)
class Row:
    """Launches of some kernels."""

    launch: Callable[[], object]
    products: tuple[str, ...] = ()
    """Kernels that must use tensor cores."""
    whole: bool = False
    """Whether those are the ones for 8-bit whole numbers."""
    fits: bool = True
    """Whether shared memory and registers must suffice. Not where torch's kernel is taken by default."""


def empty(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def learning(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return empty(*size, dtype=dtype).requires_grad_()


def both_ways(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """A forward pass and its backward pass."""
    results = function(*inputs, **options)
    learned = [x for x in ([results] if isinstance(results, Tensor) else results) if x.requires_grad]
    torch.autograd.backward(learned, [torch.empty_like(x) for x in learned])


def loss(dtype: torch.dtype, factor: tuple[int, ...] | None, *, gradient: bool, smoothing: float) -> Row:
    factors = None if factor is None else empty(*factor, dtype=FP32)
    launch = partial(
        logit_rows.losses, empty(512, VOCABULARY, dtype=dtype), empty(512, dtype=INT64), factors, ignored=-100,
        gradient=gradient, smoothing=smoothing, z=smoothing,
    )  # fmt: skip
    return Row(launch)


def loss_of_parts() -> None:
    """The vocabulary is spread over two devices; this is the second."""
    logits, targets, numbers = empty(512, VOCABULARY // 2), empty(512, dtype=INT64), empty(512, dtype=FP32)
    logit_rows.gathered(logits, targets, VOCABULARY // 2)
    logit_rows.write_gradients(
        logits, targets, numbers, numbers, first=VOCABULARY // 2, vocabulary=VOCABULARY, smoothing=0.1, z=1e-4
    )


def norm(width: int, dtype: torch.dtype = BF16, *, added: bool = False, frozen: bool = False) -> Row:
    weight = empty(width, dtype=dtype) if frozen else learning(width, dtype=dtype)
    stream = [learning(1, TOKENS, width, dtype=dtype) for _ in range(2 if added else 1)]
    return Row(partial(both_ways, root_norm.add_rms_norm if added else root_norm.rms_norm, *stream, weight, EPS))


def layer_norm(width: int, dtype: torch.dtype = BF16) -> Row:
    inputs = learning(1, TOKENS, width, dtype=dtype), learning(width, dtype=dtype), learning(width, dtype=dtype)
    return Row(partial(both_ways, root_norm.layer_norm, *inputs, EPS))


def activation(dtype: torch.dtype) -> Row:
    return Row(partial(both_ways, gated.swiglu, *(learning(1, TOKENS, FFN, dtype=dtype) for _ in range(2))))


def rotation(*, interleaved: bool, in_place: bool) -> Row:
    def launch() -> None:
        q, k = learning(2, TOKENS, HEADS, HEAD), learning(2, TOKENS, KEY_HEADS, HEAD)
        tables = (empty(1, TOKENS, 1, HEAD // 2, dtype=FP32) for _ in range(2))
        both_ways(rotary.rotate_pair, q * 1, k * 1, *tables, interleaved, in_place=in_place)

    return Row(launch)


def merge() -> None:
    sizes = (1, HEADS, TOKENS, HEAD)
    flash.merge(
        empty(*sizes, dtype=FP32), empty(*sizes[:3], dtype=FP32), empty(*sizes), empty(*sizes[:3], dtype=FP32),
        empty(*sizes[:3], dtype=FP32),
    )  # fmt: skip


def flash_attention(dtype: torch.dtype = BF16, *, causal: bool = True, fits: bool = True) -> Row:
    inputs = [learning(TOKENS, heads, HEAD, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    launch = partial(
        both_ways, flash.attend, *inputs, empty(5, dtype=INT32), TOKENS // 2, causal=causal, scale=0.1
    )  # fmt: skip
    return Row(launch, () if dtype == FP32 else FLASH, fits=fits)


def experts_and_back(copies: int) -> None:
    order, inverse = (empty(TOKENS * copies, dtype=INT64) for _ in range(2))
    both_ways(expert_rows.spread, learning(TOKENS, WIDTH), order, inverse, copies)
    weights = learning(TOKENS, copies, dtype=FP32)
    both_ways(expert_rows.combine, learning(TOKENS * copies, WIDTH), weights, inverse)


def experts(dtype: torch.dtype) -> Row:
    inputs = learning(TOKENS, 2048, dtype=dtype), learning(128, 768, 2048, dtype=dtype), empty(128, dtype=INT64)
    return Row(partial(both_ways, expert_rows.expert_linear, *inputs), ("grouped_rows", "grouped_weights"))


def update(moments: torch.dtype, weight: torch.dtype, *, copy: bool) -> Row:
    """Of a matrix of which ZeRO holds a part."""
    block = 256 if moments == UINT8 else 0
    scales = empty(FFN, WIDTH // 256, dtype=FP32) if block else None
    number = empty(dtype=FP32)
    piece = NarrowPiece(
        weight=empty(FFN, WIDTH, dtype=weight), copy=empty(FFN, WIDTH) if copy else None,
        moments=tuple(Moment(empty(FFN, WIDTH, dtype=moments), scales, sign, block) for sign in (True, False)),
        step=number, books=code_books(torch.device("meta")),
        position=PositionInWhole(
            seed=2**33 + 7, rows=FFN, whole_rows=8 * FFN, first=1, second=FFN, width=WIDTH, column=0
        ),
    )  # fmt: skip
    numbers = UpdateNumbers(
        rate=1e-4, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=number, skip=number
    )  # fmt: skip
    return Row(partial(updates.narrow_adamw, piece, empty(FFN, WIDTH, dtype=FP32), numbers))


def many(dtype: torch.dtype, copied: torch.dtype, first: int = 0) -> Row:
    """Passes over two matrices whose gradients begin `first` elements behind the beginning of their memory."""

    def launch() -> None:
        gradients = [empty(first + FFN * WIDTH, dtype=dtype)[first:].view(FFN, WIDTH) for _ in range(2)]
        masters, means, squares, copies = ([empty(FFN, WIDTH, dtype=kind) for _ in range(2)]
                                           for kind in (FP32, FP32, FP32, copied))  # fmt: skip
        number = empty(dtype=FP32)
        numbers = UpdateNumbers(
            rate=1e-4, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=number, skip=number
        )
        updates.adamw(gradients, masters, (means, squares), None if copied == FP32 else copies, [number] * 2, numbers)
        updates.squares(gradients)

    return Row(launch)


def groups(
    zeros: str, group: int, width: int = WIDTH, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scales of a matrix (4,096, width), and zeros: whole = half a byte each, real, or none."""
    count = width // group if group else 1
    made = {"": None, "whole": empty(WIDTH, -(-count // 2), dtype=UINT8), "real": empty(WIDTH, count, dtype=FP16)}
    return empty(WIDTH, count, dtype=dtype), made[zeros]


def matrix_of_codes(
    group: int, zeros: str, inner: int = WIDTH, codes: torch.dtype = UINT8, *, table: bool = False,
    dtype: torch.dtype = BF16,
) -> PackedMatrix:  # fmt: skip
    """A matrix (4,096, inner)."""
    row = inner if codes == E4M3 else -(-inner // 2)
    numbers = empty(16, dtype=FP32) if table else None
    scales, shifts = groups(zeros, group, inner, dtype)
    return PackedMatrix(empty(WIDTH, row, dtype=codes), scales, shifts, numbers, inner, group)


def restored(zeros: str, *, inner: int = WIDTH, table: bool = False, codes: torch.dtype = UINT8) -> Row:
    matrix = matrix_of_codes(64, zeros, inner, codes, table=table)
    return Row(partial(code_words.restore, matrix, empty(WIDTH, inner)))


def packed(
    rows: int, group: int, zeros: str = "", *, inner: int = 0, dtype: torch.dtype = BF16, codes: torch.dtype = UINT8,
    table: bool = False, bias: bool = True,
) -> Row:  # fmt: skip
    """K is cut for a few rows; one and two have a kernel of their own."""
    inner = inner or (FFN if rows < 1000 else WIDTH)
    matrix = matrix_of_codes(group, zeros, inner, codes, table=table, dtype=dtype)
    added = empty(WIDTH, dtype=dtype) if bias else None
    launch = partial(packed_product.packed_linear, empty(rows, inner, dtype=dtype), matrix, added)
    return Row(launch, ("packed_rows",))


def rounded_rows_product(rows: int) -> Row:
    x, matrix = empty(rows, WIDTH), matrix_of_codes(0, "", codes=E4M3)
    return Row(partial(packed_product.few_rows_linear, x, matrix, None, empty(rows, 1, dtype=FP32)))


def rounded(dtype: torch.dtype, *, skips: bool) -> Row:
    marks = empty(WIDTH, dtype=UINT8) if skips else None
    return Row(partial(row_rounding.rounded, empty(TOKENS, WIDTH), dtype, marks))


def turned(*, placed: bool) -> Row:
    if placed:
        return Row(partial(row_rounding.turned, empty(TOKENS, WIDTH), TOKENS + 128, empty(TOKENS, dtype=INT64)))
    return Row(partial(row_rounding.turned, empty(8, FFN, WIDTH), FFN))


def whole_product(rows: int, *, outliers: bool, bias: bool) -> Row:
    inner = FFN if rows < 1000 else WIDTH
    apart = (empty(7, dtype=INT32), empty(WIDTH, 7)) if outliers else (None, None)
    matrix = int8_product.Int8Matrix(empty(WIDTH, inner, dtype=INT8), empty(WIDTH, 1), *apart)
    narrow = row_rounding.NarrowRows(empty(rows, inner, dtype=INT8), empty(rows, 1, dtype=FP32))
    added = empty(WIDTH) if bias else None
    launch = partial(int8_product.int8_linear, empty(rows, inner), narrow, matrix, added)
    return Row(launch, ("int8_rows",), whole=True)


def paged_attention(
    width: int, heads: int, key_heads: int, codes: torch.dtype = BF16, *, longest: int = 4000, window: int = 0,
    dtype: torch.dtype = BF16,
) -> Row:  # fmt: skip
    """A few query heads are too few rows for the larger products of tensor cores: those of Ampere multiply them."""
    size = 500, 16, key_heads, width
    codes = dtype if codes == BF16 else codes
    scales = None if codes == dtype else empty(*size[:3], dtype=FP32)
    stores = (paged.BlockStore(empty(*size, dtype=codes), scales) for _ in range(2))
    places = paged.RowPlaces(empty(400, dtype=INT64), empty(5, dtype=INT64), empty(5, dtype=INT64), longest)
    q = empty(5, heads, width, dtype=dtype)
    return Row(partial(paged.attend_rows, q, *stores, places, width=width, window=window, scale=0.1))


def kept_rows(codes: torch.dtype = BF16, *, norms: bool, interleaved: bool = False, heads: int = HEADS) -> Row:
    """Rows of one product of queries, keys and values, whose parts lie side by side."""
    q, k, v = empty(5, heads + 2 * KEY_HEADS, HEAD).split((heads, KEY_HEADS, KEY_HEADS), 1)
    size = 500, 16, KEY_HEADS, HEAD
    scales = None if codes == BF16 else empty(*size[:3], dtype=FP32)
    stores = (paged.BlockStore(empty(*size, dtype=codes), scales) for _ in range(2))
    tables = (empty(5, HEAD // 2, dtype=FP32) for _ in range(2))
    normed = paged.HeadNorms(empty(HEAD), empty(HEAD), EPS) if norms else None
    slots = empty(5, dtype=INT64)
    launch = partial(paged.rotate_and_store, q, k, v, *tables, slots, *stores, interleaved=interleaved, norms=normed)
    return Row(launch)


def wide_gradients() -> None:
    """With silu(gate) * up again."""
    gated.gradients(*(empty(TOKENS, FFN) for _ in range(3)), product=True, consume=True)


ROWS = {
    "loss": loss(BF16, None, gradient=True, smoothing=0.0),
    "loss times a factor": loss(BF16, (), gradient=True, smoothing=0.1),
    "loss times factors": loss(FP32, (512,), gradient=True, smoothing=0.0),
    "loss alone": loss(FP16, None, gradient=False, smoothing=0.1),
    "loss of parts": Row(loss_of_parts),
    "norm": norm(WIDTH),
    "norm with a frozen weight": norm(WIDTH, frozen=True),
    "norm of a sum": norm(WIDTH, added=True),
    "norm of wide rows": norm(16384),
    "norm of heads": norm(HEAD),
    "norm in fp32": norm(WIDTH, FP32),
    "layer norm": layer_norm(WIDTH),
    "layer norm of narrow rows": layer_norm(768, FP16),
    "SwiGLU": activation(BF16),
    "SwiGLU in fp32": activation(FP32),
    "SwiGLU back to its product": Row(wide_gradients),
    "GELU": Row(partial(both_ways, gated.gelu, learning(TOKENS, FFN), "none")),
    "GELU by tanh": Row(partial(both_ways, gated.gelu, learning(TOKENS, FFN, dtype=FP32), "tanh")),
    "AdamW of many tensors": many(BF16, BF16),
    "AdamW of many tensors in fp32": many(FP32, FP32),
    "AdamW of many tensors that begin anywhere": many(BF16, FP16, 1),
    "rotation": rotation(interleaved=False, in_place=True),
    "rotation of pairs side by side": rotation(interleaved=True, in_place=False),
    "merge": Row(merge),
    "flash attention": flash_attention(),
    "flash attention both ways": flash_attention(FP16, causal=False, fits=False),
    "flash attention in fp32": flash_attention(FP32, fits=False),
    "copies for one expert": Row(partial(experts_and_back, 1)),
    "copies for experts": Row(partial(experts_and_back, 8)),
    "experts": experts(BF16),
    "experts in fp16": experts(FP16),
    "update of bf16 moments": update(BF16, FP32, copy=True),
    "update of bf16 moments, no copy": update(BF16, FP32, copy=False),
    "update of bf16 weights": update(FP32, BF16, copy=False),
    "update of 8-bit moments": update(UINT8, BF16, copy=False),
    "update of 8-bit moments with a copy": update(UINT8, FP32, copy=True),
    "restored": restored(""),
    "restored with real zeros": restored("real"),
    "restored, nf4": restored("", table=True),
    "restored, ends inside of a word": restored("whole", inner=4097),
    "restored, e4m3": restored("", codes=E4M3),
    "restored with whole zeros": restored("whole"),
    "packed, 1 row, whole zeros": packed(1, 32, "whole"),
    "packed, 16 rows, real zeros": packed(16, 32, "real", dtype=FP16),
    "packed, 8 rows, no zeros": packed(8, 128, bias=False),
    "packed, 1 row, nf4": packed(1, 64, table=True),
    "packed, 1 row, e4m3": packed(1, 0, codes=E4M3),
    "packed, 2 rows, real zeros": packed(2, 128, "real", dtype=FP16, bias=False),
    "packed, 2 rows, ends inside of a word": packed(2, 32, "whole", inner=4097),
    "packed, 16 rows, ends inside of a word": packed(16, 32, inner=4097),
    "packed, 2 rounded rows, e4m3": rounded_rows_product(2),
    "packed, 16 rows, nf4": packed(16, 64, table=True),
    "packed, 16 rows, e4m3": packed(16, 0, codes=E4M3),
    "packed, 16 rows, fp16": packed(16, 64, "whole", dtype=FP16),
    "packed, 64 rows": packed(64, 32, "whole"),
    "packed, 200 rows, ends inside of a word": packed(200, 32, "whole", inner=4097, dtype=FP16),
    "packed, 128 rows": packed(128, 128),
    "packed, 1,024 rows": packed(1024, 32, "real"),
    "packed, 128 rows, nf4": packed(128, 64, table=True, bias=False),
    "packed, 128 rows, e4m3": packed(128, 0, codes=E4M3),
    "rounded to int8": rounded(INT8, skips=True),
    "rounded to e4m3": rounded(E4M3, skips=False),
    "rounded to numbers of e4m3": rounded(BF16, skips=False),
    "columns rounded": turned(placed=False),
    "columns rounded, rows apart": turned(placed=True),
    "int8, 1 row": whole_product(1, outliers=True, bias=True),
    "int8, 2 rows": whole_product(2, outliers=False, bias=False),
    "int8, 16 rows": whole_product(16, outliers=True, bias=False),
    "int8, 64 rows": whole_product(64, outliers=False, bias=True),
    "int8, 128 rows": whole_product(128, outliers=True, bias=True),
    "int8, 4,096 rows": whole_product(4096, outliers=True, bias=False),
    "paged attention, 64 wide": paged_attention(64, 8, 8),
    "paged attention, 80 wide": paged_attention(80, 14, 2),
    "paged attention, 128 wide": paged_attention(128, 32, 8),
    "paged attention, 256 wide": paged_attention(256, 16, 2, window=1024),
    "paged attention in one run": paged_attention(128, 32, 8, longest=200, dtype=FP16),
    "paged attention over int8": paged_attention(128, 32, 8, INT8),
    "paged attention over e4m3": paged_attention(128, 32, 8, E4M3),
    "likeliest tokens": Row(lambda: logit_rows.likeliest(empty(5, VOCABULARY, dtype=FP32))),
    "likeliest tokens of few": Row(lambda: logit_rows.likeliest(empty(5, 300, dtype=FP32))),
    "rows kept": kept_rows(norms=False),
    "rows kept with norms": kept_rows(norms=True, interleaved=True, heads=7 * KEY_HEADS),
    "rows kept in int8": kept_rows(INT8, norms=True),
    "rows kept in e4m3": kept_rows(E4M3, norms=False, heads=KEY_HEADS),
}  # fmt: skip
