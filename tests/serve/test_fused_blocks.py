"""Blocks that compiled loops compute whole, against the same blocks part by part: bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.serve_quantized import quantized
from meshwright.kernels.compiled.library import Loops
from meshwright.model import Transformer, build
from meshwright.serve import fused_blocks
from tests.model.shrunk import KINDS, shrink
from tests.serve.test_exact import PROMPTS, bits, served

WHOLE = ("llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b")
WAYS: tuple[dict[str, Any], ...] = ({}, {"cache_dtype": "int8"}, {"cache_dtype": "fp8"}, {"head": "int8"})


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each block that is computed whole."""
    rows, plain = list[int](), Loops.block

    def counted(self: Loops, fields: Any, step: Any, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[1])
        return plain(self, fields, step, x)

    monkeypatch.setattr(Loops, "block", counted)
    return rows


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def wide(name: str) -> Transformer:
    """A small model whose matrices are made of whole panels."""
    shape = shrink(name)
    if not shape.mla:
        shape = replace(shape, hidden=64, head_dim=16, ffn=96)
    found = build(shape).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(torch.linspace(-0.2, 0.2, len(parameter)))
    return found


def by_parts(monkeypatch: pytest.MonkeyPatch, found: Transformer, **options: Any) -> list[object]:
    with monkeypatch.context() as changed:
        changed.setattr(fused_blocks, "_is_plain", lambda *_: False)
        return bits(served(found, PROMPTS, **options)[0])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bits_are_those_of_the_parts(
    name: str, exact: bool, way: dict[str, Any], blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = by_parts(monkeypatch, wide(name), exact=exact, **way)
    assert not blocks
    assert bits(served(wide(name), PROMPTS, exact=exact, **way)[0]) == right
    assert bool(blocks) == (name in WHOLE and way.get("cache_dtype") != "fp8")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("scheme", ["int8", "int4-sym"])
def test_codes(name: str, scheme: str, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = quantized(wide(name), scheme)
    right = by_parts(monkeypatch, found, exact=False)
    assert bits(served(found, PROMPTS, exact=False)[0]) == right
    assert blocks


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("scheme", ["", "int8"])
def test_threads_change_no_bit(scheme: str, blocks: list[int]) -> None:
    """Of a model whose matrices, and keys of 600 positions, are more than one thread reads alone."""
    shape = replace(shrink("llama-3.1-8b"), hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=768, max_positions=1024)
    found = build(shape).eval()
    found = quantized(found, scheme) if scheme else found
    prompts, answers = [PROMPTS[0], (PROMPTS[1] * 100)[:600], PROMPTS[2]], []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        answers.append(bits(served(found, prompts, exact=True, most_tokens=64)[0]))
    assert answers[0] == answers[1] == answers[2]
    assert blocks
