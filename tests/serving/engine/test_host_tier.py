"""Cached prefixes in host memory: bits of answers are those without it, and what was given away is found again."""

import random
from typing import Any

import pytest
import torch

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import (
    GONE,
    HOSTED,
    BlockPool,
    BlockTables,
    CachedSequence,
    HostTier,
    Move,
)
from meshwright.serving.engine.cache.paged_cache import HostCopies, group_moves
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.spec.errors import ArgumentError
from tests.model.shrunk import KINDS, VOCAB, model
from tests.serving.engine.test_exact import bits, shrunk
from tests.serving.engine.test_request_adapters import adapters

CHANCE = random.Random(1)
ROOTS = [[CHANCE.randrange(VOCAB) for _ in range(24)] for _ in range(4)]
TURNS = [ROOTS[CHANCE.randrange(4)] + [CHANCE.randrange(VOCAB) for _ in range(CHANCE.randint(1, 9))] for _ in range(10)]


def engine(name: str, blocks: int, slots: int, **options: Any) -> ServingEngine:
    """With so many blocks, and slots of host memory."""
    sizes = {"block": 4, "most_tokens": 12, "most_sequences": 3, "longest": 48, "exact": True, **options}
    loaded = adapters(name) if name in (KINDS[2],) else {}
    whole = ServingEngine(shrunk(name), EngineOptions(**sizes), adapters=loaded)
    each = sum(cache.bytes // (cache.number + 2) for cache in _caches(whole))
    sizes |= {"cache_bytes": blocks * each, "host_cache_bytes": slots * each}
    return ServingEngine(shrunk(name), EngineOptions(**sizes), adapters=loaded)


def _caches(serving: ServingEngine) -> list[Any]:
    return [serving.cache, *([serving._loop.draft.runner.cache] if serving._loop.draft else [])]


def answered(serving: ServingEngine, *, mixed: bool = False) -> tuple[list[object], int]:
    """Bits of requests that come two at a time, and how many tokens they found."""
    made, cached = list[object](), 0
    for begin in range(0, len(TURNS), 2):
        asked = [
            serving.add(prompt, RequestOptions(
                max_new_tokens=6, logprobs=2, adapter="small" if mixed and number % 3 else None,
            ))
            for number, prompt in enumerate(TURNS[begin : begin + 2], begin)
        ]  # fmt: skip
        serving.run(asked)
        made += bits(asked)
        cached += sum(request.cached for request in asked)
    return made, cached


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (KINDS[2], {}), (KINDS[2], {"cache_dtype": "fp8", "compiled": False}), (KINDS[3], {"cache_dtype": "int8"}),
        (KINDS[8], {}),
    ],
    ids=str,
)  # fmt: skip
def test_bits_are_those_without_it_and_more_is_found(name: str, options: dict[str, Any]) -> None:
    plain, small = engine(name, 30, 0, **options), engine(name, 14, 0, **options)
    tiered = engine(name, 14, 40, **options)
    assert tiered.cache.number == small.cache.number == 14 and len(tiered.tables.pool.host or ()) == 0
    right, _ = answered(plain)
    without, few = answered(small)
    bits, many = answered(tiered)
    assert bits == without == right
    assert tiered.tables.host_hits and many > few


def test_guesses_by_a_draft_and_adapters() -> None:
    options = {"speculation": Speculation(tokens=4, draft=model(KINDS[2]).eval())}
    right, few = answered(engine(KINDS[2], 14, 0, **options), mixed=True)
    tiered = engine(KINDS[2], 14, 40, **options)
    bits, many = answered(tiered, mixed=True)
    assert bits == right and many > few and tiered.guesses is not None and tiered.guesses.accepted


def test_a_draft_finds_its_own_content() -> None:
    """One that is the model itself is always right: also behind prefixes that went to host memory and came back."""
    tiered = engine(KINDS[2], 14, 40, speculation=Speculation(tokens=4, draft=model(KINDS[2]).eval()))
    answered(tiered)
    counts = tiered.guesses
    assert tiered.tables.host_hits and counts is not None and counts.guessed == counts.accepted > 0


@pytest.mark.parametrize("seed", range(4))
def test_moves_in_groups_are_moves_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    moves = [
        Move(chance.choice(("copy", "copy", "copy", "save", "load")), chance.randrange(5), chance.randrange(5))
        for _ in range(200)
    ]
    blocks, right = torch.arange(5.0)[:, None].clone(), [float(number) for number in range(5)]
    host, slots = HostCopies([blocks], 5), [-1.0] * 5
    for slot in range(5):
        host._slots[0][slot] = -1.0
    for group in group_moves(moves):
        kind, source, target = group[0]
        if kind == "copy":
            old, new = torch.tensor([move[1:] for move in group]).t()
            assert len(set(new.tolist())) == len(new)
            blocks[new] = blocks[old]
        else:
            assert len(group) == 1
            (host.save if kind == "save" else host.load)(source, target)
    for kind, source, target in moves:
        (slots if kind == "save" else right)[target] = (slots if kind == "load" else right)[source]
    assert blocks[:, 0].tolist() == right and host._slots[0][:, 0].tolist() == slots


def test_the_oldest_is_given_up_and_what_leaves_is_kept_from_others() -> None:
    tier = HostTier(2)
    assert {tier.save(b"a"), tier.save(b"b")} == {0, 1}
    tier.touch(b"a")
    slot = tier.leave(b"a")
    assert tier.save(b"c") != slot and b"b" not in tier
    tier.leave(b"c")
    assert tier.save(b"d") is None, "all are on their way"
    tier.release(slot)
    assert tier.save(b"d") == slot and len(tier) == 1
    tier.drop(b"d")
    assert b"d" not in tier and tier.save(b"e") == slot


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ArgumentError, match="host_cache_bytes=100 is less than a block of"):
        ServingEngine(shrunk(KINDS[2]), EngineOptions(host_cache_bytes=100))


def over(blocks: int, slots: int, window: int = 0) -> BlockTables:
    return BlockTables(BlockPool(blocks, HostTier(slots)), 4, window)


def through(tables: BlockTables, tokens: list[int]) -> CachedSequence:
    """A sequence that is computed and given back."""
    passed = CachedSequence(number=0, tokens=tokens, limit=100, first=b"")
    tables.begin(passed, *tables.prefix(passed))
    tables.grow(passed, len(tokens) - passed.computed)
    tables.advance(passed, len(tokens) - passed.computed)
    tables.give_back(passed)
    return passed


def test_what_came_back_is_found_in_its_block() -> None:
    tables = over(4, 8)
    for tokens in (list(range(9)), list(range(20, 36)), list(range(9))):
        through(tables, tokens)
    assert tables.host_hits == 8 and [move.kind for move in tables.pool.moves].count("load") == 2
    through(tables, list(range(9)))
    assert tables.host_hits == 8 and tables.hits == 16


def test_what_no_window_sees_stays_in_host_memory_as_if_it_had_come_now() -> None:
    tables = over(6, 16, window=4)
    for first in (0, 20, 40):
        through(tables, list(range(first, first + 17)))
    assert tables.pool.host is not None
    before = list(tables.pool.host._slots)
    again = CachedSequence(number=1, tokens=list(range(17)), limit=100, first=b"")
    prefix, keys = tables.prefix(again)
    hosted = [key for block, key in zip(prefix, keys, strict=True) if block == HOSTED]
    assert len(hosted) == 4
    tables.begin(again, prefix, keys)
    assert again.table[:3] == [GONE] * 3 and again.table[3] >= 0
    others, now = [key for key in before if key not in hosted], list(tables.pool.host._slots)
    assert others and now[: len(others) + 3] == [*others, *hosted[:3]]
