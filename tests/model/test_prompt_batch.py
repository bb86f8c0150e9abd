"""Many prompts at once: every row is scored and continued as if it were alone, for every kind of attention."""

import math

import pytest
import torch

from meshwright.model import Transformer
from meshwright.model.generate import generate, greedy, score
from meshwright.spec.errors import PlanError, RunError
from tests.model.shrunk import KINDS, VOCAB, model, tokens

PROMPTS = [[3, 14, 15, 9, 2, 6, 5], [1], [7, 7, 8, 2], list(range(2, 13))]
CONTINUATIONS = [[[4], [5, 6, 7]], [[9, 9]], [[1], [2], [3]], [[8, 1, 2, 5, 9, 11], [6]]]


def alone(transformer: Transformer, prompt: list[int], text: list[int]) -> tuple[float, bool]:
    """Score a text by one whole forward pass."""
    with torch.no_grad():
        logits = transformer(torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1].double()
    logs, wanted = logits.log_softmax(-1), torch.tensor(text)
    return logs.gather(1, wanted[:, None]).sum().item(), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("name", KINDS)
def test_continuations_are_scored_as_by_whole_passes(name: str) -> None:
    transformer = model(name).eval()
    best = generate(transformer, PROMPTS[0], max_new_tokens=3).ids
    asked = [[*CONTINUATIONS[0], best], *CONTINUATIONS[1:]]
    scores = score(transformer, PROMPTS, asked)
    assert scores[0][-1].greedy
    for prompt, texts, prompt_scores in zip(PROMPTS, asked, scores, strict=True):
        for text, text_score in zip(texts, prompt_scores, strict=True):
            logprob, greedy = alone(transformer, prompt, text)
            assert text_score.logprob == pytest.approx(logprob, abs=2e-4) and text_score.greedy == greedy


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_continued_as_by_themselves(name: str) -> None:
    transformer = model(name).eval()
    right = [generate(transformer, prompt, max_new_tokens=9).ids for prompt in PROMPTS]
    assert greedy(transformer, PROMPTS, max_new_tokens=9) == right


def test_rows_end_by_themselves() -> None:
    """At a stop token, and at the last position."""
    transformer = model("gpt2-124m").eval()  # learned positions: there is nothing behind the last
    most = transformer.shape.max_positions
    prompts = [PROMPTS[0], PROMPTS[1], tokens(1, most - 2).tolist()[0]]
    whole = [generate(transformer, prompt, max_new_tokens=12).ids for prompt in prompts]
    assert len(whole[2]) == 3
    stop = whole[0][2]
    made = greedy(transformer, prompts, max_new_tokens=12, stop_ids=(stop,))
    assert made == [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]
    assert greedy(transformer, prompts, max_new_tokens=0) == [[], [], []]


def test_what_cannot_be_asked_is_refused() -> None:
    transformer = model("gpt2-124m").eval()
    most = transformer.shape.max_positions
    full = tokens(1, most).tolist()[0]
    assert math.isfinite(score(transformer, [full], [[[1]]])[0][0].logprob), (
        "the last token needs no position of its own"
    )
    with pytest.raises(PlanError, match="shorten it"):
        score(transformer, [full], [[[1, 2]]])
    with pytest.raises(PlanError, match="outside the model's vocabulary"):
        score(transformer, [[1]], [[[VOCAB]]])
    with pytest.raises(PlanError, match="empty"):
        score(transformer, [[1]], [[[]]])
    with torch.no_grad():
        transformer.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="no numbers"):
        greedy(transformer, [[1]], max_new_tokens=2)
