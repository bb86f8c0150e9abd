"""The choice of tokens: each option against a plain computation, and rows against each other."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.serving.engine import sampler
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.sampler import SampledRow, sample
from meshwright.spec.errors import ArgumentError

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 3.0])


def row(seed: int = 0, prompt: list[int] | None = None, made: list[int] | None = None, **options: Any) -> SampledRow:
    return SampledRow(RequestOptions(**options), seed, prompt or [0], made or [])


def shares(draws: int = 4000, logits: torch.Tensor = LOGITS, **options: Any) -> torch.Tensor:
    """How often each token comes, (V,)."""
    rows = [row(seed, temperature=options.get("temperature", 1.0), **_but(options)) for seed in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), rows).tokens)
    return torch.tensor([counts[token] / draws for token in range(len(logits))])


def _but(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "temperature"}


def only(tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    allowed = torch.full_like(LOGITS, float("-inf"))
    allowed[tokens] = LOGITS[tokens] / temperature
    return allowed.softmax(0)


@pytest.mark.parametrize(
    "options, right",
    [
        ({}, only([0, 1, 2, 3, 4, 5])),
        ({"temperature": 0.5}, only([0, 1, 2, 3, 4, 5], 0.5)),
        ({"top_k": 2}, only([5, 0])),
        ({"top_p": 0.85}, only([5, 0, 1])),
        ({"min_p": 0.1}, only([5, 0, 1])),
        ({"top_k": 3, "top_p": 0.7}, only([5, 0])),
        ({"top_k": 1, "temperature": 5.0}, only([5])),
        ({"logit_bias": {5: -100.0}}, only([0, 1, 2, 3, 4])),
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [3, 1024])
def test_tokens_come_as_often_as_they_should(
    options: dict[str, Any], right: torch.Tensor, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "FEW", few)
    torch.testing.assert_close(shares(**options), right, atol=0.03, rtol=0)
    assert not shares(**options)[right == 0].any()


def test_greedy_is_the_likeliest_and_of_equals_the_first() -> None:
    sampled = sample(torch.stack((LOGITS, torch.zeros(6))), [row(), row()])
    assert sampled.tokens == [5, 0]
    assert sampled.logprobs == pytest.approx([LOGITS.log_softmax(0)[5].item(), -torch.tensor(6.0).log().item()])


def test_penalties() -> None:
    logits = torch.tensor([[4.0, 3.9, 3.8, -1.0]])
    assert sample(logits, [row(prompt=[0], repetition_penalty=1.1)]).tokens == [1]
    assert sample(logits, [row(prompt=[0, 1], made=[2], repetition_penalty=8.0)]).tokens == [0]  # 0.5, 0.49, 0.475
    assert sample(logits, [row(prompt=[0], presence_penalty=0.5)]).tokens == [0], "of the answer only"
    assert sample(logits, [row(made=[0, 0, 1], presence_penalty=0.5)]).tokens == [2]
    assert sample(logits, [row(made=[0, 0, 1, 2], frequency_penalty=0.05)]).tokens == [0]
    assert sample(logits, [row(made=[0, 0, 0, 1], frequency_penalty=0.1)]).tokens == [1]
    negative = torch.tensor([[-1.0, -1.5]])
    assert sample(negative, [row(prompt=[0], repetition_penalty=2.0)]).tokens == [1], "a negative one is multiplied"


def test_counts_follow_an_answer_as_it_grows() -> None:
    made: list[int] = []
    growing = SampledRow(RequestOptions(frequency_penalty=1.0), 0, [0], made)
    for _ in range(8):
        made += sample(torch.tensor([[0.0, 0.5, 0.2]]), [growing]).tokens
    assert made == [1, 2, 0, 1, 2, 0, 1, 2]


def test_log_probabilities_are_the_models_own() -> None:
    wanted = row(temperature=0.5, logit_bias={4: 50.0}, logprobs=2)
    sampled = sample(LOGITS[None], [wanted])
    logs = LOGITS.log_softmax(0)
    assert sampled.tokens == [4] and sampled.logprobs == pytest.approx([logs[4].item()])
    assert [token for token, _ in sampled.top[0]] == [5, 0]
    assert [value for _, value in sampled.top[0]] == pytest.approx([logs[5].item(), logs[0].item()])
    assert sample(LOGITS.expand(2, -1), [row(), wanted]).top[0] == []


def test_a_row_does_not_depend_on_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 3000) * 3
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.999}, {"temperature": 1.0, "top_k": 1500},
        {"temperature": 1.0, "min_p": 1e-6, "top_p": 0.9}, {"temperature": 0.7, "presence_penalty": 1.0},
    ]  # fmt: skip
    rows = [row(number, made=[number], **kinds[number % len(kinds)]) for number in range(40)]
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [single]) for index, single in enumerate(rows)]
    assert together.tokens == [single.tokens[0] for single in alone]
    assert together.logprobs == [single.logprobs[0] for single in alone]
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards.tokens == together.tokens[::-1]


def test_seeds_and_places_draw_anew() -> None:
    flat = torch.zeros(1, 1000)
    drawn = [
        sample(flat, [row(seed, made=[0] * length, temperature=1.0)]).tokens[0] for seed in (1, 2) for length in (0, 1)
    ]
    assert len(set(drawn)) == 4
    assert sample(flat, [row(1, temperature=1.0)]).tokens[0] == drawn[0]


def test_a_broken_row_is_known_and_spoils_no_other() -> None:
    sampled = sample(torch.stack((LOGITS, LOGITS * float("nan"))), [row(temperature=1.0, top_p=0.9), row()])
    assert sampled.broken == [False, True] and sampled.tokens[0] in (5, 0, 1)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"temperature": -1}, "temperature=-1"), ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"), ({"top_k": -1}, "top_k"), ({"min_p": 2}, "min_p"), ({"n": 0}, "n=0"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"), ({"logprobs": 21}, "logprobs"), ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"), ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        RequestOptions(**options)


def test_greedy_rows_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel is taken where every row wants its likeliest token alone; both ways give one answer."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[2, 7] = float("nan")
    plain = sample(logits, [row(), row(), row()])
    taken = list[int]()

    def in_one(rows_of_logits: torch.Tensor) -> torch.Tensor:
        taken.append(len(rows_of_logits))
        logs = rows_of_logits.log_softmax(-1)
        return torch.stack((logs.argmax(-1).float(), logs.amax(-1)), dim=1)

    monkeypatch.setattr(sampler, "uses_triton", lambda operation, _: operation == "likeliest")
    monkeypatch.setitem(sys.modules, "meshwright.kernels.triton.logit_rows", SimpleNamespace(likeliest=in_one))
    sampled = sample(logits, [row(), row(), row()])
    assert taken == [3] and sampled.broken == plain.broken == [False, False, True] and sampled.top == [[], [], []]
    assert sampled.tokens[:2] == plain.tokens[:2] and sampled.logprobs[:2] == pytest.approx(plain.logprobs[:2])
    for changed in ({"temperature": 0.5}, {"logprobs": 2}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}):
        sample(logits[:2], [row(), row(**changed)])
    assert taken == [3]
