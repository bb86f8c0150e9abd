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
from meshwright.formats.hub import export_folder
from meshwright.model import Transformer, build
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import MOVES, CachedSequence, Move, Phase
from meshwright.serving.engine.cache.paged_cache import bytes_per_block
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.runner import StepReader, StepWriter, follow
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
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
    network = build(replace(shrink("llama-3.1-8b"), kv_heads=1), seed=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return network.eval()


def part(name: str, layout: Layout, process_groups: dict[Any, Any]) -> tuple[Transformer, ServingRanks]:
    """This rank's boxes of the whole model."""
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(whole(name).shape, layout, mesh=mesh, trains=False, initialize=False)
    with torch.no_grad():
        places = engine.model.state_dict()
        for key, tensor in whole(name).state_dict().items():
            places[key].copy_(tensor[engine.boxes[key].slices] if key in engine.boxes else tensor)
    return engine.model, ServingRanks(mesh, engine.model)


def options(**changed: Any) -> EngineOptions:
    return EngineOptions(**{"block": 4, "most_tokens": 24, "most_sequences": 8, **changed})


def tight(network: Transformer, **changed: Any) -> EngineOptions:
    """Blocks for some of the requests: others make way."""
    return options(cache_bytes=16 * bytes_per_block(network, 4), **changed)


WAYS: dict[str, Callable[[Transformer], EngineOptions]] = {
    "plain": lambda network: options(),
    "torch": lambda network: options(packed=False, compiled=False),
    "tight": tight,
    "host": lambda network: tight(network, host_cache_bytes=40 * bytes_per_block(network, 4)),
    "exact": lambda network: options(exact=True, most_tokens=32),
    "exact and tight": lambda network: tight(network, exact=True, most_tokens=9),
    "guesses": lambda network: options(speculation=Speculation(tokens=4)),
    "draft": lambda network: options(speculation=Speculation(tokens=2, draft=whole("gpt2-124m"))),
    "int8": lambda network: options(cache_dtype="int8", head="int8"),
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
        "ids": [request.answers[0].ids for request in asked],
        "logprobs": [request.answers[0].logprobs for request in asked],
        "cached": again.cached,
        "from_host": engine.tables.host_hits,
        "preempted": engine.scheduler.preemptions,
        "cache_bytes": engine.cache.bytes,
        "guessed": engine.guesses.guessed if engine.guesses else 0,
    }


def serve_parts(cases: list[Case]) -> list[Any]:
    """Of each case: on the first rank what it answered, on others the parameters that they have."""
    outcomes: list[Any] = []
    process_groups: dict[Any, Any] = {}
    for name, layout, way in cases:
        local_part, ranks = part(name, layout, process_groups)
        if ranks.leads:
            outcomes.append(answers(ServingEngine(local_part, WAYS[way](local_part), ranks=ranks)))
            ranks.send(RankCommand.END)
        else:
            follow(local_part, ranks)
            outcomes.append(sum(parameter.numel() for parameter in local_part.parameters()))
    return outcomes


@cache
def right(name: str) -> tuple[Any, list[list[int]]]:
    """transformers with the same weights, and its answers."""
    import transformers

    network = whole(name)
    with tempfile.TemporaryDirectory() as folder:
        tensors = [(key, tensor.detach()) for key, tensor in network.state_dict().items()]
        export_folder(Path(folder), model_tensors=tensors, shape=network.shape, tokenizer=None, dtype=torch.float32)
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return peer.eval(), theirs(peer, LOAD, 1)


def wrong_ones(name: str, outcome: dict[str, Any]) -> tuple[int, int]:
    """Answers that are not transformers', without the one that was cancelled."""
    peer, tokens = right(name)
    numbers = [number for number in range(len(LOAD)) if number != CANCELLED]
    each = ([every[number] for number in numbers] for every in (LOAD, tokens, outcome["ids"]))
    return differences(peer, *each)  # type: ignore[arg-type]  # a load, and answers twice


def check(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Answers are those of transformers and of one process, which has all of the weights and of the cache."""
    ranks = cases[0][1].tp
    first, *_, other = on_ranks(ranks, serve_parts, cases)
    for (name, layout, way), outcome, held in zip(cases, first, other, strict=True):
        shape = whole(name).shape
        assert way == "int8" or wrong_ones(name, outcome) == (0, 0), (name, way)
        alone = answers(ServingEngine(whole(name), WAYS[way](whole(name))))
        assert outcome["ids"] == alone["ids"], (name, way)
        assert outcome["cached"] == alone["cached"] and (shape.window or outcome["cached"])
        for counted in ("preempted", "guessed", "from_host"):
            assert outcome[counted] == alone[counted], counted
        parts = 1 if shape.mla else min(ranks, shape.kv_heads)
        assert outcome["cache_bytes"] * parts == alone["cache_bytes"]
        assert held < (0.8 if shape.moe and layout.ep == 1 else 0.7) * sum(p.numel() for p in whole(name).parameters())
    return {way: outcome for (_, _, way), outcome in zip(cases, first, strict=True)}


@pytest.mark.long
def test_two_ranks_answer_as_transformers_and_as_one_process() -> None:
    llama = KINDS[2]
    outcomes = check([
        *((name, TENSOR, "plain") for name in (llama, FEW_KEYS, "deepseek-v3", "mixtral-8x7b")),
        ("mixtral-8x7b", EXPERT, "plain"),
        ("gpt2-124m", TENSOR, "torch"),
        ("mistral-7b-v0.1", TENSOR, "tight"),
        *((llama, TENSOR, way) for way in ("host", "exact", "exact and tight", "guesses", "draft", "int8")),
    ])  # fmt: skip
    assert outcomes["guesses"]["guessed"] and outcomes["draft"]["guessed"] and outcomes["host"]["from_host"]
    check_bits(outcomes)


def check_bits(outcomes: dict[str, dict[str, Any]]) -> None:
    """Of exact mode: they do not depend on chunks, hits, or preemption."""
    assert outcomes["exact and tight"]["preempted"]
    once, again = ([logprobs for number, logprobs in enumerate(outcomes[way]["logprobs"]) if number != CANCELLED]
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
    process_groups: dict[Any, Any] = {}
    local_part, ranks = part(KINDS[2], TENSOR, process_groups)
    if not ranks.leads:
        follow(local_part, ranks)
        return []
    engine = ServingEngine(local_part, options(), ranks=ranks)
    sound = engine.add([1, 2, 3], RequestOptions(max_new_tokens=4))
    engine.run([sound])
    norm_weight = local_part.blocks[0].attention_norm.weight
    with torch.no_grad():
        before = norm_weight.clone()
        norm_weight.fill_(float("nan"))
        spoiled = engine.add([1, 2, 3, 4, 5, 6], RequestOptions(max_new_tokens=4))
        while not spoiled.ended:
            engine.step()
        norm_weight.copy_(before)
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
        for sequence in list(sequences):
            draw = chance.random()
            sequence.phase = Phase.ENDED if draw < 0.1 else Phase.WAITING if draw < 0.2 else Phase.RUNNING
            if sequence.phase is Phase.WAITING:
                sequence.table, sequence.preemptions, sequence.computed = [], sequence.preemptions + 1, 0
            elif sequence.phase is Phase.ENDED:
                sequences.remove(sequence)
            else:
                sequence.table += [chance.randrange(50) for _ in range(chance.randint(0, 3))]
                sequence.tokens += [chance.randrange(99)]
                sequence.computed = chance.randrange(len(sequence.tokens))
                sequence.guessed = chance.randrange(2)
                if sequence.table and draw > 0.8:
                    sequence.table[chance.randrange(len(sequence.table))] = -1
        running = [sequence for sequence in sequences if sequence.phase is Phase.RUNNING and chance.random() < 0.8]
        plan = StepPlan({sequence: chance.randint(1, len(sequence.tokens) - sequence.computed) for sequence in running})
        drawn = (chance.choice(MOVES) for _ in range(chance.randint(0, 3)))
        plan.moves = [Move(kind, chance.randrange(9), chance.randrange(9)) for kind in drawn]
        step = reader.step(writer.words(plan))
        assert step.moves == plan.moves and list(step.chunks.values()) == list(plan.chunks.values())
        for mine, theirs_ in zip(plan.chunks, step.chunks, strict=True):
            end = mine.computed + plan.chunks[mine]
            assert theirs_.tokens[mine.computed : end] == mine.tokens[mine.computed : end]
            for name in ("table", "computed", "guessed", "preemptions"):
                assert getattr(theirs_, name) == getattr(mine, name)
            assert len(theirs_.tokens) == len(mine.tokens)
            if mine in stands_for:
                assert stands_for[mine] is theirs_ or mine.preemptions
            stands_for[mine] = theirs_
    assert len(set(map(id, stands_for.values()))) == len(stands_for), "no two are mistaken for each other"
