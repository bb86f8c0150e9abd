"""Requests to the engine: what each option does to an answer, and that nothing is left behind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.serve_speed import differences, theirs
from meshwright.formats.hub import import_folder
from meshwright.model import Transformer
from meshwright.model.generate import generate
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from tests.formats.hub.peers import PEERS
from tests.model.shrunk import VOCAB, model

PROMPT = [3, 14, 15, 9, 2, 6, 5]
MODEL = model("llama-3.1-8b").eval()


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in ids)


def engine(network: Transformer = MODEL, end_ids: Sequence[int] = (), **options: Any) -> ServingEngine:
    return ServingEngine(network, EngineOptions(exact=True, **options), decode=spelled, end_ids=end_ids)


def answers(serving: ServingEngine, **options: Any) -> list[Any]:
    asked = serving.add(PROMPT, RequestOptions(**{"max_new_tokens": 8, **options}))
    serving.run([asked])
    assert serving.idle and serving.scheduler.idle and serving.tables.pool.free == serving.tables.pool.size
    return asked.answers


RIGHT = answers(engine())[0].ids


def test_an_answer_ends_by_its_length() -> None:
    (answer,) = answers(engine())
    assert answer.ending == "length" and answer.ids == generate(MODEL, PROMPT, max_new_tokens=8).ids
    assert answer.text == spelled(answer.ids) and len(answer.logprobs) == 8


def test_an_answer_ends_at_the_last_position() -> None:
    room = MODEL.shape.max_positions - len(PROMPT) + 1
    (answer,) = answers(engine(), max_new_tokens=10**6)
    assert answer.ending == "length" and len(answer.ids) == room
    assert len(answers(engine(longest=10), max_new_tokens=50)[0].ids) == 4


def test_an_answer_of_no_tokens() -> None:
    (answer,) = answers(engine(), max_new_tokens=0)
    assert (answer.ids, answer.text, answer.ending) == ([], "", "length")


def test_tokens_that_end_a_text() -> None:
    end = RIGHT[3]
    expected = RIGHT[: RIGHT.index(end) + 1]
    for answer in (*answers(engine(end_ids=[end])), *answers(engine(), stop_ids=(end,))):
        assert (answer.ids, answer.ending, answer.text) == (expected, "stop", spelled(expected[:-1]))
    assert answers(engine(end_ids=[end]), ignore_end=True)[0].ids == RIGHT


def test_stop_strings_end_a_text_before_them_across_tokens() -> None:
    text = spelled(RIGHT)
    for begin, end in ((2, 4), (0, 1), (5, 8)):
        stop = text[begin:end]
        (answer,) = answers(engine(), stop=("never", stop))
        position = text.index(stop)
        assert (answer.text, answer.ending) == (text[:position], "stop")
        assert answer.ids == RIGHT[: position + len(stop)]
    (answer,) = answers(engine(), stop=(text[6:8] + "!",))
    assert (answer.text, answer.ending) == (text, "length"), "what was held back comes at the end"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text = spelled(RIGHT)
    serving = engine()
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=8, stop=(text[2:5] + "!",)))
    seen = [answer.text for answer in serving.stream(asked)]
    assert seen[2:5] == [text[:2], text[:2], text[:2]] and seen[-1] == text


def test_several_answers_share_a_prompt_and_differ_by_seed() -> None:
    several = answers(engine(), n=4, temperature=1.0, seed=7)
    alone = [answers(engine(), temperature=1.0, seed=7 + number)[0] for number in range(4)]
    assert [answer.ids for answer in several] == [answer.ids for answer in alone]
    assert [answer.logprobs for answer in several] == [answer.logprobs for answer in alone]
    assert len({tuple(answer.ids) for answer in several}) > 1


def test_several_answers_without_room_for_all_at_once() -> None:
    tight = engine(block=4, cache_bytes=7 * 4 * 2 * 8 * MODEL.shape.layers * 4 * MODEL.shape.kv_heads, longest=16)
    assert tight.tables.pool.size < 4 * 4
    several = answers(tight, n=4, temperature=1.0, seed=7)
    roomy = answers(engine(block=4), n=4, temperature=1.0, seed=7)
    assert [answer.ids for answer in several] == [answer.ids for answer in roomy]


def test_options_change_an_answer() -> None:
    plain = answers(engine())[0]
    assert answers(engine(), logit_bias={RIGHT[0]: -100.0})[0].ids[0] != RIGHT[0]
    assert answers(engine(), repetition_penalty=50.0)[0].ids != RIGHT
    assert answers(engine(), logprobs=2)[0].top[0][0] == (RIGHT[0], plain.logprobs[0])
    assert answers(engine(), temperature=3.0)[0].ids != answers(engine(), temperature=3.0, seed=1)[0].ids


def test_a_stream_gives_an_answer_as_it_grows() -> None:
    serving = engine()
    other = serving.add(PROMPT[:3], RequestOptions(max_new_tokens=3))
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=8))
    assert [len(answer.ids) for answer in serving.stream(asked)] == list(range(1, 9))
    assert len(other.answers[0].ids) == 3, "others go on meanwhile"


def test_a_stream_that_is_left_gives_its_blocks_back() -> None:
    serving = engine()
    asked = serving.add(PROMPT, RequestOptions(max_new_tokens=8, n=2))
    stream = serving.stream(asked)
    next(stream)
    stream.close()
    assert serving.idle and serving.tables.pool.free == serving.tables.pool.size
    assert [answer.ending for answer in asked.answers] == ["cancelled", "cancelled"]


def test_a_request_is_cancelled_before_it_begins() -> None:
    serving = engine()
    asked = serving.add(PROMPT, RequestOptions(n=2))
    serving.cancel(asked)
    assert asked.ended and serving.idle and serving.scheduler.idle and not serving.step()


@pytest.mark.parametrize(
    ("requests", "asked"), [(1, {}), (1, {"n": 2}), (1, {"beams": 2}), (2, {})], ids=["request", "n", "beams", "prefix"]
)
def test_a_broken_model_is_an_error_and_spoils_nobody(requests: int, asked: dict[str, Any]) -> None:
    network = model("llama-3.1-8b").eval()
    with torch.no_grad():
        network.embed.weight[60] = float("nan")
    serving = engine(network, compiled=False, block=4, most_tokens=8, most_sequences=4)
    prompt = [60, *range(1, 12)]  # of which the first step computes two blocks, which a second request finds
    broken = [serving.add(prompt, RequestOptions(max_new_tokens=2, **asked)) for _ in range(requests)]
    for request in broken:
        with pytest.raises(RunError, match="no numbers"):
            serving.run([request])
    pool = serving.tables.pool
    assert not any(map(pool.key_of, range(pool.size))), "nobody finds what is no numbers"
    # the same blocks again, of which a part is read that is not written
    assert serving.idle and answers(serving)[0].ids == answers(engine(network))[0].ids


@pytest.mark.parametrize("exact", [True, False])
def test_a_broken_request_spoils_nobody_whose_blocks_lie_before_its_own(exact: bool) -> None:
    network = model("llama-3.1-8b").eval()
    with torch.no_grad():
        network.embed.weight[60] = float("nan")
    options = EngineOptions(
        exact=exact, compiled=False, copies_bytes=0, block=4, most_tokens=12, most_sequences=4, prompt_tokens=4
    )
    serving, wanted = ServingEngine(network, options), RequestOptions(max_new_tokens=12, salt=None)
    right = serving.add([2, 3] * 8, wanted)
    serving.run([right])
    beside = serving.add([2, 3] * 8, wanted)
    for _ in range(3):
        serving.step()
    broken = serving.add([60] * 40)  # read in chunks, and known to be broken at its end
    serving.run([beside])
    assert beside.answers[0].ids == right.answers[0].ids
    with pytest.raises(RunError, match="no numbers"):
        serving.run([broken])


def test_refusals() -> None:
    with pytest.raises(PlanError, match="the prompt is empty"):
        engine().add([])
    with pytest.raises(PlanError, match=f"vocabulary of {VOCAB}"):
        engine().add([VOCAB])
    with pytest.raises(ArgumentError, match="longest=5"):
        engine(longest=5).add(PROMPT)
    with pytest.raises(ArgumentError, match="logit_bias names token 999"):
        engine().add(PROMPT, RequestOptions(logit_bias={999: 1.0}))
    with pytest.raises(ArgumentError, match="give stop_ids"):
        ServingEngine(MODEL).add(PROMPT, RequestOptions(stop=("x",)))
    with pytest.raises(ArgumentError, match=r"the cache is too small: .* and it has 1"):
        engine(cache_bytes=1).add(PROMPT, RequestOptions(max_new_tokens=20))
    with pytest.raises(ArgumentError, match="n=65"):
        engine().add(PROMPT, RequestOptions(n=65))
    with pytest.raises(ArgumentError, match="block=0"):
        engine(block=0)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Different at a tie only."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    from benchmarks.agreement import loaded
    from tests.formats.hub.peers import peer

    transformers.logging.set_verbosity_error()
    other = peer(name).eval()
    other.generation_config.eos_token_id = None
    other.save_pretrained(tmp_path)
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (12,), generator=chance).tolist()
    load = [(torch.randint(import_folder(tmp_path).shape.vocab, (n,), generator=chance).tolist(), 12) for n in lengths]
    right = theirs(other, load, 1)
    for exact in (False, True):
        serving = ServingEngine(loaded(tmp_path), EngineOptions(exact=exact, most_tokens=48, most_sequences=8))
        asked = [serving.add(prompt, RequestOptions(max_new_tokens=count)) for prompt, count in load]
        serving.run(asked)
        wrong, _ = differences(other, load, right, [request.answers[0].ids for request in asked])
        assert not wrong
