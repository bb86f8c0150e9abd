"""Engines with prepared weights, with and without compiled loops, over plain and quantized models."""

from typing import Any

import pytest

from benchmarks.serve_quantized import quantized
from meshwright.model import Transformer, generate
from meshwright.serve.serving_engine import ServingEngine
from tests.model.shrunk import KINDS, model
from tests.serve.test_exact import NEW, PROMPTS, bits, served, shrunk

WAYS = {"plain": {"packed": False, "compiled": False}, "packed": {"compiled": False}, "loops": {"packed": False}}


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2], KINDS[3], KINDS[8]])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_every_way_gives_the_same_tokens(name: str, way: str, exact: bool) -> None:
    asked, _ = served(shrunk(name), PROMPTS[:4], exact=exact, **WAYS[way])
    for prompt, one in zip(PROMPTS, asked, strict=False):
        assert one.answers[0].ids == generate(shrunk(name), prompt, max_new_tokens=NEW).ids


@pytest.mark.parametrize("scheme", ["int8", "int4-sym"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_model(scheme: str, compiled: bool) -> None:
    found = quantized(model("llama-3.1-8b"), scheme)
    options: dict[str, Any] = {"compiled": compiled}
    together, _ = served(found, PROMPTS, exact=True, **options)
    for prompt, one in zip(PROMPTS, together, strict=True):
        assert one.answers[0].ids == generate(found, prompt, max_new_tokens=NEW).ids
    alone = [
        served(found, [prompt], exact=True, most_tokens=7, most_sequences=1, **options)[0][0] for prompt in PROMPTS[:3]
    ]
    assert bits(alone) == bits(together[:3])


def test_a_head_in_8_bits() -> None:
    found = shrunk("llama-3.1-8b")
    plain, _ = served(found, PROMPTS, exact=True)
    rounded, _ = served(found, PROMPTS, exact=True, head="int8")
    assert bits(plain) != bits(rounded)
    for one, other in zip(plain, rounded, strict=True):
        assert one.answers[0].logprobs[0] == pytest.approx(other.answers[0].logprobs[0], abs=0.2)
    alone = [served(found, [prompt], exact=True, head="int8")[0][0] for prompt in PROMPTS[:3]]
    assert bits(alone) == bits(rounded[:3])


def prepared(found: Transformer) -> Any:
    return found.seams.dense.prepared


def test_the_model_is_left_as_it_was() -> None:
    found = shrunk("llama-3.1-8b")
    engine = ServingEngine(found)
    asked = engine.add(PROMPTS[0])
    engine.step()
    assert prepared(found) is None
    engine.cancel(asked)
