"""Beams: those of transformers token for token, whatever else the engine does."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.model.generate import generate
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.spec.errors import ArgumentError, RunError
from tests.formats.hub.peers import PEERS
from tests.model.shrunk import KINDS, VOCAB, model

PROMPT = [3, 14, 15, 9, 2, 6, 5]
NEW = 9


def engine(name: str = "llama-3.1-8b", **options: Any) -> ServingEngine:
    sizes = {"exact": True, "block": 4, "most_tokens": 24, "most_sequences": 12, **options}
    return ServingEngine(model(name, louder=4.0).eval(), EngineOptions(**sizes), end_ids=[7, 8])


def searched(serving: ServingEngine, prompt: list[int] = PROMPT, **options: Any) -> list[tuple[Any, ...]]:
    asked = serving.add(prompt, RequestOptions(**{"max_new_tokens": NEW, "beams": 3, **options}))
    serving.run([asked])
    return outcomes(asked)


def outcomes(asked: ServedRequest) -> list[tuple[Any, ...]]:
    return [(answer.ids, answer.logprobs, answer.score, answer.ending) for answer in asked.answers]


def unharmed(serving: ServingEngine) -> None:
    assert serving.idle and serving.scheduler.idle and serving.tables.pool.free == serving.tables.pool.size


FAMILIES = [name for name in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "mixtral", "deepseek_v3") if name in PEERS]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 2}, {"num_beams": 4, "num_return_sequences": 3}, {"num_beams": 3, "length_penalty": 0.0},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"}, {"num_beams": 3, "early_stopping": True},
    {"num_beams": 4, "length_penalty": -1.0},
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES or list(PEERS)[:5])
@pytest.mark.filterwarnings("ignore")
def test_answers_and_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    from benchmarks.agreement import loaded
    from tests.formats.hub.peers import peer

    transformers.logging.set_verbosity_error()
    other = peer(name).eval()
    other.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    chance, ended = random.Random(0), 0
    for how in SETTINGS:
        prompt = [chance.randrange(3, 90) for _ in range(chance.randint(1, 12))]
        ends = sorted(chance.sample(range(3, 90), 30))
        right = other.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True, **how,
        )  # fmt: skip
        serving = ServingEngine(ours, EngineOptions(block=4, most_sequences=8, most_tokens=32), end_ids=ends)
        options = {key: how[key] for key in ("length_penalty", "early_stopping") if key in how}
        several = how.get("num_return_sequences", 1)
        answers = searched(serving, prompt, beams=how["num_beams"], n=several, **options)
        for (ids, _, score, ending), whole, points in zip(
            answers, right.sequences.tolist(), right.sequences_scores.tolist(), strict=True
        ):  # fmt: skip
            assert ids == whole[len(prompt) :][: len(ids)], how
            assert set(whole[len(prompt) + len(ids) :]) <= {0, ends[0]}, "what is behind it is filling"
            assert score == pytest.approx(points, rel=1e-6, abs=1e-5)
            ended += ending == "stop"
        unharmed(serving)
    assert ended > 0, "some end by a token, others by their length"


@pytest.mark.parametrize("name", KINDS)
def test_bits_do_not_depend_on_others_or_preemption(name: str) -> None:
    roomy = engine(name, most_sequences=16)
    prompts = [PROMPT, PROMPT[2:], [*PROMPT, 1, 2, 3, 4]]
    wanted = [RequestOptions(max_new_tokens=NEW, beams=beams, n=2) for beams in (3, 2, 4)]
    right = [
        searched(engine(name), prompt, beams=wish.beams, n=2) for prompt, wish in zip(prompts, wanted, strict=True)
    ]
    plain = roomy.add(PROMPT[:3], RequestOptions(max_new_tokens=20, ignore_end=True))
    asked = [roomy.add(prompt, wish) for prompt, wish in zip(prompts, wanted, strict=True)]
    roomy.run([plain, *asked])
    assert [outcomes(wish) for wish in asked] == right
    unharmed(roomy)


def test_beams_are_preempted_computed_again_and_never_stuck() -> None:
    roomy = engine()
    per_block = roomy.cache.number and 4 * 2 * 4 * roomy.model.shape.layers * roomy.model.shape.kv_heads
    bytes_each = per_block * roomy.model.shape.head_dim
    right = [searched(engine(), [*PROMPT, n], beams=4, ignore_end=True) for n in range(3)]
    tight = engine(cache_bytes=18 * bytes_each)
    assert tight.cache.number < 24
    asked = [
        tight.add([*PROMPT, n], RequestOptions(max_new_tokens=NEW, beams=4, ignore_end=True)) for n in range(3)
    ]  # fmt: skip
    other = tight.add(PROMPT, RequestOptions(max_new_tokens=20, priority=-1))
    steps = 0
    while not tight.idle:
        tight.step()
        steps += 1
        assert steps < 500
    assert [outcomes(request) for request in asked] == right and other.ended and tight.scheduler.preemptions > 0
    unharmed(tight)
    with pytest.raises(ArgumentError, match=r"beams=4 of .* need .* blocks"):
        engine(cache_bytes=12 * bytes_each).add(PROMPT, RequestOptions(max_new_tokens=20, beams=4))


def test_one_beam_is_greedy_and_as_many_as_tokens_find_the_best_pair() -> None:
    serving = engine(most_sequences=VOCAB, most_tokens=128)
    greedy = searched(serving, beams=1, ignore_end=True)[0]
    assert greedy[0] == generate(serving.model, PROMPT, max_new_tokens=NEW).ids
    (best,) = searched(serving, beams=VOCAB, max_new_tokens=2, ignore_end=True)
    with torch.no_grad():
        first = serving.model(torch.tensor([PROMPT])).log_softmax(-1)[0, -1]
        second = serving.model(torch.tensor([[*PROMPT, token] for token in range(VOCAB)])).log_softmax(-1)[:, -1]
    whole = first[:, None] + second
    assert best[0] == list(divmod(int(whole.argmax()), VOCAB)) and best[2] == pytest.approx(float(whole.max()) / 2)


def test_a_search_is_cancelled_and_broken_weights_are_said() -> None:
    serving = engine()
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=NEW, beams=4, n=2))
    for _ in range(3):
        serving.step()
    serving.cancel(asked)
    assert [answer.ending for answer in asked.answers] == ["cancelled"] * 2
    unharmed(serving)
    with torch.no_grad():
        serving.model.norm.weight.fill_(float("nan"))
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=NEW, beams=4))
    with pytest.raises(RunError, match="no numbers"):
        serving.run([asked])
    unharmed(serving)


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"n": 4}, {"stop": ("x",)}, {"logprobs": 2}, {"regex": "a"}, {"beams": 0},
                {"length_penalty": float("inf")}, {"early_stopping": "soon"}, {"logit_bias": {1: 2.0}}],
)  # fmt: skip
def test_what_makes_no_sense_with_beams_is_refused_by_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))}="):
        RequestOptions(**{"beams": 3, **options})
    with pytest.raises(ArgumentError, match=r"^beams=13 must lie between 1 and the 12"):
        engine().add(PROMPT, RequestOptions(beams=13))


def test_beams_beside_answers_that_guess() -> None:
    right = searched(engine(), n=2)
    serving = engine(speculation=Speculation(tokens=3))
    guessing = serving.add([4, 5, 6] * 3, RequestOptions(max_new_tokens=20, ignore_end=True))
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=NEW, beams=3, n=2))
    serving.run([guessing, asked])
    assert outcomes(asked) == right
    assert guessing.answers[0].ids == generate(serving.model, [4, 5, 6] * 3, max_new_tokens=20).ids
    unharmed(serving)
