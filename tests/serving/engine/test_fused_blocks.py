"""Blocks that compiled loops compute whole, against the same blocks part by part: bit for bit."""

import copy
import itertools
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.serve_quantized import quantized
from meshwright.kernels.c.serving_library import Loops, compiled
from meshwright.model import Transformer, build
from meshwright.model.seams import compute
from meshwright.model.transformer import Block
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows import prepared_layers
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from tests.model.shrunk import KINDS, shrink
from tests.serving.engine.test_exact import PROMPTS, bits, served

WHOLE = ("llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b")
WAYS: tuple[dict[str, Any], ...] = ({}, {"cache_dtype": "int8"}, {"cache_dtype": "fp8"}, {"head": "int8"})


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each block that is computed whole."""
    rows, plain = list[int](), Loops.block

    def counted(self: Loops, fields: Any, step: Any, beside: Any, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[1])
        return plain(self, fields, step, beside, x)

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
    network = build(shape).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(torch.linspace(-0.2, 0.2, len(parameter)))
    return network


def compiled_loops() -> Loops:
    loops = compiled()
    assert loops is not None, "the tests need a C compiler"
    return loops


def by_parts(monkeypatch: pytest.MonkeyPatch, network: Transformer, **options: Any) -> list[object]:
    with monkeypatch.context() as changed:
        changed.setattr(prepared_layers, "_is_plain", lambda *_: False)
        return bits(served(network, PROMPTS, **options)[0])


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
    network = quantized(wide(name), scheme)
    right = by_parts(monkeypatch, network, exact=False)
    assert bits(served(network, PROMPTS, exact=False)[0]) == right
    assert bool(blocks) == ("int8" not in scheme or compiled_loops().has_int8)


def adapters(name: str) -> dict[str, ServedAdapter]:
    """Of different ranks and targets, loud enough to change answers."""
    by_name = {}
    for seed, (called, rank, targets) in enumerate((("one", 3, "attention"), ("all", 18, "all"), ("two", 8, "v,down"))):
        lora, chance = LoRAShape(rank=rank, alpha=rank, targets=targets), torch.Generator().manual_seed(seed)
        low = [part for part in parameters(replace(wide(name).shape, lora=lora)) if part.adapts]
        tensors = {part.name: torch.randn(part.shape, generator=chance) * 0.3 for part in low}
        by_name[called] = ServedAdapter(lora, tensors)
    return by_name


def adapted(name: str, exact: bool) -> list[object]:
    """Answers of a batch in which requests have adapters, in turns, or none."""
    options = EngineOptions(block=4, most_tokens=24, most_sequences=8, exact=exact)
    engine = ServingEngine(wide(name), options, adapters=adapters(name))
    called = itertools.cycle(("one", None, "all", "two", "one"))
    asked = [
        engine.add(prompt, RequestOptions(max_new_tokens=8, logprobs=3, adapter=next(called))) for prompt in PROMPTS
    ]
    engine.run(asked)
    return bits(asked)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "qwen3-0.6b"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_adapters_beside_them(name: str, exact: bool, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(prepared_layers, "_is_plain", lambda *_: False)
        right = adapted(name, exact)
    assert not blocks
    assert adapted(name, exact) == right
    assert max(blocks) > 5, "rows of several adapters"
    assert right != bits(served(wide(name), PROMPTS, exact=exact)[0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("scheme", ["", "int8"])
def test_threads_change_no_bit(scheme: str, blocks: list[int]) -> None:
    """Of a model whose matrices, and keys of 600 positions, are more than one thread reads alone."""
    shape = replace(shrink("llama-3.1-8b"), hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=768, max_positions=1024)
    network = build(shape).eval()
    network = quantized(network, scheme) if scheme else network
    prompts, answers = [PROMPTS[0], (PROMPTS[1] * 100)[:600], PROMPTS[2]], []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        answers.append(bits(served(network, prompts, exact=True, most_tokens=64)[0]))
    assert answers[0] == answers[1] == answers[2]
    assert bool(blocks) == ("int8" not in scheme or compiled_loops().has_int8)


@pytest.mark.parametrize("part", ["attention_norm", "attention", "attention.q_norm", "attention.o", "mlp", "mlp.gate"])
def test_hooks_come_and_go_between_steps(part: str, blocks: list[int]) -> None:
    """They run, and the block is whole again without them: answers are those of engines that began so."""
    network = wide("qwen3-0.6b")

    def fresh() -> ServingEngine:
        return ServingEngine(network, EngineOptions(block=4, most_tokens=24, most_sequences=8))

    engine = fresh()
    plain = answered(engine)
    assert plain == answered(fresh())
    hook = network.blocks[0].get_submodule(part).register_forward_hook(lambda _, __, output: output * 1.5)
    try:
        hooked = answered(engine)
        assert hooked == answered(fresh()) != plain
    finally:
        hook.remove()
    blocks.clear()
    assert answered(engine) == plain and blocks


def answered(engine: ServingEngine) -> list[object]:
    options = RequestOptions(max_new_tokens=8, logprobs=3, salt=None)
    asked = [engine.add(prompt, options) for prompt in PROMPTS]
    engine.run(asked)
    return bits(asked)


def test_steps_of_two_engines_on_one_model_may_overlap() -> None:
    """The one that began first is the one that ends first, and nothing of either stays on the model."""
    network = wide("llama-3.1-8b")
    layers, other = (PreparedLayers(network, packed=True, head="model", loops=compiled_loops()) for _ in range(2))
    first, second = layers.use(), other.use()
    threads = copy_context(), copy_context()
    threads[0].run(first.__enter__)
    threads[1].run(second.__enter__)
    threads[0].run(first.__exit__, None, None, None)
    threads[1].run(second.__exit__, None, None, None)
    assert network.seams.call is compute and network.seams.dense.prepared is None


def test_a_changed_block_computes_itself(blocks: list[int]) -> None:
    class Louder(Block):
        def compute(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            x, balance = super().compute(*arguments, **named)
            return x * 1.5, balance

    network = copy.deepcopy(wide("llama-3.1-8b"))
    plain = bits(served(network, PROMPTS, exact=False)[0])
    for block in network.blocks:
        block.__class__ = Louder
    blocks.clear()
    assert bits(served(network, PROMPTS, exact=False)[0]) != plain and not blocks


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("scheme", ["", "int4-rtn", "int8"])
def test_defaults_of_torch_change_nothing(name: str, scheme: str) -> None:
    """Loops write fp32 into what they are given: with narrower numbers they would write behind it."""
    network = quantized(wide(name), scheme) if scheme else wide(name)
    tokens = torch.tensor([PROMPTS[0][:3]])

    def answers() -> tuple[list[object], torch.Tensor]:
        with torch.no_grad():
            return bits(served(network, PROMPTS, exact=False)[0]), network(tokens)

    right, logits = answers()
    torch.set_default_dtype(torch.float64)
    try:
        answered, again = answers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert answered == right and torch.equal(again, logits)
