"""Norms, rotation and the write into a paged cache in one kernel, beside torch in fp64, at random."""

import random

import pytest
import torch

from meshwright.kernels.attention.paged import PagedStore, rotate_and_store, rotate_and_store_reference
from meshwright.kernels.triton import paged
from meshwright.spec.plan.execution import CacheForm
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

BLOCKS, SIZE = 5, 4


@pytest.mark.parametrize("form", ["model", "int8", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_as_the_reference_has_them(form: CacheForm, seed: int) -> None:
    """Odd sizes, groups, interleaved pairs, rows within a wider buffer; nothing beside the slots is written."""
    chance = random.Random(seed)
    rows, group, key_heads = chance.randint(1, 5), chance.choice([1, 3, 4]), chance.choice([1, 2, 3])
    width, dtype = 2 * chance.choice([3, 16, 20]), chance.choice([torch.float32, torch.bfloat16])
    heads, interleaved, normed = group * key_heads, chance.random() < 0.5, chance.random() < 0.5
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads + 2 * key_heads + 1, width, generator=draw).to(dtype)
    angle = torch.randn(rows, width // 2, generator=draw)
    slots = torch.tensor(chance.sample(range(BLOCKS * SIZE), rows))
    norms = None
    if normed:
        q_weight, k_weight = (torch.randn(width, generator=draw).to(dtype) for _ in range(2))
        norms = (q_weight, k_weight, 1e-6)
    stores, wide_stores = (
        [PagedStore((BLOCKS, SIZE, key_heads, width), torch.zeros(1, dtype=kind), form) for _ in range(2)]
        for kind in (dtype, torch.float64)
    )
    parts = [heads, key_heads, key_heads, 1]
    wide = x.double().split(parts, 1)
    inputs = (angle.cos(), angle.sin(), slots)
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double(), norms[2])
    rotate_and_store_reference(*wide[:3], *inputs, *wide_stores, interleaved=interleaved, norms=wide_norms)
    narrow = x.clone().split(parts, 1)
    assert rotate_and_store(*narrow[:3], *inputs, *stores, interleaved=interleaved, norms=norms)
    assert torch.equal(narrow[2], x[:, heads + key_heads : -1]) and torch.equal(narrow[3], x[:, -1:])
    most = 2e-6 if dtype == torch.float32 else 8e-3
    for actual, right in zip(narrow[:2], wide[:2], strict=True):
        assert ((actual.double() - right).norm() / right.norm()).item() < most
    all_blocks = torch.arange(BLOCKS)
    step = {"model": 0.0, "int8": 0.006, "fp8": 0.04}[form]
    for store, wide_store in zip(stores, wide_stores, strict=True):
        actual, right = store.read(all_blocks).double(), wide_store.read(all_blocks)
        assert ((actual - right).norm() / right.norm()).item() < most + step
        others = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill_(0, slots, False)
        assert not actual.flatten(0, 1)[others].any()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_those_of_the_plain_code(form: CacheForm) -> None:
    """Also of heads that are all zero."""
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(3))
    x[1, 0] = 0.0
    stores, plain = ([PagedStore((1, 4, 2, 16), x, form) for _ in range(2)] for _ in range(2))
    slots = torch.arange(4)
    still = torch.ones(4, 8), torch.zeros(4, 8)
    q, k = x.clone(), x.clone()
    assert rotate_and_store(q, k, x, *still, slots, *stores, interleaved=False, norms=None)
    plain[0].write(slots, x)
    for store in stores:
        assert all(torch.equal(a, b) for a, b in zip(store.tensors, plain[0].tensors, strict=True))


def test_what_the_kernel_does_not_take() -> None:
    x = torch.randn(2, 8, 2).transpose(1, 2)
    store = PagedStore((1, 4, 2, 8), x, "model")
    tables = torch.ones(2, 4), torch.zeros(2, 4)
    assert not rotate_and_store(x, x, x, *tables, torch.arange(2), store, store, interleaved=False, norms=None)
    assert not store.codes.any() and paged.is_taken(x.contiguous()) and paged.BlockStore(store.codes, None)
