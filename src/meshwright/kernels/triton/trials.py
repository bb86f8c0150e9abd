"""Small runs of each operation, forward and backward, against its reference, before a kernel is chosen on a device."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.triton import (
    code_words,
    expert_rows,
    flash,
    gated,
    int8_product,
    logit_rows,
    narrow_piece,
    packed_product,
    paged,
    root_norm,
    rotary,
    row_rounding,
    updates,
)
from meshwright.kernels.triton.code_words import PackedMatrix

Made = Callable[..., Tensor]
"""Returns random numbers of a size, where the trial runs."""
FORMS = {"model": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Forms of a cache, with the dtypes of codes."""
LARGEST_ERROR = 0.03
"""Largest relative error: some roundings to bf16."""


def worst_of(errors: Iterable[float]) -> float:
    """Return the largest error. NaN counts as infinite, while `max` would pass over it."""
    return max(error if error == error else float("inf") for error in errors)


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((ours.double() - exact).norm() / exact.norm())


def _rounded(x: Tensor) -> Tensor:
    """Round x (N, K) fp32 to e4m3, with a power of two for each row."""
    scales = torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(-1, keepdim=True).float())))
    return (x.float() * scales).to(torch.float8_e4m3fn).float() / scales


def restored(make: Made) -> float:
    """Try 4-bit codes with a real zero for each 32 inputs and without, in rows that end within a word and in whole."""
    return worst_of(_restored_error(make, inputs, real) for inputs in (71, 1024) for real in (True, False))


def _restored_error(make: Made, inputs: int, real: bool) -> float:
    groups, row_bytes = -(-inputs // 32), -(-inputs // 2)
    scales, zeros, out = make(5, groups).float(), make(6, groups)[:5].float(), make(5, inputs)
    # 37 has no divisor in common with 256: any 256 codes in a row all differ, and 1,024 inputs have every byte.
    codes = (torch.arange(5 * row_bytes, device=out.device) * 37 % 256).view(5, -1).to(torch.uint8)
    weight = code_words.restore(PackedMatrix(codes, scales, zeros if real else None, None, inputs, 32), out)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs].double()
    wide = [x.double().repeat_interleave(32, 1)[:, :inputs] for x in (scales, zeros)]
    exact = (nibbles - (wide[1] if real else 8)) * wide[0]
    return _relative_error(weight, exact)


def narrowed(make: Made) -> float:
    """Try rounding to fp8: rows, and columns in several runs with gaps between their rows."""
    x = make(700, 90)
    rows, columns = row_rounding.rounded(x, torch.float8_e4m3fn), row_rounding.turned(x, 704)
    places = torch.arange(700, device=x.device) + 3
    apart = row_rounding.turned(x, 720, places)
    exact = _rounded(x), _rounded(x.t())
    pairs = (
        (rows.codes.double() * rows.scales, exact[0]),
        (columns.codes.double() * columns.scales, F.pad(exact[1], (0, 4))),
        (apart.codes.double() * apart.scales, F.pad(exact[1], (3, 17))),
    )
    return worst_of((ours - plain).abs().max().item() for ours, plain in pairs)


def packed(make: Made) -> float:
    """Try codes with zeros of half a byte, without zeros, by a table, and of 8 bits.

    In rows that end within a word and a group, and in whole words; by the kernel of few rows, and by the other with K
    cut and with the matrix second.
    """
    return worst_of(_packed_error(make, inputs, rows) for inputs in (299, 1024) for rows in (1, 2, 3, 70))


def _packed_error(make: Made, inputs: int, rows: int) -> float:
    groups, row_bytes = -(-inputs // 32), -(-inputs // 2)
    x, scales, bias = make(rows, inputs), make(70, groups).float(), make(1, 70)[0]
    codes = (torch.arange(70 * row_bytes, device=x.device) * 37 % 256).view(70, -1).to(torch.uint8)
    zeros = (torch.arange(70 * -(-groups // 2), device=x.device) * 11 % 256).to(torch.uint8).view(70, -1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs].double()
    zero_nibbles = torch.stack((zeros & 15, zeros >> 4), -1).flatten(1).repeat_interleave(32, 1)[:, :inputs].double()
    table, e4m3_codes = make(16).float(), make(70, inputs).to(torch.float8_e4m3fn)
    cases = (
        (PackedMatrix(codes, scales, zeros, None, inputs, 32), nibbles - zero_nibbles, bias),
        (PackedMatrix(codes, scales, None, None, inputs, 32), nibbles - 8, None),
        (PackedMatrix(codes, scales, None, table, inputs, 32), table.double()[nibbles.long()], None),
        (PackedMatrix(e4m3_codes, scales[:, :1].contiguous(), None, None, inputs, 0), e4m3_codes.double(), bias),
    )
    errors = []
    for matrix, numbers, added in cases:
        wide = matrix.scales.double().repeat_interleave(matrix.group or inputs, 1)[:, :inputs]
        exact = x.double() @ (numbers * wide).t() + (0 if added is None else added.double())
        errors.append(_relative_error(packed_product.packed_linear(x, matrix, added), exact))
    return worst_of(errors)


def int8(make: Made) -> float:
    """Try rounded rows, with two outlier columns apart, times codes.

    By tensor cores with K cut, and by the kernel of few rows.
    """
    return worst_of(_int8_error(make, rows, inputs) for rows, inputs in ((3, 600), (2, 1024)))


def _int8_error(make: Made, rows: int, inputs: int) -> float:
    x, scales, weights = make(rows, inputs), make(70, 1).float(), make(70, 2)
    codes = (torch.arange(70 * inputs, device=x.device) * 37 % 255 - 127).view(70, inputs).to(torch.int8)
    columns = torch.tensor([5, 500], dtype=torch.int32, device=x.device)
    marks = torch.zeros(inputs, dtype=torch.uint8, device=x.device)
    marks[columns.long()] = 1
    narrow = row_rounding.rounded(x, torch.int8, marks)
    plain = x.double().index_fill(1, columns.long(), 0.0)
    exact = plain @ (codes.double() * scales.double()).t() + x[:, columns.long()].double() @ weights.double().t()
    product = int8_product.int8_linear(x, narrow, int8_product.Int8Matrix(codes, scales, columns, weights), None)
    return _relative_error(product, exact)


def _store(size: tuple[int, int, int, int], like: Tensor, form: str) -> paged.BlockStore:
    """Return blocks of zeros."""
    codes = torch.zeros(size, dtype=FORMS[form] or like.dtype, device=like.device)
    return paged.BlockStore(codes, None if form == "model" else torch.zeros(size[:3], device=like.device))


def _numbers(store: paged.BlockStore) -> Tensor:
    """Return all positions (N, K, E), fp64."""
    codes = store.codes.flatten(0, 1).double()
    return codes if store.scales is None else codes * store.scales.flatten(0, 1).unsqueeze(-1)


def _encoded(numbers: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return codes of numbers (N, K, E), and scales (N, K). The largest number has the largest code."""
    scales = numbers.float().abs().amax(-1) / (448.0 if form == "fp8" else 127.0)
    scaled = numbers.float() / scales.unsqueeze(-1)
    return (scaled.to(torch.float8_e4m3fn) if form == "fp8" else scaled.round().to(torch.int8)), scales


def _plainly_rounded(numbers: Tensor, form: str) -> Tensor:
    """Round numbers (N, K, E) with plain code, fp64."""
    if form == "model":
        return numbers.double()
    codes, scales = _encoded(numbers, form)
    return codes.double() * scales.unsqueeze(-1)


def stored(make: Callable[..., Tensor]) -> float:
    """Try numbers and codes of 8 bits, with norms of heads and without."""
    return worst_of(_stored_error(make, form, normed) for form in FORMS for normed in (False, True))


def _stored_error(make: Callable[..., Tensor], form: str, normed: bool) -> float:
    """Store three rows of two key heads, in a buffer that holds others as well, at slots in another order.

    For codes, returns the error beyond that of plain rounding.
    """
    x = make(3, 8, 32)
    q, k, v = x.split((4, 2, 2), 1)
    turn, weights = make(3, 16).float(), make(2, 32)
    keys, values = (_store((2, 4, 2, 32), x, form) for _ in range(2))
    slots = torch.tensor([5, 0, 3], device=x.device)
    heads = x[:, :6].double()
    if normed:
        heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        heads = heads * weights.double().repeat_interleave(torch.tensor([4, 2], device=x.device), 0)
    first, second = heads.chunk(2, -1)
    cos, sin = (turn.double().cos()[:, None], turn.double().sin()[:, None])
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    plain = v.double()
    norms = paged.HeadNorms(weights[0], weights[1], 1e-5) if normed else None
    paged.rotate_and_store(q, k, v, turn.cos(), turn.sin(), slots, keys, values, interleaved=False, norms=norms)
    errors = [_relative_error(x[:, :4], exact[:, :4])]
    for store, numbers in ((keys, exact[:, 4:]), (values, plain)):
        ours, theirs = _numbers(store)[slots], _plainly_rounded(numbers.to(x.dtype), form)
        errors.append(_relative_error(ours, numbers) - (0.0 if form == "model" else _relative_error(theirs, numbers)))
    return worst_of(errors)


def attended(make: Callable[..., Tensor]) -> float:
    """Try numbers and codes of 8 bits."""
    return worst_of(_attended_error(make, form) for form in FORMS)


def _attended_error(make: Callable[..., Tensor], form: str) -> float:
    """Attend two rows over several runs of keys, in blocks of three positions that lie in another order.

    Heads share keys.
    """
    q, keys, values = make(2, 6, 40), make(330, 2, 40), make(331, 2, 40)[:330]
    tables = torch.arange(110, device=q.device) * 37 % 110
    offsets, last = (torch.tensor(numbers, device=q.device) for numbers in ([0, 4], [320, 0]))
    stores = _store((110, 3, 2, 40), q, form), _store((110, 3, 2, 40), q, form)
    for store, numbers in zip(stores, (keys, values), strict=True):
        codes, scales = (numbers, None) if form == "model" else _encoded(numbers, form)
        store.codes.copy_(codes.view(store.codes.shape))
        if store.scales is not None and scales is not None:
            store.scales.copy_(scales.view(store.scales.shape))
    out = paged.attend_rows(q, *stores, paged.RowPlaces(tables, offsets, last, 321), width=40, window=0, scale=0.2)
    positions = (3 * tables[:, None] + torch.arange(3, device=q.device)).flatten()[:321]
    seen = [_numbers(store)[positions].repeat_interleave(3, 1) for store in stores]
    weights = (torch.einsum("he,the->ht", q[0].double(), seen[0]) * 0.2).softmax(-1)
    alone = _numbers(stores[1])[3 * tables[4]].repeat_interleave(3, 0)
    return worst_of(
        (_relative_error(out[0], torch.einsum("ht,the->he", weights, seen[1])), _relative_error(out[1], alone))
    )


def likeliest_token(make: Callable[..., Tensor]) -> float:
    """Try rows of several blocks."""
    logits = make(3, 9000)
    likely, exact = logit_rows.likeliest(logits), logits.double().log_softmax(-1).max(-1)
    wrong = float((likely[:, 0] != exact.indices).any())
    return worst_of((wrong, _relative_error(likely[:, 1], exact.values)))


def problem(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with the kernels of an operation here. Empty = they run and are right."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            error = TRIALS[operation](partial(_normal, device, dtype))
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        lines = str(failure).splitlines() or [""]
        return f"its trial failed: {type(failure).__name__} {lines[0]}".strip()
    return "" if error < LARGEST_ERROR else f"its trial was off by {error:.2g}"


def _normal(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    # Sizes seed the numbers. A trial that needs two tensors of one size cuts one from a larger.
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(device, dtype)


def _largest_error(ours: Made, plain: Made, inputs: Sequence[Tensor]) -> float:
    """Return the largest relative error of the result and of each gradient."""
    return worst_of(map(_relative_error, _outcome(ours, inputs), _outcome(plain, [x.double() for x in inputs])))


def _outcome(function: Made, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _norm(make: Made) -> float:
    return _largest_error(partial(root_norm.rms_norm, eps=1e-5), _rms, (make(5, 200), make(200)))


def _add_norm(make: Made) -> float:
    def ours(x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(root_norm.add_rms_norm(x, added, weight, 1e-5))

    def plain(x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        return torch.cat((_rms(x + added, weight), x + added))

    return _largest_error(ours, plain, (make(5, 200), make(6, 200)[:5], make(200)))


def _layer_norm(make: Made) -> float:
    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (200,), weight, bias, 1e-5)

    return _largest_error(partial(root_norm.layer_norm, eps=1e-5), plain, (make(5, 200), make(200), make(1, 200)[0]))


def _swiglu(make: Made) -> float:
    return _largest_error(gated.swiglu, lambda gate, up: F.silu(gate) * up, (make(5, 300), make(6, 300)[:5]))


def _rope(make: Made) -> float:
    turn = make(1, 3, 1, 32).float()

    def ours(q: Tensor, k: Tensor) -> Tensor:
        # Rotation overwrites its inputs, and leaves of a graph must not be.
        return torch.cat(rotary.rotate_pair(q * 1, k * 1, turn.cos(), turn.sin()), 2)

    def plain(q: Tensor, k: Tensor) -> Tensor:
        first, second = torch.cat((q, k), 2).chunk(2, -1)
        cos, sin = turn.double().cos(), turn.double().sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return _largest_error(ours, plain, (make(2, 3, 4, 64), make(2, 3, 2, 64)))


def _merge(make: Made) -> float:
    scores, values = make(1, 2, 5, 8).float(), make(1, 2, 8, 32)
    (first, second), (first_values, second_values) = scores.split(4, -1), values.float().split(4, 2)
    out, lse = first.softmax(-1) @ first_values, first.logsumexp(-1)
    part_lse = second.logsumexp(-1)
    flash.merge(out, lse, second.softmax(-1) @ second_values, part_lse, part_lse)
    exact = scores.softmax(-1) @ values.float()
    return _relative_error(out, exact)


def _loss(make: Made) -> float:
    # 9,000 logits are one block of a kernel, and a part of the next.
    logits = make(4, 9000)
    targets = torch.tensor([1, 8999, -100, 5], device=logits.device)
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    losses = logit_rows.losses(logits, targets, None, ignored=-100, gradient=True, smoothing=0.0, z=0.0)
    return worst_of((_relative_error(losses, exact.detach()), _relative_error(logits, slope)))


def _permute(make: Made) -> float:
    rows = make(6, 100)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=rows.device)
    inverse = order.argsort()
    copies = _largest_error(lambda x: expert_rows.spread(x, order, inverse, 2), lambda x: x[order // 2], (rows[:3],))

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return (rows[inverse].view(3, 2, -1) * weights.unsqueeze(-1)).sum(1)

    return max(copies, _largest_error(lambda x, w: expert_rows.combine(x, w, inverse), plain, (rows, make(3, 2))))


def _grouped(make: Made) -> float:
    rows, weights = make(37, 40), make(3, 24, 40)
    counts = torch.tensor([20, 0, 17], device=rows.device)

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.cat((rows[:20] @ weights[0].T, rows[20:] @ weights[2].T))

    return _largest_error(partial(expert_rows.expert_linear, counts=counts), plain, (rows, weights))


def _attention(make: Made) -> float:
    q, k, v = make(70, 2, 32), make(71, 1, 32)[:70], make(72, 1, 32)[:70]
    borders = torch.tensor([0, 70], dtype=torch.int32, device=q.device)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("she,toe->hst", q, k) * 0.2
        hidden = torch.ones(70, 70, dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("hst,toe->she", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return _largest_error(lambda q, k, v: flash.attend(q, k, v, borders, 70, scale=0.2)[0], plain, (q, k, v))


def _narrow(make: Made) -> float:
    """Compare three updates with AdamW in fp64.

    A bf16 weight has 8-bit moments, an fp32 one a copy and bf16 moments.
    """
    gradient, weight = make(5, 300), make(6, 300)[:5].float()
    narrow, copy = weight.to(torch.bfloat16), weight.to(torch.bfloat16)
    coded = _narrow_error(gradient, narrow, None, (_no_moment(narrow, 127, True), _no_moment(narrow, 0, False)))
    signed, plain = (narrow_piece.Moment(torch.zeros_like(copy), None, sign) for sign in (True, False))
    return max(coded, _narrow_error(gradient, weight, copy, (signed, plain)))


def _narrow_error(
    gradient: Tensor, weight: Tensor, copy: Tensor | None, moments: tuple[narrow_piece.Moment, narrow_piece.Moment]
) -> float:
    step, exact = torch.zeros((), device=weight.device), weight.double()
    mean, square, wide_gradient = torch.zeros_like(exact), torch.zeros_like(exact), gradient.double()
    numbers = narrow_piece.UpdateNumbers(
        rate=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=step + 1, skip=step * 0
    )
    piece = narrow_piece.NarrowPiece(
        weight=weight, copy=copy, moments=moments, step=step,
        books=narrow_piece.code_books(weight.device),
        position=narrow_piece.PositionInWhole(seed=1, rows=5, whole_rows=5, first=0, second=0, width=300, column=0),
    )  # fmt: skip
    for number in range(1, 4):
        step.fill_(number)
        updates.narrow_adamw(piece, gradient, numbers)
        mean, square = 0.9 * mean + 0.1 * wide_gradient, 0.95 * square + 0.05 * wide_gradient**2
        size = (square / (1 - 0.95**number)).sqrt() + 1e-8
        exact = exact * (1 - 0.1 * 0.1) - 0.1 / (1 - 0.9**number) * mean / size
    updated = weight if copy is None else copy
    return _relative_error(updated, exact)


def _adamw(make: Made) -> float:
    """Try gradients and weights of each dtype that training has, aligned to 16 bytes and not.

    Masters, by which the kernel is chosen, are always fp32.
    """
    forms = ((dtype, aligned) for dtype in (torch.float32, torch.bfloat16, torch.float16) for aligned in (True, False))
    return worst_of(_adamw_error(make, dtype, aligned) for dtype, aligned in forms)


def _adamw_error(make: Made, dtype: torch.dtype, aligned: bool) -> float:
    """Return the error of two updates of tensors of several sizes compared with torch's kernel."""
    sizes = (5, 1), (70, 600), (3, 7)
    gradients = [make(*size).to(dtype) for size in sizes]
    # One element off the start of its memory, no address is a multiple of 16 bytes.
    if not aligned:
        gradients[2] = torch.cat((gradients[0].flatten()[:1], gradients[2].flatten()))[1:].view(3, 7)
    unit = torch.ones((), device=gradients[0].device)
    numbers = narrow_piece.UpdateNumbers(
        rate=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=2 * unit, skip=0 * unit
    )
    ours, exact = ([make(*size).float() for size in sizes] for _ in range(2))
    copies = None if dtype == torch.float32 else [x.to(dtype) for x in ours]
    states = [[[torch.zeros_like(x) for x in ours] for _ in range(2)] for _ in range(2)]
    for number in (1, 2):
        steps = [number * unit for _ in sizes]
        updates.adamw(gradients, ours, (states[0][0], states[0][1]), copies, steps, numbers)
        compat.fused_adamw(
            exact, [x.float() for x in gradients], (states[1][0], states[1][1]), steps, lr=0.1, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, grad_scale=numbers.divide_by, found_inf=numbers.skip,
        )  # fmt: skip
    pairs = [*zip(ours, exact, strict=True), *(() if copies is None else zip(copies, exact, strict=True))]
    return worst_of(_relative_error(a, b) for a, b in pairs)


def _squares(make: Made) -> float:
    """Try tensors of several sizes and dtypes, one of several chunks, aligned to 16 bytes and not."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in (0, 3):
            tensors = [make(5).to(dtype), make(300, 301).to(dtype), make(7, 9).to(dtype)[start:]]
            exact = torch.stack([x.double().square().sum() for x in tensors]).sum()
            errors.append((updates.squares(tensors).double().sum() / exact - 1).abs().item())
    return worst_of(errors)


def _no_moment(weight: Tensor, zero: int, signed: bool) -> narrow_piece.Moment:
    """Return a moment of zeros, whose index in the code book is `zero`, in blocks of 256."""
    codes = torch.full(weight.shape, zero, dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(len(weight), -(-weight.shape[1] // 256), device=weight.device)
    return narrow_piece.Moment(codes, scales, signed, 256)


TRIALS: dict[str, Callable[[Made], float]] = {
    "loss_rows": _loss,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "swiglu": _swiglu,
    "gelu": lambda make: _largest_error(gated.gelu, F.gelu, (make(5, 300),)),
    "rope": _rope,
    "merge": _merge,
    "permute": _permute,
    "grouped": _grouped,
    "attention": _attention,
    "paged_attention": attended,
    "adamw": _adamw,
    "square_sums": _squares,
    "rotate_and_store": stored,
    "likeliest": likeliest_token,
    "narrow_adamw": _narrow,
    "narrow": narrowed,
    "restore": restored,
    "packed_product": packed,
    "int8_product": int8,
}
"""Trial of each operation of chooser.RULES."""
