"""Adapters that come and go while an engine runs: who keeps them, what the cache finds, and when memory is free."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.errors import ArgumentError
from tests.model.shrunk import KINDS
from tests.serving.engine.test_exact import PROMPTS, bits, shrunk
from tests.serving.engine.test_request_adapters import adapters

LLAMA, EXPERTS = KINDS[2], KINDS[6]
LONG = PROMPTS[1] + PROMPTS[2]


def engine_of(name: str, loaded: Mapping[str, ServedAdapter] | None = None, **more: Any) -> ServingEngine:
    sizes = {"block": 4, "most_tokens": 24, "most_sequences": 8, "exact": True, **more}
    return ServingEngine(shrunk(name), EngineOptions(**sizes), adapters=loaded)


def asked(called: str | None, **more: Any) -> RequestOptions:
    return RequestOptions(**{"adapter": called, "max_new_tokens": 8, "logprobs": 3, **more})


def right(name: str, adapter: ServedAdapter | None, prompt: list[int], **more: Any) -> list[object]:
    """What an engine of its own answers."""
    engine = engine_of(name, {} if adapter is None else {"own": adapter})
    request = engine.add(prompt, asked(None if adapter is None else "own", **more))
    engine.run([request])
    return bits([request])


@pytest.mark.parametrize("name", [LLAMA, EXPERTS])
def test_an_adapter_that_is_loaded_later_answers_as_one_from_the_start(name: str) -> None:
    engine, by_name = engine_of(name), adapters(name)
    first = engine.add(LONG, asked(None))
    engine.step()
    engine.adapters.load("large", by_name["large"])
    second = engine.add(LONG, asked("large"))
    engine.run([first, second])
    assert engine.adapters.names == ("large",) and engine.adapters.bytes > 0
    assert bits([first]) == right(name, None, LONG) and bits([second]) == right(name, by_name["large"], LONG)
    engine.adapters.unload("large")
    assert engine.adapters.bytes == engine.adapters.count == 0
    assert not any(
        getattr(module, "lora", None) or getattr(module, "beside", None) for module in engine.model.modules()
    )


def test_another_adapter_of_the_same_name_finds_nothing_in_the_cache() -> None:
    """Nor does the same one, whose keys and values nobody compares."""
    by_name = adapters(LLAMA)
    engine = engine_of(LLAMA, {"mine": by_name["large"]})
    for called in ("large", "some", "large"):
        engine.adapters.unload("mine")
        engine.adapters.load("mine", by_name[called])
        cold = engine.add(LONG, asked("mine"))
        engine.run([cold])
        warm = engine.add(LONG, asked("mine"))
        engine.run([warm])
        assert not cold.cached and warm.cached >= 16
        assert bits([cold]) == bits([warm]) == right(LLAMA, by_name[called], LONG)


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 0.8}, {"beams": 3, "n": 2, "logprobs": 0}], ids=str)
def test_requests_keep_what_is_unloaded_under_them(more: dict[str, Any]) -> None:
    """One runs, one waits for its turn; a third one says the same name and gets the adapter that came since."""
    by_name = adapters(LLAMA)
    engine = engine_of(LLAMA, {"mine": by_name["large"]}, most_sequences=4)
    running = engine.add(LONG, asked("mine", **{**more, "max_new_tokens": 12}))
    engine.step()
    waiting = engine.add(PROMPTS[0], asked("mine", **more))
    held = engine.adapters.bytes
    engine.adapters.unload("mine")
    assert engine.adapters.names == () and engine.adapters.count == 1 and engine.adapters.bytes == held
    with pytest.raises(ArgumentError, match="adapter='mine' is not here"):
        engine.add(PROMPTS[0], asked("mine"))
    engine.adapters.load("mine", by_name["some"])
    other = engine.add(PROMPTS[0], asked("mine", **more))
    assert engine.adapters.count == 2
    engine.run([running, waiting, other])
    assert bits([running]) == right(LLAMA, by_name["large"], LONG, **{**more, "max_new_tokens": 12})
    assert bits([waiting]) == right(LLAMA, by_name["large"], PROMPTS[0], **more)
    assert bits([other]) == right(LLAMA, by_name["some"], PROMPTS[0], **more)
    assert engine.adapters.count == 1 and 0 < engine.adapters.bytes < held


def test_a_cancelled_request_lets_its_adapter_go() -> None:
    engine = engine_of(LLAMA, {"mine": adapters(LLAMA)["large"]})
    cancelled, other = (engine.add(prompt, asked("mine")) for prompt in PROMPTS[:2])
    engine.step()
    engine.adapters.unload("mine")
    for request, left in ((cancelled, 1), (other, 0)):
        engine.cancel(request)
        assert engine.adapters.count == left
    assert not engine.adapters.bytes


def test_names_that_cannot_be_had() -> None:
    by_name = adapters(LLAMA)
    engine = engine_of(LLAMA, {"mine": by_name["large"]})
    for name, complaint in (("mine", "is here already"), ("", "must have a name")):
        with pytest.raises(ArgumentError, match=complaint):
            engine.adapters.load(name, by_name["some"])
    with pytest.raises(ArgumentError, match="adapter='other' is not here: take one of mine"):
        engine.adapters.unload("other")
    assert engine.adapters.names == ("mine",)


@pytest.mark.parametrize("name", [EXPERTS, KINDS[0]])
def test_an_adapter_of_another_model_is_refused(name: str) -> None:
    engine = engine_of(LLAMA)
    with pytest.raises(ArgumentError, match=r"mine' cannot be served by request: layers\.\S+ \[.*\] is no part of"):
        engine.adapters.load("mine", adapters(name)["large"])
    wide = {key: torch.cat((tensor, tensor), -1) for key, tensor in adapters(LLAMA)["large"].tensors.items()}
    with pytest.raises(ArgumentError, match=r"lora\.a \[18, \d+\] is no part of"):
        engine.adapters.load("mine", ServedAdapter(adapters(LLAMA)["large"].lora, wide))
    assert not engine.adapters.count and not engine.adapters.names


@pytest.mark.parametrize("seed", range(3))
def test_at_random(seed: int) -> None:
    """Adapters and requests come and go; every answer is that of the adapter its name meant when it came."""
    chance, name = random.Random(seed), LLAMA if seed else EXPERTS
    by_name, engine = adapters(name), engine_of(name, cache_bytes=2**16, longest=64)
    now, owed = dict[str, str](), list[tuple[Any, str | None, list[int]]]()
    for _ in range(60):
        what, called = chance.random(), chance.choice("ab")
        if what < 0.25:
            if called in now:
                engine.adapters.unload(called)
                del now[called]
            else:
                now[called] = chance.choice(list(by_name))
                engine.adapters.load(called, by_name[now[called]])
        elif what < 0.5:
            wanted = chance.choice([None, *now])
            prompt = chance.choice(PROMPTS)
            owed.append((engine.add(prompt, asked(wanted)), now[wanted] if wanted else None, prompt))
        elif not engine.idle:
            engine.step()
        assert engine.adapters.count >= len(now)
    engine.run([request for request, *_ in owed])
    known = {(called, tuple(prompt)) for _, called, prompt in owed}
    answers = {key: right(name, None if key[0] is None else by_name[key[0]], list(key[1])) for key in known}
    assert all(bits([request]) == answers[called, tuple(prompt)] for request, called, prompt in owed)
    assert engine.adapters.count == len(now)
