"""Small runs of the kernels of a serving engine's step beside plain code, as those of trials.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.kernels.triton import keeping, likeliest, paged
from meshwright.kernels.triton.code_trials import worst_of

FORMS = {"model": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Forms of a cache, with the dtypes of codes."""


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
    """Store three rows of two key heads, in a buffer with others beside them, at slots in another order.

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
    norms = keeping.HeadNorms(weights[0], weights[1], 1e-5) if normed else None
    keeping.turn_and_keep(q, k, v, turn.cos(), turn.sin(), slots, keys, values, interleaved=False, norms=norms)
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
    out = paged.attend_rows(
        q, *stores, paged.RowPlaces(tables, offsets, last, 321), width=40, window=0, scale=0.2
    )  # fmt: skip
    positions = (3 * tables[:, None] + torch.arange(3, device=q.device)).flatten()[:321]
    seen = [_numbers(store)[positions].repeat_interleave(3, 1) for store in stores]
    weights = (torch.einsum("he,the->ht", q[0].double(), seen[0]) * 0.2).softmax(-1)
    alone = _numbers(stores[1])[3 * tables[4]].repeat_interleave(3, 0)
    return worst_of(
        (_relative_error(out[0], torch.einsum("ht,the->he", weights, seen[1])), _relative_error(out[1], alone))
    )


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    error: float = ((ours.double() - exact.double()).norm() / exact.double().norm()).item()
    return error


def likeliest_token(make: Callable[..., Tensor]) -> float:
    """Try rows of several blocks."""
    logits = make(3, 9000)
    likely, exact = likeliest.likeliest(logits), logits.double().log_softmax(-1).max(-1)
    wrong = float((likely[:, 0] != exact.indices).any())
    error: float = ((likely[:, 1].double() - exact.values).norm() / exact.values.norm()).item()
    return worst_of((wrong, error))
