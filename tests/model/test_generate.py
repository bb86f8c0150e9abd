"""Generation: cached keys and values give what a whole forward pass gives, for every kind of attention; sampling."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright import compat
from meshwright.model import Cache, Generation, Sampling, Transformer
from meshwright.model.attention import LayerCache, Past
from meshwright.model.generate import generate, pick
from meshwright.spec.errors import PlanError, RunError
from tests.model.shrunk import KINDS, VOCAB, model, tokens
from tests.operation_recorder import Recording

PROMPT = [3, 14, 15, 9, 2, 6, 5]


def greedy_by_whole_passes(transformer: Transformer, prompt: list[int], count: int) -> Generation:
    """Every token anew from all before it."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            logs = transformer(torch.tensor([ids]))[0, -1].float().log_softmax(0)
            ids.append(int(logs.argmax()))
            logprobs.append(logs[ids[-1]].item())
    return Generation(ids=ids[len(prompt) :], logprobs=logprobs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT], ids=["one", "several"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_greedy_tokens_equal_whole_forward_passes(name: str, prompt: list[int], kernels: str) -> None:
    transformer = model(name, kernels=kernels).eval()
    right = greedy_by_whole_passes(transformer, prompt, 12)
    made = generate(transformer, prompt, max_new_tokens=12)
    assert made.ids == right.ids
    assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_in_16_bit(name: str) -> None:
    """Probabilities to the precision of bf16; ids may differ only where two are as likely."""
    transformer = model(name, louder=3.0, dtype=torch.bfloat16).eval()
    made = generate(transformer, PROMPT, max_new_tokens=8)
    with torch.no_grad():
        logs = transformer(torch.tensor([PROMPT + made.ids]))[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(made.ids).unsqueeze(1)).squeeze(1)
    assert made.logprobs == pytest.approx(chosen.tolist(), abs=0.05)
    assert (logs.amax(1) - chosen).max() < 0.05


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(1, 23), max_size=4, unique=True))
def test_a_text_may_be_fed_in_any_pieces(name: str, cuts: list[int]) -> None:
    transformer, row = MODELS[name], tokens(2, 24)
    cache = Cache(transformer.shape.layers)
    borders = [0, *sorted(cuts), 24]
    with torch.no_grad():
        pieces = [transformer(row[:, a:b], cache=cache) for a, b in itertools.pairwise(borders)]
        torch.testing.assert_close(torch.cat(pieces, 1), transformer(row), rtol=1e-4, atol=1e-4)
    assert cache.length == 24


MODELS = {name: model(name).eval() for name in KINDS}


def test_the_cache_outgrows_its_first_buffer() -> None:
    transformer = model("mistral-7b-v0.1").eval()
    row = tokens(1, 200)
    cache = Cache(transformer.shape.layers)
    with torch.no_grad():
        pieces = [transformer(row[:, a : a + 7], cache=cache) for a in range(0, 200, 7)]
        torch.testing.assert_close(torch.cat(pieces, 1), transformer(row), rtol=1e-4, atol=1e-4)


def test_where_it_ends() -> None:
    transformer = MODELS["llama-3.1-8b"]
    assert generate(transformer, PROMPT, max_new_tokens=0) == Generation(ids=[], logprobs=[])
    free = generate(transformer, PROMPT, max_new_tokens=12)
    assert len(free.ids) == len(free.logprobs) == 12
    stop = free.ids[4]
    first = free.ids.index(stop)
    assert generate(transformer, PROMPT, max_new_tokens=12, stop_ids=[stop]).ids == free.ids[: first + 1]
    assert len(generate(transformer, [1] * 60, max_new_tokens=12).ids) == 5, "64 positions: the fifth is never fed"
    assert len(generate(transformer, [1] * 64, max_new_tokens=12).ids) == 1


def test_tokens_are_told_as_they_come_and_the_mode_is_put_back() -> None:
    transformer = model("llama-3.1-8b", dropout=0.5)
    heard: list[int] = []
    made = generate(transformer, PROMPT, max_new_tokens=5, on_token=heard.append)
    assert heard == made.ids and transformer.training
    assert made == generate(MODELS["llama-3.1-8b"], PROMPT, max_new_tokens=5), "without dropout"

    def interrupted(token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(transformer, PROMPT, max_new_tokens=5, on_token=interrupted)
    assert transformer.training


def test_nothing_else_draws_from_the_same_generator() -> None:
    state = torch.get_rng_state()
    hot = Sampling(temperature=1.0, seed=3)
    first = generate(MODELS["llama-3.1-8b"], PROMPT, max_new_tokens=10, sampling=hot)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(9)
    assert first == generate(MODELS["llama-3.1-8b"], PROMPT, max_new_tokens=10, sampling=hot)
    other = Sampling(temperature=1.0, seed=4)
    assert first.ids != generate(MODELS["llama-3.1-8b"], PROMPT, max_new_tokens=10, sampling=other).ids


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    transformer = MODELS["llama-3.1-8b"]
    made = generate(transformer, PROMPT, max_new_tokens=6, sampling=Sampling(temperature=2.0, top_k=5, seed=1))
    with torch.no_grad():
        logs = transformer(torch.tensor([PROMPT + made.ids]))[0].log_softmax(-1)
    places = range(len(PROMPT) - 1, len(PROMPT) + 5)
    assert made.logprobs == pytest.approx([logs[p, i].item() for p, i in zip(places, made.ids, strict=True)], abs=1e-4)


LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
"""Likeliest first: 0, 4, 2, 1, 3; shares 0.43, 0.26, 0.16, 0.06 ... of the whole."""


def draws(count: int = 2000, **options: float) -> Counter[int]:
    sampling = Sampling(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    return Counter(pick(LOGITS, sampling, generator) for _ in range(count))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_gives_the_distribution_it_says(temperature: float) -> None:
    shares = (LOGITS / temperature).softmax(0).tolist()
    counts = draws(temperature=temperature)
    for token, share in enumerate(shares):
        assert abs(counts[token] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000), token


def test_greedy_and_nearly_greedy() -> None:
    assert set(draws(50, temperature=0.0)) == {0}
    for temperature in (1e-3, 1e-30, 1e-45):
        assert set(draws(50, temperature=temperature)) == {0}, temperature


def test_top_k_leaves_the_k_likeliest_in_their_proportion() -> None:
    assert set(draws(200, top_k=1)) == {0}
    assert set(draws(top_k=3)) == {0, 4, 2}
    assert set(draws(top_k=5)) == set(draws(top_k=99)) == set(range(5))
    counts = draws(top_k=2)
    share = 1 / (1 + math.exp(-0.5))
    assert set(counts) == {0, 4} and abs(counts[0] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


def test_top_p_leaves_the_fewest_that_reach_p() -> None:
    shares = LOGITS.softmax(0)
    assert set(draws(200, top_p=1e-9)) == {0}
    assert set(draws(200, top_p=shares[0].item() - 1e-4)) == {0}
    assert set(draws(top_p=shares[0].item() + 1e-4)) == {0, 4}
    assert set(draws(top_p=shares[[0, 4, 2]].sum().item() - 1e-4)) == {0, 4, 2}
    assert set(draws(top_p=1.0)) == set(range(5))


def test_top_p_counts_among_the_top_k() -> None:
    """Of the two likeliest the first has 0.62: with p = 0.6 it is alone, while of all five it has 0.43."""
    assert set(draws(200, top_k=2, top_p=0.6)) == {0}
    assert set(draws(top_p=0.6)) == {0, 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1 "),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0 "),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
    ],
)
def test_impossible_sampling_is_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        Sampling(**options)  # type: ignore[arg-type]
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([], 1, "empty"),
        ([1, VOCAB], 1, f"token {VOCAB} is outside the model's vocabulary of {VOCAB}"),
        ([5, -3], 1, "token -3 is outside"),
        ([1], -1, "max_new_tokens=-1"),
        ([1] * 65, 1, "65 tokens, the model 64 positions"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], count: int, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        generate(MODELS["llama-3.1-8b"], prompt, max_new_tokens=count)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_are_no_numbers_are_told() -> None:
    transformer = model("llama-3.1-8b")
    with torch.no_grad():
        transformer.norm.weight[3] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="no numbers"):
            generate(transformer, PROMPT, max_new_tokens=2, sampling=Sampling(temperature=temperature))


PAGE = 4


class Paged:
    """Past keys and values in pages of PAGE positions, as a server keeps them."""

    low_rank = False

    def __init__(self) -> None:
        self.pages: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return sum(keys.shape[1] for keys, _ in self.pages)

    def turn(self, *_: Any, **__: Any) -> bool:
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float
    ) -> Tensor:
        for at in range(k.shape[1]):
            new = k[:, at : at + 1], v[:, at : at + 1]
            if self.pages and self.pages[-1][0].shape[1] < PAGE:
                new = tuple(torch.cat(both, 1) for both in zip(self.pages.pop(), new, strict=True))  # type: ignore[assignment]
            self.pages.append(new)
        keys, values = (torch.cat(parts, 1) for parts in zip(*self.pages, strict=True))
        return attend(q, keys, values, *rest, scale=scale)


@pytest.mark.parametrize("name", KINDS)
def test_another_cache_is_another_way_to_keep_the_same(name: str) -> None:
    transformer, row = model(name).eval(), tokens(2, 11)
    kinds: list[Callable[[], Past]] = [Paged, LayerCache]
    caches = [Cache(transformer.shape.layers, kind) for kind in kinds]
    with torch.no_grad():
        for piece in row.split((6, 1, 4), 1):
            paged, plain = (transformer.hidden(piece, cache=cache)[0] for cache in caches)
            assert torch.equal(paged, plain)
    assert caches[0].length == 11 and [len(keys[0]) for keys, _ in caches[0].layers[0].pages] == [4, 4, 3]  # type: ignore[attr-defined]


class LowRank(Paged):
    low_rank = True


def test_where_16_bit_products_are_emulated_keys_are_folded_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own are 10 to 20 times as slow there."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    monkeypatch.setattr(compat, "HAS_VECTORS", False)
    transformer = model("deepseek-v3").bfloat16().eval()
    with torch.no_grad(), Recording() as recording:
        transformer.hidden(tokens(2, 3), cache=Cache(transformer.shape.layers, LowRank))
    assert recording.products() == {torch.float32}
