"""Attention over blocks: odd sizes, windows, several runs of keys, codes; nothing that a row does not see is read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels.attention.paged import PagedStore, RowsCall, attend_rows
from meshwright.kernels.triton import paged
from meshwright.model import build
from meshwright.model.generate import generate
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.plan.execution import CacheForm
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture
from tests.kernels.references import attend_rows_reference
from tests.model.shrunk import model, shrink

BLOCKS, SCALE = 40, 0.2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs of a row."""
    monkeypatch.setattr(paged, "SPLIT", 32)


def stores(size: int, heads: int, widths: tuple[int, int], form: CacheForm, dtype: torch.dtype) -> list[PagedStore]:
    """Of keys and values, written everywhere."""
    actual = []
    for seed, width in enumerate(widths):
        store = PagedStore((BLOCKS, size, heads, width), torch.zeros(1, dtype=dtype), form)
        numbers = torch.randn(BLOCKS * size, heads, width, generator=torch.Generator().manual_seed(seed))
        store.write(torch.arange(BLOCKS * size), numbers.to(dtype))
        actual.append(store)
    return actual


def call_of(lengths: list[int], size: int) -> RowsCall:
    """A sequence of each length in random blocks, whose last row it is; the last one has two rows."""
    order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(sum(lengths))).tolist()
    tables, offsets = [BLOCKS - 1], list[int]()
    for length in lengths:
        offsets.append(len(tables))
        tables += [order.pop() for _ in range(-(-length // size))]
    last = [length - 1 for length in lengths]
    if lengths[-1] > 1:
        offsets, last = [*offsets, offsets[-1]], [*last, last[-1] - 1]
    return RowsCall(torch.tensor(tables), torch.tensor(offsets), torch.tensor(last), max(last) + 1)


def poison(paged: list[PagedStore], call: RowsCall, window: int) -> None:
    """What no row sees is no number."""
    for store in paged:
        seen = torch.zeros(store.sizes[:2], dtype=torch.bool)
        for offset, last in zip(call.offsets.tolist(), call.last.tolist(), strict=True):
            places = torch.arange(max(0, last + 1 - window) if window else 0, last + 1)
            seen[call.tables[offset + places // store.sizes[1]], places % store.sizes[1]] = True
        for tensor in (store.codes, store.scales):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn:
                tensor[~seen] = float("nan")


def both(
    lengths: list[int], size: int, heads: int, key_heads: int, widths: tuple[int, int], window: int, form: CacheForm,
    dtype: torch.dtype, width: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    paged_stores, call = stores(size, key_heads, widths, form, dtype), call_of(lengths, size)
    q = torch.randn(len(call.last), heads, widths[0], generator=torch.Generator().manual_seed(7)).to(dtype)
    options: dict[str, Any] = {"width": width or widths[1], "window": window, "scale": SCALE}
    every = torch.arange(BLOCKS)
    read = [store.read(every).double() for store in paged_stores]
    right = attend_rows_reference(q.double(), read[0], read[1], call, **options)
    poison(paged_stores, call, window)
    return attend_rows(None, q, paged_stores[0], paged_stores[1], call, **options), right


@pytest.mark.parametrize(
    "width, heads, key_heads, window",
    [(64, 2, 2, 0), (80, 7, 1, 0), (128, 6, 2, 0), (64, 6, 2, 37), (80, 2, 2, 37), (128, 7, 1, 37)],
)
def test_widths_groups_and_windows(width: int, heads: int, key_heads: int, window: int) -> None:
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
        actual, right = both([1, 5, 33, 97], 4, heads, key_heads, (width, width), window, "model", dtype)
        assert actual.dtype == dtype
        assert ((actual.double() - right).norm() / right.norm()).item() < most


@pytest.mark.parametrize("form, most", [("int8", 2e-6), ("fp8", 2e-6)])
@pytest.mark.parametrize("size", [3, 16])
def test_codes_are_exact_numbers(form: CacheForm, size: int, most: float) -> None:
    actual, right = both([2, 40, 61], size, 4, 2, (24, 24), 0, form, torch.float32)
    assert ((actual.double() - right).norm() / right.norm()).item() < most


def test_values_that_are_a_part_of_keys() -> None:
    """Latent attention: the first numbers of a key are its values."""
    actual, right = both([9, 70], 8, 4, 1, (24, 24), 0, "model", torch.float32, width=17)
    torch.testing.assert_close(actual.double(), right, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_whatever_else_is_in_the_call() -> None:
    paged_stores, call = stores(4, 2, (16, 16), "model", torch.bfloat16), call_of([3, 20, 77], 4)
    q = torch.randn(4, 4, 16).bfloat16()
    options: dict[str, Any] = {"width": 16, "window": 0, "scale": SCALE}
    together = attend_rows(None, q, paged_stores[0], paged_stores[1], call, **options)
    for row in range(4):
        alone = RowsCall(call.tables, call.offsets[row : row + 1], call.last[row : row + 1], int(call.last[row]) + 1)
        assert torch.equal(
            attend_rows(None, q[row : row + 1], paged_stores[0], paged_stores[1], alone, **options)[0], together[row]
        )


@pytest.mark.parametrize("name, form", [("llama-3.1-8b", "model"), ("mistral-7b-v0.1", "int8")])
def test_an_engine_answers_by_it(name: str, form: CacheForm) -> None:
    """Rows that decode, with all that a GPU's step fuses; chunks of prompts are calls of torch."""
    plain = model(name).eval()
    actual = build(shrink(name), kernels="triton", initialize=False).eval()
    actual.load_state_dict(plain.state_dict())
    sizes: dict[str, Any] = {"compiled": False, "block": 4, "most_tokens": 24, "most_sequences": 4}
    engine = ServingEngine(actual, EngineOptions(**sizes, cache_dtype=form))
    options = EngineOptions(**sizes, packed=False, cache_dtype=form)
    assert engine.attention.startswith("triton (interpreter, fp32: ")
    assert all(layer.fuses_rotation for layer in engine.cache.layers)
    prompts = [[3, 14, 15], [9, 2, 6, 5, 3] * 4]
    asked = [engine.add(prompt, RequestOptions(max_new_tokens=4)) for prompt in prompts]
    engine.run(asked)
    beside = ServingEngine(plain, options)
    assert beside.attention == "torch (a CPU)"
    right = [beside.add(prompt, RequestOptions(max_new_tokens=4)) for prompt in prompts]
    beside.run(right)
    assert [generation.answers[0].ids for generation in asked] == [generation.answers[0].ids for generation in right]
    if form == "model":
        assert [generation.answers[0].ids for generation in asked] == [
            generate(plain, p, max_new_tokens=4).ids for p in prompts
        ]
