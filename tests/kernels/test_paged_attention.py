"""Attention over blocks: the fused form against the plain one, and one row against any others."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from meshwright import compat
from meshwright.kernels.attention import paged as paged_attention
from meshwright.kernels.attention.paged import (
    HIDDEN,
    DenseCall,
    PagedCall,
    SeenBand,
    attend_dense,
    attend_paged,
)
from meshwright.kernels.chooser import simulate_device
from tests.counting import Operations
from tests.kernels.references import attend_paged_reference
from tests.kernels.stored_numbers import stored

BLOCK, BLOCKS = 4, 12


def bias(positions: list[int], keys: int, window: int = 0) -> torch.Tensor:
    query, key = torch.tensor(positions)[:, None], torch.arange(keys)
    seen = (key <= query) & ((key > query - window) | (window == 0))
    return torch.zeros(seen.shape).masked_fill(~seen, HIDDEN)


def calls() -> list[PagedCall]:
    """Rows 0 to 2 decode, 3 to 6 are a fresh prompt, 7 to 9 a chunk behind five positions, 10 and 11 share blocks, 12
    to 16 are a chunk of a sequence with a window, whose last block is not full."""
    return [
        PagedCall(0, 3, 1, torch.tensor([[1, 2], [3, 0], [4, 5]]), bias([6, 1, 7], 8)[:, None, None]),
        PagedCall(3, 1, 4, None, None),
        PagedCall(7, 1, 3, torch.tensor([[6, 7]]), bias([5, 6, 7], 8, window=3)[None, None]),
        PagedCall(10, 2, 1, slice(8, 11), bias([9, 11], 12)[:, None, None]),
        PagedCall(12, 1, 5, slice(2, 5), None, SeenBand(11, 4)),
        PagedCall(17, 1, 3, torch.tensor([[9, 1]]), None, SeenBand(7, 0)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("width, value_width", [(8, 8), (8, 5)])
def test_the_fused_form_equals_the_plain_one(
    dtype: torch.dtype, heads: int, key_heads: int, width: int, value_width: int
) -> None:
    torch.manual_seed(0)
    rows = 22  # two of them of no call
    q, k = torch.randn(rows, heads, width, dtype=dtype), torch.randn(rows, key_heads, width, dtype=dtype)
    v = torch.randn(rows, key_heads, value_width, dtype=dtype)
    keys = torch.randn(BLOCKS, BLOCK, key_heads, width, dtype=dtype)
    values = torch.randn(BLOCKS, BLOCK, key_heads, value_width, dtype=dtype)
    inputs = (q, k, v, keys, values, calls())
    stores = stored(keys), stored(values)
    actual, right = attend_paged(q, k, v, *stores, calls(), scale=0.3), attend_paged_reference(*inputs, scale=0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, right, rtol=tolerance, atol=tolerance)
    assert actual.shape == (rows, heads, value_width) and not actual[20:].any()


def by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, left: int, right: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a GPU's kernel means by its borders: query i of S sees the keys i + T - S - left to i + T - S + right."""
    assert q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 8 == 0
    back = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = (back >= -right) & ((back <= left) | (left < 0))
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1).float()


@pytest.mark.parametrize("by", ["a GPU", "strips"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("width, value_width", [(8, 8), (20, 5)])
def test_a_chunk_behind_others_makes_no_mask_of_all_its_queries(
    by: str, window: int, width: int, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In strips of 16 queries; on a GPU none, where the kernel takes borders as numbers."""
    torch.manual_seed(0)
    monkeypatch.setattr(paged_attention, "STRIP", 16)
    monkeypatch.setattr(compat, "banded_attention", by_flash)
    q, k = torch.randn(40, 4, width).bfloat16(), torch.randn(40, 2, width).bfloat16()
    keys, values = (torch.randn(24, BLOCK, 2, size).bfloat16() for size in (width, value_width))
    call = [PagedCall(0, 1, 40, slice(3, 23), None, SeenBand(78, window))]
    inputs = q, k, k[..., :value_width]
    with simulate_device("cuda" if by == "a GPU" else "cpu"), Operations() as made:
        chunk = attend_paged(*inputs, stored(keys), stored(values), call, scale=0.3)
    exact = attend_paged_reference(*inputs, keys, values, call, scale=0.3)
    torch.testing.assert_close(chunk, exact, rtol=2e-2, atol=2e-2)
    masks = [shape for shape in made.shapes if shape[-2:] in ((16, 80), (8, 80), (40, 80))]
    assert ((16, 80) in masks) == (by == "strips") and (40, 80) not in masks


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("width", [16, 6])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.usefixtures("threads")
def test_a_query_of_one_row_has_the_same_bits_beside_any_others(width: int, key_heads: int) -> None:
    """Whichever thread computes it; also with heads so narrow that rows begin anywhere in a line of memory, as part of
    a wider row does."""
    torch.manual_seed(1)
    keys, values = torch.randn(2, BLOCKS, BLOCK, key_heads, width).unbind()
    q, k = torch.randn(5, 5, width)[:, 1:], torch.randn(5, key_heads, width)
    blocks, positions = torch.randint(BLOCKS, (5, 4)), [3, 15, 8, 0, 11]

    def attended(rows: tuple[int, ...]) -> torch.Tensor:
        row_numbers = list(rows)
        call = PagedCall(
            0,
            len(row_numbers),
            1,
            blocks[row_numbers],
            bias([positions[row] for row in row_numbers], 16)[:, None, None],
        )
        is_run = row_numbers == list(range(row_numbers[0], row_numbers[-1] + 1))
        queries = q[row_numbers[0] : row_numbers[-1] + 1] if is_run else q[row_numbers]  # a run is not copied
        return attend_paged(queries, k[row_numbers], k[row_numbers], stored(keys), stored(values), [call], scale=0.25)

    alone = torch.cat([attended((row,)) for row in range(5)])
    for rows in itertools.chain(itertools.permutations(range(5), 3), [(0, 1, 2, 3, 4)]):
        assert torch.equal(attended(rows), alone[list(rows)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 0]], ids=["all", "some"])
def test_keys_in_one_piece_are_blocks_of_that_length(dtype: torch.dtype, rows: list[int]) -> None:
    torch.manual_seed(2)
    keys, values = torch.randn(4, 8, 2, 6, dtype=dtype), torch.randn(4, 8, 2, 5, dtype=dtype)
    q, seen = torch.randn(len(rows), 4, 6, dtype=dtype), bias([7, 0, 3, 5], 8)[:, None, None]
    slots = torch.tensor(rows)
    paged = PagedCall(0, len(rows), 1, slots[:, None], seen[slots])
    right = attend_paged_reference(q, q[:, :2], values[slots, 0], keys, values, [paged], scale=0.3)
    call = DenseCall(None if len(rows) == 4 else slots, seen)
    actual = attend_dense(q, keys, values, call, scale=0.3, width=5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, right, rtol=tolerance, atol=tolerance)
