"""Steps that are launched before the tokens of the one before are read: answers stay what they are."""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.model import Transformer
from meshwright.serving.engine import sampler, step_loop
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.paged_cache import HostReading, bytes_per_block, to_device
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from tests.model.shrunk import KINDS, VOCAB, model

MODEL = model("llama-3.1-8b").eval()
CHANCE = random.Random(3)
PROMPTS = [[CHANCE.randrange(VOCAB) for _ in range(CHANCE.randint(1, 30))] for _ in range(9)]
PROMPTS += [PROMPTS[0] + [1, 2, 3], PROMPTS[0] + [4]]
SIZES: dict[str, Any] = {"exact": True, "block": 4, "most_tokens": 24, "most_sequences": 6}
Asked = Callable[[int], dict[str, Any]]


def spelled(ids: Iterable[int]) -> str:
    return "".join(chr(ord("A") + token) for token in ids)


def served(
    ahead: bool, asked: Asked, *, network: Transformer = MODEL,
    between: Callable[[ServingEngine, int], None] | None = None, **options: Any,
) -> tuple[list[ServedRequest], ServingEngine]:  # fmt: skip
    """Requests that come in the middle of others, more than there is room for."""
    engine = ServingEngine(network, EngineOptions(run_ahead=ahead, **{**SIZES, **options}), decode=spelled)
    requests = []
    for number, prompt in enumerate(PROMPTS):
        settings = {"max_new_tokens": 9 + 7 * (number % 3), **asked(number)}
        requests.append(engine.add(prompt, RequestOptions(**settings)))
        if number % 2:
            engine.step()
        if between is not None:
            between(engine, number)
    engine.run(requests)
    assert engine.idle and engine.scheduler.idle and engine.tables.pool.free == engine.tables.pool.size
    return requests, engine


def whole(requests: list[ServedRequest]) -> list[Any]:
    return [
        (answer.ids, answer.logprobs, answer.top, answer.text, answer.ending)
        for request in requests
        for answer in request.answers
    ]


CUTS: list[dict[str, Any]] = [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}]
MIXED: dict[str, Asked] = {
    "greedy": lambda number: {},
    "sampled": lambda number: {"temperature": 0.9, "seed": number, "logprobs": number % 4},
    "cut": lambda number: {"temperature": 1.1, "seed": number, **CUTS[number % 3]},
    "several": lambda number: {"n": 1 + number % 3, "temperature": 0.8, "seed": number},
    "tokens that end": lambda number: {"stop_ids": tuple(range(0, VOCAB, 6)), "max_new_tokens": 40},
    "strings that end": lambda number: {"stop": ("B", spelled([7, 8])), "max_new_tokens": 40, "temperature": 1.0},
    "biased": lambda number: {"logit_bias": {number: 2.0}},
    "one token": lambda number: {"max_new_tokens": 1 + number % 2},
    "urgent": lambda number: {"priority": -number},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_answers_are_those_of_steps_that_wait(name: str) -> None:
    waiting, plain = served(False, MIXED[name])
    ahead, engine = served(True, MIXED[name])
    assert whole(ahead) == whole(waiting)
    assert plain.steps_ahead == 0 and engine.steps_ahead > 0
    if name in ("greedy", "sampled", "cut", "biased", "one token"):
        assert engine.tables.hits == plain.tables.hits


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[7], KINDS[8]])
def test_other_models(kind: str) -> None:
    """Learned positions, a window that blocks fall out of, experts, and a low rank of keys."""
    network = model(kind).eval()
    ahead, engine = served(True, MIXED["sampled"], network=network)
    assert whole(ahead) == whole(served(False, MIXED["sampled"], network=network)[0]) and engine.steps_ahead


def test_blocks_that_run_out_wait_for_tokens() -> None:
    """Who gives blocks back is decided when all tokens before are known."""
    few = {"cache_bytes": 22 * bytes_per_block(MODEL, 4)}
    ahead, engine = served(True, MIXED["sampled"], **few)
    waiting, plain = served(False, MIXED["sampled"], **few)
    assert whole(ahead) == whole(waiting)
    assert engine.steps_ahead and engine.scheduler.preemptions and plain.scheduler.preemptions


def test_answers_that_nobody_wants_any_more() -> None:
    """They end between two steps, one of which is computed already."""

    def cancels(requests: list[ServedRequest]) -> Callable[[ServingEngine, int], None]:
        def between(engine: ServingEngine, number: int) -> None:
            if number == 5:
                growing = [answer for _, answer in engine._loop._growing.values() if answer.ids]
                assert growing
                request = next(
                    candidate for candidate, answer in engine._loop._growing.values() if answer is growing[0]
                )
                engine.cancel(request)
                requests.append(request)

        return between

    gone = list[ServedRequest]()
    ahead, engine = served(True, MIXED["sampled"], between=cancels(gone))
    waiting, _ = served(False, MIXED["sampled"])
    assert engine.steps_ahead and gone[0].answers[0].ending == "cancelled"
    for left, right in zip(ahead, waiting, strict=True):
        if left is gone[0]:
            assert left.answers[0].ids == right.answers[0].ids[: len(left.answers[0].ids)]
        else:
            assert whole([left]) == whole([right])
    engine.cancel(engine.add(PROMPTS[0]))
    assert engine.idle and engine._loop._next is None


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"repetition_penalty": 1.3}, {}), ({"frequency_penalty": 0.5}, {}), ({"beams": 2}, {}),
        ({}, {"speculation": Speculation(tokens=3)}),
    ],
)  # fmt: skip
def test_what_the_host_decides_by_tokens_waits_for_them(asked: dict[str, Any], options: dict[str, Any]) -> None:
    """And others run ahead again when it has ended."""

    def mixed(number: int) -> dict[str, Any]:
        return {**asked, "max_new_tokens": 6} if number == 4 else {"temperature": 0.7, "seed": number}

    ahead, engine = served(True, mixed, **options)
    assert whole(ahead) == whole(served(False, mixed, **options)[0])
    assert (engine.steps_ahead > 0) == (not options)


def test_rows_that_are_cut_beyond_the_few_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has drawn another token then: the sequence's next row is computed once more."""
    monkeypatch.setattr(sampler, "FEW", 3)
    redrawn = 0
    read = sampler.DrawnTokens.read

    def counted(drawn: sampler.DrawnTokens) -> sampler.SampledTokens:
        nonlocal redrawn
        sampled = read(drawn)
        redrawn += len(sampled.redrawn)
        return sampled

    monkeypatch.setattr(sampler.DrawnTokens, "read", counted)

    def asked(number: int) -> dict[str, Any]:
        return {"temperature": 1.5, "seed": number, "logprobs": 1, **({"top_p": 0.9} if number % 2 else {})}

    ahead, engine = served(True, asked)
    assert redrawn > 5 and engine.steps_ahead
    monkeypatch.setattr(sampler, "FEW", 1024)
    assert whole(ahead) == whole(served(False, asked)[0])


def test_logits_that_are_no_numbers_end_one_answer() -> None:
    """What the row of the next step has written is cleared with the others."""
    network = model("llama-3.1-8b").eval()
    bad = 17
    network.embed.weight.data[bad] = float("nan")
    engine = ServingEngine(network, EngineOptions(run_ahead=True, **{**SIZES, "most_sequences": 3}))
    plain = ServingEngine(network, EngineOptions(run_ahead=False, **{**SIZES, "most_sequences": 3}))
    prompts = [[1, 2, 3], [4, bad, 5, 6, 7], [8, 9], [4, 6], [10] * 9]
    both = []
    for serving in (engine, plain):
        requests = [serving.add(prompt, RequestOptions(max_new_tokens=7, logit_bias={bad: -1e9})) for prompt in prompts]
        while not all(request.ended for request in requests):
            serving.step()
        both.append([(answer.ids, answer.ending) for request in requests for answer in request.answers])
        assert serving.idle and serving.tables.pool.free == serving.tables.pool.size
        assert all(bool(tensor.isfinite().all()) for layer in serving.cache.layers for tensor in layer.tensors)
    assert both[0] == both[1] and both[0][1] == ([], "broken")
    assert engine.steps_ahead


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("part", ["pass", "draw"])
@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_step_that_fails_is_computed_again(
    ahead: bool, part: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, or Ctrl-C: no token is lost, and no answer waits forever."""
    owner, name = (MODEL, "hidden") if part == "pass" else (step_loop, "draw")
    compute, calls = getattr(owner, name), 0

    def fails_once(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise KeyboardInterrupt
        return compute(*arguments, **more)

    def answers(engine: ServingEngine) -> list[Any]:
        options = [RequestOptions(max_new_tokens=6, n=1 + seed % 2, temperature=0.8, seed=seed) for seed in range(4)]
        requests = [engine.add(PROMPTS[seed], wish) for seed, wish in enumerate(options)]
        for _ in range(30):
            with suppress(KeyboardInterrupt):
                engine.step()
        return whole(requests)

    right = answers(ServingEngine(MODEL, EngineOptions(run_ahead=False, **SIZES), decode=spelled))
    assert all(ending == "length" for *_, ending in right)
    engine = ServingEngine(MODEL, EngineOptions(run_ahead=ahead, **SIZES), decode=spelled)
    monkeypatch.setattr(owner, name, fails_once)
    assert answers(engine) == right
    assert calls > failing and engine.idle and engine.tables.pool.free == engine.tables.pool.size


class FakeDevice:
    """Notes when steps are given to a device and when their tokens are read."""

    def __init__(self, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = list[tuple[str, int]]()
        self._launches = self._reads = 0
        run, read = engine._loop.runner.run, HostReading.read

        def launched(*arguments: Any, **more: Any) -> Any:
            self.events.append(("launch", self._launches))
            self._launches += 1
            return run(*arguments, **more)

        def arrived(reading: HostReading) -> Any:
            self.events.append(("read", self._reads))
            self._reads += 1
            return read(reading)

        monkeypatch.setattr(engine._loop.runner, "run", launched)
        monkeypatch.setattr(HostReading, "read", arrived)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    engine = ServingEngine(MODEL, EngineOptions(run_ahead=ahead, **SIZES))
    device = FakeDevice(engine, monkeypatch)
    request = engine.add(PROMPTS[0][:5], RequestOptions(max_new_tokens=6))
    engine.run([request])
    launches = [("launch", number) for number in range(6)]
    reads = [("read", number) for number in range(6)]
    pairs = zip(launches, reads, strict=True)
    waiting = [event for pair in pairs for event in pair]
    right = [launches[0], *(event for pair in zip(launches[1:], reads, strict=False) for event in pair), reads[-1]]
    assert device.events == (right if ahead else waiting), "no step more than there are tokens"


def test_tokens_of_rows_are_taken_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has none of them when the next step is launched."""
    engine, unknown = ServingEngine(MODEL, EngineOptions(run_ahead=True, **SIZES)), list[int]()
    run = engine._loop.runner.run

    def launched(step: Any, *, behind: int = 0, drawn: Tensor | None = None) -> Any:
        unknown.append(sum(sequence.tokens[-1] < 0 for sequence in step.chunks))
        assert drawn is None or drawn.dtype == torch.int64
        return run(step, behind=behind, drawn=drawn)

    monkeypatch.setattr(engine._loop.runner, "run", launched)
    requests = [engine.add(prompt[:4], RequestOptions(max_new_tokens=5)) for prompt in PROMPTS[:4]]
    engine.run(requests)
    assert unknown == [0, 4, 4, 4, 4]


@pytest.mark.parametrize("numbers", [[3, -1], array("q", [3, -1, 2**40]), array("q")])
def test_numbers_reach_the_device_as_they_are(numbers: Sequence[int]) -> None:
    """An array is not looked at number by number."""
    there = to_device(numbers, torch.device("cpu"), torch.int64)
    assert there.dtype == torch.int64 and there.tolist() == list(numbers)
    assert not isinstance(numbers, array) or not numbers or there.data_ptr() == numbers.buffer_info()[0]


@pytest.mark.gpu
def test_a_gpu_answers_the_same_ahead_and_waiting() -> None:
    """Greedy and sampled, with graphs."""
    network = model("llama-3.1-8b").to("cuda", torch.float32).eval()
    for name in ("greedy", "sampled", "cut", "tokens that end"):
        settings: dict[str, Any] = {"network": network, "exact": False}
        (ahead, engine), (waiting, _) = served(True, MIXED[name], **settings), served(False, MIXED[name], **settings)
        assert [answer.ids for request in ahead for answer in request.answers] == [
            answer.ids for request in waiting for answer in request.answers
        ]
        assert engine.steps_ahead
