"""Compiled attention over blocks, in all forms that they keep, for widths with a loop of their own and others."""

import pytest
import torch

from meshwright.kernels.attention.paged import PagedStore, RowsCall, attend_rows
from meshwright.kernels.c import serving_library
from meshwright.spec.plan.execution import CACHE_FORMS, CacheForm
from tests.kernels.references import attend_rows_reference

BLOCKS, SIZE, KEYS, HEADS = 9, 4, 2, 6


@pytest.mark.parametrize("form", CACHE_FORMS)
@pytest.mark.parametrize("width", [20, 32, 64, 96, 128])
@pytest.mark.parametrize("window", [0, 7])
def test_loops_attend_as_the_reference(form: CacheForm, width: int, window: int) -> None:
    """Rows of zeros and numbers far smaller than their row's largest included: codes of 8 bits have subnormals."""
    loops = serving_library.compiled()
    assert loops is not None, "the tests need a C compiler"
    torch.manual_seed(0)
    stores = [PagedStore((BLOCKS, SIZE, KEYS, width), torch.zeros(1), form) for _ in range(2)]
    for store in stores:
        new = torch.randn(BLOCKS * SIZE, KEYS, width) * 3 * torch.rand(BLOCKS * SIZE, 1, 1)
        new[3], new[14:20, :, ::2] = 0, new[14:20, :, ::2] * 2e-3
        store.write(torch.arange(BLOCKS * SIZE), new, loops)
    call = RowsCall(torch.tensor([3, 1, 4, 8, 2, 0, 7]), torch.tensor([0, 3]), torch.tensor([10, 14]), 15)
    q = torch.randn(2, HEADS, width)
    right = attend_rows_reference(
        q, stores[0].read(slice(0, BLOCKS)), stores[1].read(slice(0, BLOCKS)), call, width=width, window=window,
        scale=width**-0.5,
    )  # fmt: skip
    actual = attend_rows(loops, q, *stores, call, width=width, window=window, scale=width**-0.5)
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)
