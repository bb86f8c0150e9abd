"""Guesses change no answer: not its tokens, nor in exact mode its bits, greedy or sampled."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.model import Transformer, build
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import NgramIndex, Speculation
from meshwright.spec.errors import ArgumentError
from tests.model.shrunk import KINDS, VOCAB, model, shrink
from tests.serving.engine.test_exact import PROMPTS, bits, shrunk
from tests.serving.engine.test_serving_engine import spelled

REPEATED = [[5, 6, 7, 8] * 5, [1, 2, 3] * 6 + [1], PROMPTS[0]]


def served(
    network: Transformer, speculation: Speculation | None, *, asked: dict[str, Any] | None = None, **options: Any
) -> tuple[list[Any], ServingEngine]:
    sizes = {"block": 4, "most_tokens": 24, "most_sequences": 8, "exact": True, **options}
    engine = ServingEngine(network, EngineOptions(speculation=speculation, **sizes), decode=spelled)
    wanted = RequestOptions(**{"max_new_tokens": 24, "logprobs": 2, **(asked or {})})
    requests = [engine.add(prompt, wanted) for prompt in REPEATED]
    engine.run(requests)
    assert engine.idle and engine.tables.pool.free == engine.tables.pool.size
    return requests, engine


def drafted(name: str, louder: float = 8.0) -> Speculation:
    """By a model that is near to the one that it guesses for."""
    draft = model(name, louder=louder).eval()
    return Speculation(tokens=5, draft=draft)


def sure(engine: ServingEngine) -> int:
    assert engine.guesses is not None
    return engine.guesses.accepted


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2], KINDS[3], KINDS[8]])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.3}])
@pytest.mark.long
def test_bits_are_those_without_guesses(name: str, asked: dict[str, Any]) -> None:
    network = shrunk(name)
    right = bits(served(network, None, asked=asked)[0])
    by_look_up, _ = served(network, Speculation(tokens=6), asked=asked)
    assert bits(by_look_up) == right
    by_draft, engine = served(network, drafted(name), asked=asked)
    assert bits(by_draft) == right and sure(engine) > 0


def test_a_draft_that_is_the_model_itself_is_always_right() -> None:
    network = shrunk(KINDS[2])
    for asked in ({}, {"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 0.5}):
        _, engine = served(network, Speculation(tokens=5, draft=model(KINDS[2]).eval()), asked=asked)
        assert engine.guesses is not None and engine.guesses.accepted == engine.guesses.guessed > 40


def test_bits_with_preemption_hits_and_other_forms() -> None:
    network = shrunk(KINDS[2])
    for options in ({"most_tokens": 9, "most_sequences": 3}, {"compiled": False}, {"cache_bytes": 30_000}):
        right = bits(served(network, None, compiled=options.get("compiled", True))[0])
        for speculation in (Speculation(tokens=4), drafted(KINDS[2])):
            asked, engine = served(network, speculation, **options)
            assert bits(asked) == right
            again = [engine.add(request.prompt, request.options) for request in asked]
            engine.run(again)
            assert bits(again) == right
    assert engine.scheduler.preemptions, "the cache was large enough for all"


@pytest.mark.parametrize("draft", [False, True])
def test_stop_strings_and_several_answers(draft: bool) -> None:
    network = shrunk(KINDS[2])
    speculation = drafted(KINDS[2]) if draft else Speculation()
    text = served(network, None)[0][0].answers[0].text
    for asked in ({"stop": (text[7:9],)}, {"n": 3, "temperature": 0.8}, {"stop_ids": (ord(text[5]) - ord("A"),)}):
        right, _ = served(network, None, asked=asked)
        guessed, _ = served(network, speculation, asked=asked)
        assert bits(guessed) == bits(right)
        for request, other in zip(guessed, right, strict=True):
            assert [(a.text, a.ending) for a in request.answers] == [(a.text, a.ending) for a in other.answers]


def test_without_exact_mode_tokens_are_the_same() -> None:
    network = shrunk(KINDS[2])
    right = [request.answers[0].ids for request in served(network, None, exact=False)[0]]
    for speculation in (Speculation(tokens=6), drafted(KINDS[2])):
        assert [request.answers[0].ids for request in served(network, speculation, exact=False)[0]] == right


def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """Pairs of tokens of many seeds, guessed by a quite different model, against products of probabilities."""
    shape = shrink(KINDS[2])
    tiny = build(replace(shape, vocab=5)).eval()
    other = build(tiny.shape, seed=9).eval()
    with torch.no_grad():
        for network in (tiny, other):
            network.embed.weight.mul_(30.0)
    engine = ServingEngine(tiny, EngineOptions(speculation=Speculation(tokens=3, draft=other), most_tokens=256))
    asked = [engine.add([1, 2], RequestOptions(max_new_tokens=3, temperature=1.0, seed=seed)) for seed in range(3000)]
    engine.run(asked)
    assert engine.guesses is not None and 0 < engine.guesses.accepted < engine.guesses.guessed
    drawn = Counter(tuple(entry.answers[0].ids[:2]) for entry in asked)
    with torch.no_grad():
        first = tiny(torch.tensor([[1, 2]]))[0, -1].softmax(-1)
        behind = tiny(torch.tensor([[1, 2, token] for token in range(5)]))[:, -1].softmax(-1)
    expected = (first[:, None] * behind * len(asked)).tolist()
    squares = [
        (drawn[entry, two] - expected[entry][two]) ** 2 / expected[entry][two]
        for entry in range(5)
        for two in range(5)
        if expected[entry][two] >= 5
    ]
    assert len(squares) > 8 and sum(squares) < 2.2 * len(squares), "chi squared, far above its mean"


def test_the_look_up() -> None:
    index, text = NgramIndex(3), [1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3]
    assert index.guess(text, 2) == [5, 7], "what followed the last time"
    assert index.guess([*text, 4], 4) == [9, 2, 3, 5]
    assert index.guess([*text, 4, 8], 4) == []
    repeated = NgramIndex(2)
    assert repeated.guess([6, 6, 6], 4) == [6, 6, 6, 6]


def test_repeated_text_takes_fewer_steps_and_wrong_guesses_become_rare() -> None:
    network = shrunk(KINDS[2])

    def steps(speculation: Speculation | None) -> tuple[int, ServingEngine]:
        engine = ServingEngine(network, EngineOptions(speculation=speculation))
        asked, count = engine.add([5, 6, 7, 8] * 6, RequestOptions(max_new_tokens=60)), 0
        while not asked.ended:
            engine.step()
            count += 1
        return count, engine

    plain, _ = steps(None)
    with_draft, engine = steps(Speculation(draft=model(KINDS[2]).eval()))
    assert plain > 30 and with_draft < plain / 4
    unlike, engine = steps(Speculation(draft=model(KINDS[2], seed=5).eval()))
    assert unlike <= plain and engine.guesses is not None and engine.guesses.guessed < plain, "it pauses"


@pytest.mark.parametrize(("options", "complaint"), [
    ({"tokens": 0}, "tokens=0"), ({"ngram": 1}, "ngram=1"),
    ({"draft": build(replace(shrink(KINDS[2]), vocab=VOCAB + 1))}, "take a draft model with the same tokenizer"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        ServingEngine(shrunk(KINDS[2]), EngineOptions(speculation=Speculation(**options)))
