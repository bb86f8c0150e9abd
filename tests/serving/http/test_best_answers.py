"""Beams, the best of several answers, texts to choose from, and what chat templates are told, by OpenAI's client."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from meshwright.data.chat.rendering import chat_prompt, template_of
from meshwright.data.tokens.tokenizer import Tokenizer
from tests.serving.http.running import NAME, Running, answers, letters, running, small

PROMPT = "There was a king"
ASKED: dict[str, Any] = {"model": NAME, "max_tokens": 8}
SWITCHED = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if loud is defined and loud %}!!{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(hosted=replace(small(), tokenizer=switched())) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def switched() -> Tokenizer:
    return letters().with_template(SWITCHED)


def engine_answers(**options: Any) -> list[Any]:
    return answers(letters().begin(PROMPT), **{"max_new_tokens": 8, **options})


BEAMS: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ({"n": 3}, {}, {"beams": 3, "n": 3}),
    ({"n": 2, "best_of": 4}, {"length_penalty": 0.0}, {"beams": 4, "n": 2, "length_penalty": 0.0}),
    ({"best_of": 2, "temperature": 0}, {"early_stopping": True}, {"beams": 2, "early_stopping": True}),
    ({"n": 2, "logprobs": 0}, {"early_stopping": "never"}, {"beams": 2, "n": 2, "early_stopping": "never"}),
    ({}, {}, {}),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", range(len(BEAMS)))
def test_beams_are_the_engines(client: openai.OpenAI, stream: bool, case: int) -> None:
    fields, more, options = BEAMS[case]
    completion = client.completions.create(
        prompt=PROMPT, stream=stream, **ASKED, **fields, extra_body={"use_beam_search": True, **more}
    )
    choices = [choice for event in completion for choice in event.choices] if stream else completion.choices
    right = engine_answers(**options)
    made = [""] * len(right)
    for choice in choices:
        made[choice.index] += choice.text
    assert made == [choice.text for choice in right]
    if not stream:
        assert [choice.finish_reason for choice in choices] == [choice.ending for choice in right]
    if "logprobs" in fields and not stream:
        assert choices[0].logprobs.token_logprobs == pytest.approx(right[0].logprobs, abs=1e-5)


def test_beams_leave_no_block_behind(server: Running, client: openai.OpenAI) -> None:
    client.completions.create(prompt=PROMPT, n=4, **ASKED, extra_body={"use_beam_search": True})
    pool = server.engine.tables.pool
    assert server.engine.idle and pool.free == pool.size


def test_the_best_of_several_are_the_likeliest(client: openai.OpenAI) -> None:
    """Answers rank by the mean of their tokens' log-probabilities. Usage counts all that were generated."""
    completion = client.completions.create(
        prompt=[PROMPT, "a"], n=2, best_of=5, temperature=1.5, seed=4, logprobs=0, echo=True, **ASKED
    )
    for begin, prompt in ((0, PROMPT), (2, "a")):
        every = answers(letters().begin(prompt), max_new_tokens=8, n=5, temperature=1.5, seed=4)
        right = sorted(every, key=lambda choice: -sum(choice.logprobs) / len(choice.logprobs))[:2]
        assert [choice.text for choice in completion.choices[begin : begin + 2]] == [
            prompt + choice.text for choice in right
        ]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3] and completion.usage is not None
    assert completion.usage.completion_tokens > 4 * 8 / 2


def test_one_of_several_texts(client: openai.OpenAI) -> None:
    texts = ["yes", "no (never)", "a+b\\c|d"]
    for seed in range(4):
        completion = client.completions.create(
            prompt=PROMPT, temperature=1.0, seed=seed, model=NAME, max_tokens=20,
            extra_body={"structured_outputs": {"choice": texts}},
        )  # fmt: skip
        assert completion.choices[0].text in texts and completion.choices[0].finish_reason == "stop"


def test_a_template_is_told_what_a_request_says(server: Running, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for settings, text in (({}, "Hello>"), ({"loud": True}, "Hello!!>"), ({"loud": False, "bos_token": 5}, "Hello>")):
        body = {"messages": messages, "chat_template_kwargs": settings}
        status, _, document = server.ask("/tokenize", body)
        assert status == 200 and document["tokens"] == letters().encode(text).tolist()
        assert document["tokens"] == chat_prompt(switched(), template_of(switched()), messages, settings=settings)
        answer = client.chat.completions.create(
            messages=messages,
            **ASKED,
            extra_body={"chat_template_kwargs": settings},  # type: ignore[arg-type]
        )
        assert answer.usage is not None and answer.usage.prompt_tokens == len(text)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature"),
    ({"use_beam_search": True, "n": 2, "top_k": 3}, "top_k"),
    ({"use_beam_search": True, "n": 2, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "n": 17}, "n"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_contradicts_itself_is_refused_by_name(server: Running, case: int) -> None:
    fields, name = REFUSED[case]
    status, _, document = server.ask("/v1/completions", {"prompt": "a", **fields})
    assert status == 400 and name in document["error"]["message"]


def test_a_template_is_not_told_what_other_fields_say(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _, document = server.ask(path, body)
        assert status == 400 and document["error"]["param"] == "chat_template_kwargs"
