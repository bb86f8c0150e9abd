"""Beams against the best of all continuations, and one beam against the greedy one."""

from itertools import product

import pytest
import torch

from meshwright.model import Sampling
from meshwright.model.beam_search import beam_search
from meshwright.model.generate import generate
from meshwright.spec.errors import PlanError
from tests.model.shrunk import VOCAB, model

PROMPT = [3, 1, 4, 1, 5]


def logs(found: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = found(torch.tensor([text])).log_softmax(-1)[0]
    return out


def test_one_beam_is_greedy() -> None:
    found = model("llama-3.1-8b", louder=4.0).eval()
    right = generate(found, PROMPT, max_new_tokens=6, sampling=Sampling(), stop_ids=())
    one = beam_search(found, PROMPT, beams=1, max_new_tokens=6)
    assert one.ids == right.ids and one.logprobs == pytest.approx(right.logprobs, rel=1e-4)


def test_as_many_beams_as_tokens_find_the_likeliest_pair() -> None:
    found = model("llama-3.1-8b", louder=4.0).eval()
    first = logs(found, PROMPT)[-1]
    best = max(
        ((float(first[a] + logs(found, [*PROMPT, a])[-1].max()), a) for a in range(VOCAB)), key=lambda pair: pair[0]
    )
    one = beam_search(found, PROMPT, beams=VOCAB, max_new_tokens=2)
    assert sum(one.logprobs) == pytest.approx(best[0], rel=1e-4) and one.ids[0] == best[1]


def test_ended_ones_compare_by_their_mean() -> None:
    """Every continuation of up to two tokens that ends with one of the stop ids."""
    found, stops = model("llama-3.1-8b", louder=4.0).eval(), (0, 7)
    first = logs(found, PROMPT)[-1]
    ended = {(stop,): float(first[stop]) for stop in stops}
    for a, stop in product((token for token in range(VOCAB) if token not in stops), stops):
        ended[a, stop] = float(first[a] + logs(found, [*PROMPT, a])[-1, stop]) / 2
    one = beam_search(found, PROMPT, beams=VOCAB, max_new_tokens=2, stop_ids=stops)
    assert tuple(one.ids) == max(ended, key=lambda ids: ended[ids])


def test_no_beams_are_refused() -> None:
    with pytest.raises(PlanError, match="beams=0 must be at least 1"):
        beam_search(model("llama-3.1-8b").eval(), PROMPT, beams=0, max_new_tokens=2)
