"""Adapters of requests over ranks: answers are those of one process, whose models have the adapters merged in."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.observe.ranks import on_ranks
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.rows.request_adapters import RequestAdapters, ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import RankCommand
from meshwright.serving.engine.runner import follow
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import Layout
from meshwright.spec.errors import DoesNotFit
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from tests.model.shrunk import KINDS
from tests.serving.engine.test_serving_ranks import EXPERT, FEW_KEYS, LOAD, TENSOR, options, part, whole

MLA, MIXTURE = "deepseek-v3", "mixtral-8x7b"
CALLED = ["first", None, "second", "first", "third", None, "second"]
Case = tuple[str, Layout, str]


@cache
def adapters(name: str, seed: int = 0) -> Mapping[str, ServedAdapter]:
    """Three of random ranks and targets, some of which are experts."""
    chance, by_name = random.Random(f"{name} {seed}"), {}
    shape = whole(name).shape
    able = [part for part in shape.matrices if part != "kv_up"]
    for number, called in enumerate(("first", "second", "third")):
        targets = able if not number else chance.sample(able, chance.randint(1, len(able) - 1))
        lora = LoRAShape(rank=chance.choice([1, 3, 8, 17]), alpha=8.0, targets=",".join(targets), rslora=number == 1)
        draw = torch.Generator().manual_seed(10 * seed + number)
        low = [part for part in parameters(replace(shape, lora=lora)) if part.adapts]
        by_name[called] = ServedAdapter(
            lora, {part.name: torch.randn(part.shape, generator=draw) * 0.2 for part in low}
        )
    return by_name


def ask(engine: ServingEngine, called: Sequence[str | None] = CALLED) -> list[Any]:
    return [
        engine.add(prompt, RequestOptions(max_new_tokens=count, logprobs=2, adapter=adapter))
        for (prompt, count), adapter in zip(LOAD, called, strict=True)
    ]


def mixed(engine: ServingEngine) -> dict[str, Any]:
    """A batch of all; and again in another order."""
    asked = ask(engine)
    engine.run(asked)
    again = ask(engine)[::-1]
    engine.run(again)
    return {
        "ids": [request.answers[0].ids for request in asked],
        "bits": [request.answers[0].logprobs for request in asked],
        "again": [request.answers[0].ids for request in again[::-1]],
        "again bits": [request.answers[0].logprobs for request in again[::-1]],
        "bytes": engine.adapters.bytes,
    }


def changing(engine: ServingEngine, name: str) -> dict[str, Any]:
    """Adapters go while requests have them, and others come under their names."""
    before = ask(engine)
    engine.step()
    for called, adapter in adapters(name, seed=1).items():
        engine.adapters.unload(called)
        engine.adapters.load(called, adapter)
    held = engine.adapters.count
    after = ask(engine)
    engine.run([*before, *after])
    left = engine.adapters.bytes
    for called in engine.adapters.names:
        engine.adapters.unload(called)
    plain = ask(engine, [None] * len(LOAD))
    engine.run(plain)
    return {
        "ids": [request.answers[0].ids for request in (*before, *after, *plain)],
        "cached": [request.cached for request in after],
        "held": (held, engine.adapters.count),
        "bytes": (left, engine.adapters.bytes),
    }


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"packed": False, "compiled": False},
    "exact": {"exact": True, "most_tokens": 32},
    "exact torch": {"exact": True, "most_tokens": 20, "compiled": False},
}


def engine_of(name: str, way: str, model: Any, ranks: Any = None) -> ServingEngine:
    return ServingEngine(model, options(**WAYS[way]), adapters=adapters(name), ranks=ranks)


def serve_parts(cases: Sequence[Case]) -> list[Any]:
    outcomes: list[Any] = []
    process_groups: dict[Any, Any] = {}
    for name, layout, way in cases:
        local_part, ranks = part(name, layout, process_groups)
        if ranks.leads:
            outcomes.append(mixed(engine_of(name, way, local_part, ranks)))
            ranks.send(RankCommand.END)
        else:
            follow(local_part, ranks)
    return outcomes


def check(cases: Sequence[Case]) -> None:
    layout = cases[0][1]
    for (name, _, way), outcome in zip(cases, on_ranks(layout.tp, serve_parts, cases)[0], strict=True):
        alone = mixed(engine_of(name, way, whole(name)))
        assert outcome["ids"] == alone["ids"] == outcome["again"], (name, way)
        plain = ask(base := ServingEngine(whole(name), options(**WAYS[way])), [None] * len(LOAD))
        base.run(plain)
        same = [request.answers[0].ids == ids for request, ids in zip(plain, outcome["ids"], strict=True)]
        assert sum(same) <= 4 and all(same[index] for index, request in enumerate(CALLED) if request is None)
        for mine, right in zip(outcome["bits"], alone["bits"], strict=True):
            assert mine == pytest.approx(right, abs=2e-3), (name, way)
        if "exact" in way:
            assert outcome["bits"] == outcome["again bits"]
        assert outcome["bytes"] < 0.9 * alone["bytes"]


@pytest.mark.long
def test_two_ranks_answer_as_one_process() -> None:
    check([
        *((name, TENSOR, "plain") for name in (KINDS[2], FEW_KEYS, MLA, MIXTURE)),
        *((name, EXPERT, "plain") for name in (MIXTURE, MLA)),
        ("gpt2-124m", TENSOR, "torch"),
        *((name, TENSOR, "exact") for name in (KINDS[4], MIXTURE)),
        (KINDS[2], TENSOR, "exact torch"),
    ])  # fmt: skip


def followed() -> Any:
    """What the first rank answers while adapters change; of another one its adapters' bytes when it drops each."""
    local_part, ranks = part(KINDS[2], TENSOR, {})
    if ranks.leads:
        outcome = changing(engine_of(KINDS[2], "plain", local_part, ranks), KINDS[2])
        ranks.send(RankCommand.END)
        return outcome
    dropped, drop = list[tuple[int, int]](), RequestAdapters.drop

    def told(self: RequestAdapters, number: int) -> None:
        drop(self, number)
        dropped.append((number, self.bytes))

    RequestAdapters.drop = told  # type: ignore[method-assign]  # in this process, which ends with the test
    follow(local_part, ranks)
    return dropped


@pytest.mark.long
def test_adapters_come_and_go_on_all_ranks() -> None:
    outcome, dropped = on_ranks(2, followed)
    alone = changing(engine_of(KINDS[2], "plain", whole(KINDS[2])), KINDS[2])
    assert outcome["ids"] == alone["ids"] and outcome["ids"][: len(LOAD)] != outcome["ids"][len(LOAD) : 2 * len(LOAD)]
    assert outcome["cached"] == alone["cached"]
    assert (
        outcome["held"] == alone["held"] == (6, 0)
        and outcome["bytes"][1] == alone["bytes"][1] == 0 < outcome["bytes"][0]
    )
    assert sorted(number for number, _ in dropped) == [1, 2, 3, 4, 5, 6] and dropped[-1][1] == 0 < dropped[0][1]


def full() -> Any:
    """The first rank's answers where the other one has no memory for the third adapter that comes, and then has."""
    local_part, ranks = part(KINDS[2], TENSOR, {})
    if ranks.leads:
        engine = ServingEngine(local_part, options(), ranks=ranks)
        *first, (last, adapter) = adapters(KINDS[2]).items()
        for name, loaded in first:
            engine.adapters.load(name, loaded)
        with pytest.raises(DoesNotFit, match=f"adapter='{last}' does not fit in memory next to the model"):
            engine.adapters.load(last, adapter)
        held = engine.adapters.bytes
        engine.adapters.load(last, adapter)
        engine.run(asked := ask(engine))
        ranks.send(RankCommand.END)
        return [request.answers[0].ids for request in asked], held < engine.adapters.bytes
    put, bytes_then = RequestAdapters.put, list[int]()

    def refusing(self: RequestAdapters, number: int, tensors: Mapping[str, Any]) -> None:
        put(self, number, tensors)
        if number == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        bytes_then.append(self.bytes)

    RequestAdapters.put = refusing  # type: ignore[method-assign]  # in this process, which ends with the test
    follow(local_part, ranks)
    return bytes_then


@pytest.mark.long
def test_a_rank_without_memory_for_an_adapter_refuses_it_for_all() -> None:
    (ids, grew), others = on_ranks(2, full)
    alone = mixed(engine_of(KINDS[2], "plain", whole(KINDS[2])))
    assert ids == alone["ids"] and grew
    assert len(others) == 3 and others[0] < others[1] < others[2] < 2 * alone["bytes"]
