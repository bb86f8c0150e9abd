"""Exact mode: bits of an answer do not depend on what is computed beside it, in which chunks, or what the cache had."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.model import Transformer, build
from meshwright.model.generate import generate
from meshwright.observe.oracle.features import shrink
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.exact_rows import ExactRows
from meshwright.serving.engine.rows.packed_step import LOOPED_CHUNK
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from tests.model.shrunk import KINDS, VOCAB, model

CHANCE = random.Random(0)
PROMPTS = [[CHANCE.randrange(VOCAB) for _ in range(CHANCE.randint(1, 30))] for _ in range(6)]
PROMPTS += [PROMPTS[0] + [1, 2, 3], PROMPTS[5] + [5]]
LONG = [CHANCE.randrange(VOCAB) for _ in range(LOOPED_CHUNK)]
"""Tokens: in the fast way one call attends for all of them."""
NEW = 8


@cache
def shrunk(name: str) -> Transformer:
    return model(name).eval()


def served(
    network: Transformer, prompts: Sequence[Sequence[int]], *, exact: bool, **options: Any
) -> tuple[list[ServedRequest], ServingEngine]:
    sizes = {"block": 4, "most_tokens": 24, "most_sequences": 8, **options}
    engine = ServingEngine(network, EngineOptions(exact=exact, **sizes))
    asked = [engine.add(prompt, RequestOptions(max_new_tokens=NEW, logprobs=3)) for prompt in prompts]
    engine.run(asked)
    assert engine.idle and engine.tables.pool.free == engine.tables.pool.size
    return asked, engine


def bits(asked: Sequence[ServedRequest]) -> list[object]:
    return [(answer.ids, answer.logprobs, answer.top) for request in asked for answer in request.answers]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_greedy_tokens_are_those_of_one_prompt_after_another(name: str, exact: bool) -> None:
    prompts = [LONG, *PROMPTS]
    asked, _ = served(shrunk(name), prompts, exact=exact, most_tokens=64)
    for prompt, request in zip(prompts, asked, strict=True):
        right = generate(shrunk(name), prompt, max_new_tokens=NEW)
        assert request.answers[0].ids == right.ids
        assert request.answers[0].logprobs == pytest.approx(right.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.long
def test_bits_do_not_depend_on_batch_chunks_hits_or_preemption(name: str) -> None:
    network = shrunk(name)
    together, _ = served(network, PROMPTS, exact=True)
    right = bits(together)
    backwards, _ = served(network, PROMPTS[::-1], exact=True)
    assert bits(backwards) == right[::-1]
    for chunk, prompt, expected in ((3, PROMPTS[0], right[0]), (7, PROMPTS[1], right[1]), (64, PROMPTS[2], right[2])):
        assert bits(served(network, [prompt], exact=True, most_tokens=chunk, most_sequences=1)[0]) == [expected]
    block = ServingEngine(network, EngineOptions(block=4)).cache.bytes
    tight, engine = served(network, PROMPTS, exact=True, cache_bytes=12 * block // _blocks(network), most_tokens=17)
    assert bits(tight) == right
    assert engine.scheduler.preemptions or engine.cache.widest, "a window leaves blocks enough"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_bits_with_one_key_head_and_without_compiled_loops(packed: bool) -> None:
    """A block of one narrow head begins in the middle of a line of memory, where MKL sums in another order."""
    network = build(replace(shrink("llama-3.1-8b"), kv_heads=1), seed=1).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    ways: dict[str, Any] = {"exact": True, "compiled": False, "packed": packed}
    right = bits(served(network, PROMPTS, **ways)[0])
    assert bits(served(network, PROMPTS[::-1], **ways)[0]) == right[::-1]
    for number, chunk in enumerate((3, 7, 64, 5)):
        alone, _ = served(network, [PROMPTS[number]], most_tokens=chunk, most_sequences=1, **ways)
        assert bits(alone) == [right[number]]


def _blocks(network: Transformer) -> int:
    return ServingEngine(network, EngineOptions(block=4)).cache.number + 2


def test_a_hit_gives_the_same_bits() -> None:
    network = shrunk("llama-3.1-8b")
    (cold,), engine = served(network, [PROMPTS[1] + PROMPTS[2]], exact=True)
    warm = engine.add(cold.prompt, cold.options)
    engine.run([warm])
    assert warm.cached >= 16 > cold.cached and bits([warm]) == bits([cold])
    apart = engine.add(cold.prompt, RequestOptions(max_new_tokens=NEW, logprobs=3, salt="another"))
    engine.run([apart])
    assert not apart.cached and bits([apart]) == bits([cold])


def test_fast_mode_is_another_thing() -> None:
    """Else the tests above would show nothing."""
    network, long = shrunk("llama-3.1-8b"), [(prompt * len(LONG))[: len(LONG)] for prompt in PROMPTS]
    alone = [served(network, [prompt], exact=False, most_tokens=64)[0][0] for prompt in long]
    assert bits(alone) != bits(served(network, long, exact=False)[0])


def test_bf16() -> None:
    network = model("qwen3-0.6b", dtype=torch.bfloat16).eval()
    together, _ = served(network, PROMPTS, exact=True)
    assert together[0].answers[0].ids and bits(together[:3]) == [
        bits(served(network, [prompt], exact=True, most_tokens=9)[0])[0] for prompt in PROMPTS[:3]
    ]


def test_rows_are_padded_to_numbers_that_agree() -> None:
    network = shrunk("llama-3.1-8b")
    with torch.no_grad():
        rows = ExactRows(network, 40, lambda x: network.kernels.linear(x, network.head_weight), low_rank=False)
    assert rows.tile == 16 and rows.most >= 16 and rows.round_up(3) == 16


def test_where_the_order_of_rows_matters_they_are_computed_one_by_one() -> None:
    """A norm that adds some noise, which depends on the place of a row."""
    network = model("llama-3.1-8b").eval()
    network.norm.register_forward_hook(lambda _, __, x: x + torch.arange(x.shape[1])[:, None] * 1e-3)
    asked, engine = served(network, PROMPTS[:2], exact=True)
    assert engine.rows_at_once == 1
    alone, _ = served(network, PROMPTS[1:2], exact=True)
    assert bits(alone)[0] == bits(asked)[1]
