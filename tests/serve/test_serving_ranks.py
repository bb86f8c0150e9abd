"""Ranks that serve one model: their answers beside those of one process and of transformers, and what they are told."""

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.serve_speed import differences, theirs
from meshwright.model import Transformer, build
from meshwright.model.hub import export_folder
from meshwright.observe.ranks import on_ranks
from meshwright.observe.tiny_models import shrink
from meshwright.parallel import build_engine, make_mesh
from meshwright.serve.cached_sequence import CachedSequence, Phase
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.host_tier import MOVES, Move
from meshwright.serve.paged_cache import bytes_per_block
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.runner_setup import follow
from meshwright.serve.scheduler import StepPlan
from meshwright.serve.serving_engine import ServingEngine
from meshwright.serve.serving_ranks import RankCommand, ServingRanks
from meshwright.serve.speculation import Speculation
from meshwright.serve.step_words import StepReader, StepWriter
from meshwright.spec import Layout
from meshwright.spec.errors import ArgumentError
from tests.model.shrunk import KINDS, VOCAB, model

CHANCE = random.Random(0)
SHARED = [CHANCE.randrange(VOCAB) for _ in range(20)]
LOAD = [([CHANCE.randrange(VOCAB) for _ in range(CHANCE.randint(1, 30))], CHANCE.randint(4, 9)) for _ in range(4)]
LOAD += [([*SHARED, number, 5], 6) for number in range(3)]
CANCELLED = 1
TENSOR = Layout(tp=2, compile="off")
EXPERT = Layout(tp=2, ep=2, sp=True, compile="off")
FEW_KEYS = "one key head"


@cache
def whole(name: str) -> Transformer:
    if name != FEW_KEYS:
        return model(name).eval()
    found = build(replace(shrink("llama-3.1-8b"), kv_heads=1), seed=1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return found.eval()


def part(name: str, layout: Layout, made: dict[Any, Any]) -> tuple[Transformer, ServingRanks]:
    """This rank's boxes of the whole model."""
    mesh = make_mesh(layout, made=made)
    engine = build_engine(whole(name).shape, layout, mesh=mesh, trains=False, initialize=False)
    with torch.no_grad():
        places = engine.model.state_dict()
        for key, tensor in whole(name).state_dict().items():
            places[key].copy_(tensor[engine.boxes[key].slices] if key in engine.boxes else tensor)
    return engine.model, ServingRanks(mesh, engine.model)


def options(**changed: Any) -> EngineOptions:
    return EngineOptions(**{"block": 4, "most_tokens": 24, "most_sequences": 8, **changed})


def tight(found: Transformer, **changed: Any) -> EngineOptions:
    """Blocks for some of the requests: others make way."""
    return options(cache_bytes=16 * bytes_per_block(found, 4), **changed)


WAYS: dict[str, Callable[[Transformer], EngineOptions]] = {
    "plain": lambda found: options(),
    "torch": lambda found: options(packed=False, compiled=False),
    "tight": tight,
    "host": lambda found: tight(found, host_cache_bytes=40 * bytes_per_block(found, 4)),
    "exact": lambda found: options(exact=True, most_tokens=32),
    "exact and tight": lambda found: tight(found, exact=True, most_tokens=9),
    "guesses": lambda found: options(speculation=Speculation(tokens=4)),
    "draft": lambda found: options(speculation=Speculation(tokens=2, draft=whole("gpt2-124m"))),
    "int8": lambda found: options(cache_dtype="int8", head="int8"),
}
Case = tuple[str, Layout, str]


def answers(engine: ServingEngine) -> dict[str, Any]:
    asked = [engine.add(prompt, RequestOptions(max_new_tokens=count, logprobs=2)) for prompt, count in LOAD]
    engine.step()
    engine.cancel(asked[CANCELLED])
    engine.run(asked)
    again = engine.add([*SHARED, 7, 5], RequestOptions(max_new_tokens=2))
    engine.run([again])
    assert engine.idle and engine.tables.pool.free == engine.tables.pool.size
    return {
        "ids": [one.answers[0].ids for one in asked],
        "logprobs": [one.answers[0].logprobs for one in asked],
        "cached": again.cached,
        "from_host": engine.tables.host_hits,
        "preempted": engine.scheduler.preemptions,
        "cache_bytes": engine.cache.bytes,
        "guessed": engine.guesses.guessed if engine.guesses else 0,
    }


def serve_parts(cases: list[Case]) -> list[Any]:
    """Of each case: on the first rank what it answered, on others the parameters that they have."""
    found: list[Any] = []
    made: dict[Any, Any] = {}
    for name, layout, way in cases:
        own, ranks = part(name, layout, made)
        if ranks.leads:
            found.append(answers(ServingEngine(own, WAYS[way](own), ranks=ranks)))
            ranks.send(RankCommand.END)
        else:
            follow(own, ranks)
            found.append(sum(one.numel() for one in own.parameters()))
    return found


@cache
def right(name: str) -> tuple[Any, list[list[int]]]:
    """transformers with the same weights, and its answers."""
    import transformers

    found = whole(name)
    with tempfile.TemporaryDirectory() as place:
        tensors = [(key, tensor.detach()) for key, tensor in found.state_dict().items()]
        export_folder(Path(place), model_tensors=tensors, shape=found.shape, tokenizer=None, dtype=torch.float32)
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(place)
    return peer.eval(), theirs(peer, LOAD, 1)


def wrong_ones(name: str, found: dict[str, Any]) -> tuple[int, int]:
    """Answers that are not transformers', without the one that was cancelled."""
    peer, tokens = right(name)
    kept = [place for place in range(len(LOAD)) if place != CANCELLED]
    each = ([every[place] for place in kept] for every in (LOAD, tokens, found["ids"]))
    return differences(peer, *each)  # type: ignore[arg-type]  # a load, and answers twice


def check(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Answers are those of transformers and of one process, which has all of the weights and of the cache."""
    ranks = cases[0][1].tp
    first, *_, other = on_ranks(ranks, serve_parts, cases)
    for (name, layout, way), found, held in zip(cases, first, other, strict=True):
        shape = whole(name).shape
        assert way == "int8" or wrong_ones(name, found) == (0, 0), (name, way)
        alone = answers(ServingEngine(whole(name), WAYS[way](whole(name))))
        assert found["ids"] == alone["ids"], (name, way)
        assert found["cached"] == alone["cached"] and (shape.window or found["cached"])
        for counted in ("preempted", "guessed", "from_host"):
            assert found[counted] == alone[counted], counted
        parts = 1 if shape.mla else min(ranks, shape.kv_heads)
        assert found["cache_bytes"] * parts == alone["cache_bytes"]
        assert held < (0.8 if shape.moe and layout.ep == 1 else 0.7) * sum(p.numel() for p in whole(name).parameters())
    return {way: found for (_, _, way), found in zip(cases, first, strict=True)}


@pytest.mark.long
def test_two_ranks_answer_as_transformers_and_as_one_process() -> None:
    llama = KINDS[2]
    found = check([
        *((name, TENSOR, "plain") for name in (llama, FEW_KEYS, "deepseek-v3", "mixtral-8x7b")),
        ("mixtral-8x7b", EXPERT, "plain"),
        ("gpt2-124m", TENSOR, "torch"),
        ("mistral-7b-v0.1", TENSOR, "tight"),
        *((llama, TENSOR, way) for way in ("host", "exact", "exact and tight", "guesses", "draft", "int8")),
    ])  # fmt: skip
    assert found["guesses"]["guessed"] and found["draft"]["guessed"] and found["host"]["from_host"]
    check_bits(found)


def check_bits(found: dict[str, dict[str, Any]]) -> None:
    """Of exact mode: they do not depend on chunks, hits, or preemption."""
    assert found["exact and tight"]["preempted"]
    once, again = ([one for place, one in enumerate(found[way]["logprobs"]) if place != CANCELLED]
                   for way in ("exact", "exact and tight"))  # fmt: skip
    assert once == again


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "torch", "tight"])
def test_every_family_on_two_ranks(way: str) -> None:
    check([(name, TENSOR, way) for name in KINDS] + [("deepseek-v3", EXPERT, way), ("qwen3-30b-a3b", EXPERT, way)])


@pytest.mark.slow
def test_four_ranks_two_of_which_keep_the_same_key_head() -> None:
    llama, four = KINDS[2], Layout(tp=4, compile="off")
    check_bits(check([(llama, four, way) for way in ("plain", "exact", "exact and tight")]))
    spread = Layout(tp=4, ep=2, sp=True, compile="off")
    check([(name, spread, "plain") for name in ("mixtral-8x7b", "deepseek-v3")])


def broken_and_refused() -> list[str]:
    made: dict[Any, Any] = {}
    own, ranks = part(KINDS[2], TENSOR, made)
    if not ranks.leads:
        follow(own, ranks)
        return []
    engine = ServingEngine(own, options(), ranks=ranks)
    sound = engine.add([1, 2, 3], RequestOptions(max_new_tokens=4))
    engine.run([sound])
    kept = own.blocks[0].attention_norm.weight
    with torch.no_grad():
        before = kept.clone()
        kept.fill_(float("nan"))
        spoiled = engine.add([1, 2, 3, 4, 5, 6], RequestOptions(max_new_tokens=4))
        while not spoiled.ended:
            engine.step()
        kept.copy_(before)
    after = engine.add([1, 2, 3], RequestOptions(max_new_tokens=4))
    engine.run([after])
    ranks.send(RankCommand.END)
    return [spoiled.answers[0].ending, str(after.answers[0].ids == sound.answers[0].ids)]


@pytest.mark.long
def test_numbers_that_are_none_are_cleared_on_all_ranks() -> None:
    """One rank's weights break: the blocks of the others are as spoiled as its own."""
    assert on_ranks(2, broken_and_refused)[0] == ["broken", "True"]


class Sharing:
    row_multiple = 2


def test_exact_mode_is_refused_where_experts_are_spread() -> None:
    with pytest.raises(ArgumentError, match="take ep=1"):
        ServingEngine(whole(KINDS[6]), EngineOptions(exact=True), ranks=Sharing())  # type: ignore[arg-type]  # it is not used


def test_who_reads_a_step_has_what_was_written() -> None:
    """Random steps: tables that grow, are copied and drop blocks; sequences that end, make way and come back."""
    chance, writer, reader = random.Random(1), StepWriter(), StepReader()
    sequences: list[CachedSequence] = []
    stands_for: dict[CachedSequence, CachedSequence] = {}
    for _ in range(300):
        if len(sequences) < 6:
            tokens = [chance.randrange(99) for _ in range(chance.randint(1, 40))]
            sequences.append(CachedSequence(chance.randrange(3), tokens, 99, b"", phase=Phase.RUNNING))
        for one in list(sequences):
            draw = chance.random()
            one.phase = Phase.ENDED if draw < 0.1 else Phase.WAITING if draw < 0.2 else Phase.RUNNING
            if one.phase is Phase.WAITING:
                one.table, one.preemptions, one.computed = [], one.preemptions + 1, 0
            elif one.phase is Phase.ENDED:
                sequences.remove(one)
            else:
                one.table += [chance.randrange(50) for _ in range(chance.randint(0, 3))]
                one.tokens += [chance.randrange(99)]
                one.computed = chance.randrange(len(one.tokens))
                one.guessed = chance.randrange(2)
                if one.table and draw > 0.8:
                    one.table[chance.randrange(len(one.table))] = -1
        running = [one for one in sequences if one.phase is Phase.RUNNING and chance.random() < 0.8]
        plan = StepPlan({one: chance.randint(1, len(one.tokens) - one.computed) for one in running})
        drawn = (chance.choice(MOVES) for _ in range(chance.randint(0, 3)))
        plan.moves = [Move(kind, chance.randrange(9), chance.randrange(9)) for kind in drawn]
        found = reader.step(writer.words(plan))
        assert found.moves == plan.moves and list(found.chunks.values()) == list(plan.chunks.values())
        for mine, theirs_ in zip(plan.chunks, found.chunks, strict=True):
            end = mine.computed + plan.chunks[mine]
            assert theirs_.tokens[mine.computed : end] == mine.tokens[mine.computed : end]
            for name in ("table", "computed", "guessed", "preemptions"):
                assert getattr(theirs_, name) == getattr(mine, name)
            assert len(theirs_.tokens) == len(mine.tokens)
            if mine in stands_for:
                assert stands_for[mine] is theirs_ or mine.preemptions
            stands_for[mine] = theirs_
    assert len(set(map(id, stands_for.values()))) == len(stands_for), "no two are mistaken for each other"
