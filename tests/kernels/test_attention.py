"""Attention: every path against sums written out in fp64, with every mask."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, reference
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import blockwise
from meshwright.kernels.attention.attend import Mask, causal_mask
from tests.kernels.exactness import (
    BLOCKS_OF_16_BITS,
    FUSED_ATTENTION,
    LOW,
    assert_not_worse,
    assert_single,
    drops,
    errors,
    plain_attention,
    tensors,
)

SCALE = 0.3
SIZES = [1, 5, 64, 65, 150]
"""Blocks of queries are not divided by most of them."""


@pytest.fixture(params=["blockwise", "torch"])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The fast form as it runs on a CPU where the blockwise form is faster, and where torch's own is."""
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: request.param == "blockwise")
    return fast().attend


def seen(queries: int, keys: int, window: int, documents: Tensor | None) -> Tensor:
    """Who sees whom, (B or 1, 1, queries, keys): distances instead of bounds."""
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    near = (back >= 0) & (back < (window or keys))
    if documents is None:
        return near[None, None]
    same = documents[:, keys - queries :].unsqueeze(2) - documents.unsqueeze(1) == 0
    return (near & same).unsqueeze(1)


def by_hand(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """Head by head, in the dtype it is given."""
    return plain_attention(q, k, v, seen(q.shape[1], k.shape[1], window, documents)[:, 0], SCALE)


def inputs(
    length: int, heads: int = 4, keys: int = 2, values: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return tensors((2, length, heads, 8), (2, length, keys, 8), (2, length, keys, values), dtype=dtype)


def documents(length: int) -> Tensor:
    """Rows of several documents, borders at different places, one of a single token."""
    first = (torch.arange(length) >= length // 3).int() + (torch.arange(length) >= length // 3 + 1).int()
    return torch.stack((first, (torch.arange(length) >= length // 2).int()))


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("keys", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_causal_attention(attend: Callable[..., Tensor], length: int, keys: int) -> None:
    assert_single(partial(attend, mask=Mask(), scale=SCALE), by_hand, inputs(length, keys=keys))


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("window", [0, 1, 3, 64, 70])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_windows_and_documents(attend: Callable[..., Tensor], length: int, window: int, packed: bool) -> None:
    rows = documents(length) if packed else None
    mask = causal_mask(length, length, window=window, documents=rows)
    exact = partial(by_hand, window=window, documents=rows)
    assert_single(partial(attend, mask=mask, scale=SCALE), exact, inputs(length))


@pytest.mark.parametrize("values", [4, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_values_narrower_than_keys(attend: Callable[..., Tensor], values: int, packed: bool) -> None:
    rows = documents(70) if packed else None
    mask = causal_mask(70, 70, documents=rows)
    operands = inputs(70, heads=4, keys=4, values=values)
    assert_single(partial(attend, mask=mask, scale=SCALE), partial(by_hand, documents=rows), operands)


@pytest.mark.parametrize("values", [4, 8])
def test_the_reference_is_exact_too(values: int) -> None:
    mask = causal_mask(9, 9, window=4, documents=documents(9))
    exact = partial(by_hand, window=4, documents=documents(9))
    assert_single(partial(reference().attend, mask=mask, scale=SCALE), exact, inputs(9, values=values))
    assert_single(partial(reference().attend, mask=Mask(), scale=SCALE), by_hand, inputs(9, values=values))


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("keys", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_16_bit_is_no_further_from_fp64_than_plain_code(
    attend: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    dtype: torch.dtype,
    packed: bool,
    keys: int,
) -> None:
    """On every CPU both ways are tried, whichever it would take itself: with 16-bit products and without."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    rows = documents(150) if packed else None
    mask = causal_mask(150, 150, documents=rows)
    operands = inputs(150, keys=keys, dtype=dtype)
    plain = partial(by_hand, documents=rows)
    bar = BLOCKS_OF_16_BITS if attention.prefers_blockwise(operands[0], mask) else FUSED_ATTENTION
    bars = [bar] * 4 if native else []
    assert_not_worse(partial(attend, mask=mask, scale=SCALE), plain, plain, operands, bars)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_16_bits_go_in_larger_blocks_few_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, packed: bool, window: int
) -> None:
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: True)
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: dtype == torch.bfloat16)
    rows, operands = documents(150) if packed else None, inputs(150, dtype=dtype)
    whole = list(blockwise.blocks(blockwise.rows_of(rows, operands[0]), window, operands[0]))
    monkeypatch.setattr(blockwise, "AT_ONCE", 1)
    parts = list(blockwise.blocks(blockwise.rows_of(rows, operands[0]), window, operands[0]))
    assert len(parts) == (2 if dtype == torch.bfloat16 and not packed else 1) * len(whole)
    mask = causal_mask(150, 150, window=window, documents=rows)
    run, plain = partial(attention.attend, mask=mask, scale=SCALE), partial(by_hand, window=window, documents=rows)
    if dtype == torch.float32:
        assert_single(run, plain, operands)
    else:
        assert_not_worse(run, plain, plain, operands, [BLOCKS_OF_16_BITS] * 4)


@pytest.mark.parametrize("past", [0, 1, 6])
@pytest.mark.parametrize("window", [0, 4])
def test_the_last_queries_over_all_keys(attend: Callable[..., Tensor], past: int, window: int) -> None:
    q, k, v = inputs(9)
    mask = causal_mask(9 - past, 9, window=window)
    assert_single(partial(attend, mask=mask, scale=SCALE), partial(by_hand, window=window), [q[:, past:], k, v])


def test_without_gradients_the_same_comes_out(attend: Callable[..., Tensor]) -> None:
    """Evaluation and generation take another path than training on some machines."""
    operands = inputs(70)
    trained = attend(*(tensor.requires_grad_() for tensor in operands), Mask(), scale=SCALE)
    with torch.no_grad():
        torch.testing.assert_close(attend(*operands, Mask(), scale=SCALE), trained, rtol=1e-5, atol=1e-6)


def test_strided_inputs(attend: Callable[..., Tensor]) -> None:
    """Queries, keys and values are often views: halves of one product, or a cache."""
    both = torch.randn(2, 66, 3, 16, generator=torch.Generator().manual_seed(0))

    def parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return packed[..., :8], packed[:, :, :1, 8:], packed[:, :, 1:2, 8:]

    def run(packed: Tensor) -> Tensor:
        return attend(*parts(packed), Mask(), scale=SCALE)

    assert max(errors(run, lambda packed: by_hand(*parts(packed)), [both])) < 1e-6


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_mask_pair_by_pair(window: int) -> None:
    rows = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    actual = causal_mask(4, 6, window=window, documents=rows).allowed(4, 6, rows.device)
    for row, s, t in itertools.product(range(2), range(4), range(6)):
        here = s + 2
        expected = t <= here and (not window or here - t < window) and bool(rows[row, here] == rows[row, t])
        assert bool(actual[row, 0, s, t]) == expected, (row, s, t)


def test_a_window_as_wide_as_the_row_is_none() -> None:
    assert causal_mask(5, 5).is_plain and causal_mask(5, 5, window=5).is_plain
    assert not causal_mask(5, 5, window=4).is_plain
    assert not causal_mask(5, 5, documents=torch.zeros(1, 5)).is_plain


def test_dropout_of_weights_keeps_the_mean(attend: Callable[..., Tensor]) -> None:
    """Each weight is dropped with its probability and the rest scaled up; equal keys drop the same."""
    q, k = torch.zeros(1, 400, 1, 8), torch.zeros(1, 400, 1, 8)
    v = torch.ones(1, 400, 1, 8)
    first = attend(q, k, v, Mask(), scale=SCALE, dropout=drops(q, 0.25))
    assert abs(first[:, 50:].mean().item() - 1) < 0.01 and first[:, 50:].std() > 0.01
    assert torch.equal(first, attend(q, k, v, Mask(), scale=SCALE, dropout=drops(q, 0.25)))
    assert not torch.equal(first, attend(q, k, v, Mask(), scale=SCALE, dropout=drops(q, 0.25, seed=1)))


@pytest.mark.parametrize("window", [0, 30])
def test_all_forms_drop_the_same_weights(window: int) -> None:
    """The blockwise form, its documents and windows, and the plain form: one mask, and its gradients."""
    q, k, v = (torch.randn(2, 130, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    documents = (torch.arange(130) // 47).expand(2, -1)
    mask, gradient = causal_mask(130, 130, window=window, documents=documents), torch.randn(2, 130, 4, 8)
    results = []
    for attend in (attention.attend, attention.attend_reference):
        out = attend(q, k, v, mask, scale=SCALE, dropout=drops(q, 0.3))
        results.append((out, *torch.autograd.grad(out, (q, k, v), gradient)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_the_square_of_weights_is_not_kept(attend: Callable[..., Tensor]) -> None:
    """What waits for the backward pass grows with S, not with S x S."""

    def saved_bytes(length: int) -> int:
        actual: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            actual[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        operands = [tensor.requires_grad_() for tensor in inputs(length)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attend(*operands, Mask(), scale=SCALE)
        return sum(actual.values())

    assert saved_bytes(512) <= 2 * saved_bytes(256)
