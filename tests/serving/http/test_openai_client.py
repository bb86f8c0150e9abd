"""The official client of OpenAI's interface: each parameter changes what it should, as the engine itself does it."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from meshwright.data.chat.rendering import chat_prompt, template_of
from meshwright.model.generate import generate
from meshwright.serving.engine.engine_options import EngineOptions
from tests.serving.http.running import END, NAME, Running, answers, letters, running, small

PROMPT = "There was a king"
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say something."}]
KINDS = ("completion", "chat")
TOKENIZER = letters()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def ids_of(kind: str) -> list[int]:
    """Return the ids of the prompt that `ask` sends."""
    if kind == "completion":
        return TOKENIZER.begin(PROMPT)
    return chat_prompt(TOKENIZER, template_of(TOKENIZER), MESSAGES)


def ask(client: openai.OpenAI, kind: str, **options: Any) -> Any:
    """Send one request. Options that the client does not know go into extra_body."""
    options = {"model": NAME, "max_tokens": 8, "temperature": 0, **options}
    extra = {name: options.pop(name) for name in EXTRA & options.keys()}
    if kind == "completion" and "response_format" in options:
        extra["response_format"] = options.pop("response_format")
    if kind == "completion":
        return client.completions.create(**{"prompt": PROMPT, **options}, extra_body=extra)
    return client.chat.completions.create(**{"messages": MESSAGES, **options}, extra_body=extra)


EXTRA = {
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "cache_salt", "priority",
    "return_token_ids", "structured_outputs", "guided_json", "unheard_of", "min_tokens", "tools", "skip_special_tokens",
}  # fmt: skip


def texts(answer: Any) -> list[str]:
    return [choice.text if hasattr(choice, "text") else choice.message.content for choice in answer.choices]


def engine_answers(kind: str, **options: Any) -> list[Any]:
    """Return the answers of a separate engine."""
    return answers(ids_of(kind), **{"max_new_tokens": 8, **options})


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({"max_tokens": 3}, {"max_new_tokens": 3}),
    "temperature": ({"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 7}),
    "seed": ({"temperature": 1.5, "seed": 8}, {"temperature": 1.5, "seed": 8}),
    "top_p": ({"temperature": 1.5, "seed": 7, "top_p": 0.3}, {"temperature": 1.5, "seed": 7, "top_p": 0.3}),
    "top_k": ({"temperature": 1.5, "seed": 7, "top_k": 2}, {"temperature": 1.5, "seed": 7, "top_k": 2}),
    "min_p": ({"temperature": 1.5, "seed": 7, "min_p": 0.4}, {"temperature": 1.5, "seed": 7, "min_p": 0.4}),
    "n": ({"temperature": 1.5, "seed": 7, "n": 3}, {"temperature": 1.5, "seed": 7, "n": 3}),
    "presence_penalty": ({"presence_penalty": 2.0, "max_tokens": 40}, {"presence_penalty": 2.0, "max_new_tokens": 40}),
    "frequency_penalty": (
        {"frequency_penalty": 2.0, "max_tokens": 40}, {"frequency_penalty": 2.0, "max_new_tokens": 40}
    ),
    "repetition_penalty": ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
    "logit_bias": ({"logit_bias": {"7": 100}}, {"logit_bias": {7: 100.0}}),
    "end of text": ({"logit_bias": {str(END): 100}}, {"logit_bias": {END: 100.0}}),
    "ignore_eos": (
        {"logit_bias": {str(END): 100}, "ignore_eos": True, "skip_special_tokens": False},
        {"logit_bias": {END: 100.0}, "ignore_end": True},
    ),
}  # fmt: skip
"""Options of a request -> the same for the engine itself."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changes_the_answer_as_in_the_engine(client: openai.OpenAI, kind: str, name: str) -> None:
    asked, options = CHANGES[name]
    answer, right = ask(client, kind, **asked), engine_answers(kind, **options)
    assert texts(answer) == [item.text for item in right]
    assert [item.finish_reason for item in answer.choices] == [item.ending for item in right]
    assert answer.usage.completion_tokens == sum(len(item.ids) for item in right)
    plain = engine_answers(kind, max_new_tokens=40 if name.endswith("y_penalty") else 8)[0]
    assert [item.ids for item in right] != [plain.ids], "the parameter shows"
    if name in ("top_p", "top_k", "min_p", "seed"):
        assert right[0].ids != engine_answers(kind, temperature=1.5, seed=7)[0].ids


SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ),
    "structured": ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    "object": (
        {"response_format": {"type": "json_object"}, "logit_bias": {"93": 5}},
        {"json_schema": {}, "logit_bias": {93: 5.0}},
    ),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}-(ja|no)"}}, {"regex": "[0-9]{3}-(ja|no)"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_answers_of_a_form(client: openai.OpenAI, kind: str, stream: bool, name: str) -> None:
    asked, options = FORMS[name]
    answer = ask(client, kind, max_tokens=60, temperature=1.0, seed=1, stream=stream, **asked)
    right = engine_answers(kind, max_new_tokens=60, temperature=1.0, seed=1, **options)[0]
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    texts_of_choices = [
        choice.text if kind == "completion" else (choice.delta if stream else choice.message).content or ""
        for choice in choices
    ]
    assert "".join(texts_of_choices) == right.text and choices[-1].finish_reason == right.ending
    if name in ("schema", "structured"):
        person = json.loads(right.text)
        assert person.keys() == {"name", "age"} and person["name"] in ("ann", "bob") and person["age"] <= 99
    if name == "regex":
        assert re.fullmatch("[0-9]{3}-(ja|no)", right.text)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_model_itself(client: openai.OpenAI, kind: str) -> None:
    right = generate(small().model, ids_of(kind), max_new_tokens=8).ids
    answer = ask(client, kind)
    assert texts(answer) == [TOKENIZER.decode(right)]
    assert answer.object == ("text_completion" if kind == "completion" else "chat.completion")
    assert answer.model == NAME and answer.choices[0].index == 0
    assert answer.usage.prompt_tokens == len(ids_of(kind)) and answer.usage.total_tokens == len(ids_of(kind)) + 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [False, True])
def test_stop_strings(client: openai.OpenAI, kind: str, many: bool) -> None:
    text = engine_answers(kind)[0].text
    answer = ask(client, kind, stop=["\n\n\n", text[3:5]] if many else text[3:5])
    assert texts(answer) == [text[: text.index(text[3:5])]] and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tokens(client: openai.OpenAI, kind: str) -> None:
    right = engine_answers(kind)[0]
    answer = ask(client, kind, stop_token_ids=[right.ids[2]])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == right.ids.index(right.ids[2]) + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_gives_the_same_text(client: openai.OpenAI, kind: str, stops: bool, n: int) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "seed": 3, "n": n, "max_tokens": 12}
    whole = ask(client, kind, **options)
    if stops:
        options["stop"] = texts(whole)[0][4:6]
        whole = ask(client, kind, **options)
    made, reasons, chunks = [""] * n, [""] * n, list(ask(client, kind, stream=True, **options))
    for chunk in chunks:
        assert chunk.object == ("text_completion" if kind == "completion" else "chat.completion.chunk")
        assert chunk.usage is None
        for choice in chunk.choices:
            assert not reasons[choice.index], "the reason comes last"
            made[choice.index] += choice.text if kind == "completion" else choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or ""
    assert made == texts(whole) and reasons == [choice.finish_reason for choice in whole.choices]
    assert len({chunk.id for chunk in chunks}) == 1
    if kind == "chat":
        first = {choice.index: choice for chunk in reversed(chunks) for choice in chunk.choices}
        assert all(choice.delta.role == "assistant" and choice.delta.content == "" for choice in first.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_ends_with_usage_where_it_is_asked_for(client: openai.OpenAI, kind: str) -> None:
    chunks = list(ask(client, kind, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].usage.prompt_tokens == len(ids_of(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client: openai.OpenAI, kind: str, stream: bool) -> None:
    answer = ask(client, kind, return_token_ids=True, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    listed = [token for choice in choices for token in getattr(choice, "token_ids", ())]
    assert listed == engine_answers(kind)[0].ids and choices[-1].prompt_token_ids == ids_of(kind)


def near(right: Any) -> Any:
    """Log-probabilities of another pass: a cached prefix leaves it other rows, and sums another order."""
    return pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client: openai.OpenAI, top: int, stream: bool) -> None:
    answer, right = (
        ask(client, "completion", logprobs=top, stream=stream),
        engine_answers("completion", logprobs=top)[0],
    )
    parts = (
        [choice.logprobs for chunk in answer for choice in chunk.choices] if stream else [answer.choices[0].logprobs]
    )
    joined = {
        key: [choice for part in parts for choice in getattr(part, key)]
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    }
    spelled = [TOKENIZER.spell(token) for token in right.ids]
    assert joined["tokens"] == spelled and joined["token_logprobs"] == near(right.logprobs)
    assert joined["text_offset"] == [len("".join(spelled[:position])) for position in range(8)]
    wanted = [near({TOKENIZER.spell(token): value for token, value in row}) for row in right.top] if top else []
    assert joined["top_logprobs"] == wanted, "greedy tokens are the likeliest themselves"


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(client: openai.OpenAI, top: int | None, stream: bool) -> None:
    options = {} if top is None else {"top_logprobs": top}
    answer, right = (
        ask(client, "chat", logprobs=True, stream=stream, **options),
        engine_answers("chat", logprobs=top or 0)[0],
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    rows = [row for choice in choices if choice.logprobs for row in choice.logprobs.content]
    assert [row.token for row in rows] == [TOKENIZER.spell(token) for token in right.ids]
    assert [row.logprob for row in rows] == near(right.logprobs)
    assert [bytes(row.bytes).decode() for row in rows] == [row.token for row in rows]
    assert [{choice.token: choice.logprob for choice in row.top_logprobs} for row in rows] == [
        near({TOKENIZER.spell(token): value for token, value in likeliest}) for likeliest in right.top
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind_of_prompt", ["text", "ids"])
def test_echo(client: openai.OpenAI, stream: bool, kind_of_prompt: str) -> None:
    prompt = PROMPT if kind_of_prompt == "text" else TOKENIZER.begin(PROMPT)
    answer = ask(client, "completion", echo=True, prompt=prompt, n=2, temperature=1.0, seed=1, stream=stream)
    made = ["", ""]
    for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
        made[choice.index] += choice.text
    assert made == [PROMPT + choice.text for choice in engine_answers("completion", n=2, temperature=1.0, seed=1)]


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    """Evaluation harnesses ask for log-probabilities of the prompt and no new token."""
    choice = ask(client, "completion", echo=True, max_tokens=0, logprobs=1).choices[0]
    ids = TOKENIZER.begin(PROMPT)
    assert choice.text == PROMPT and choice.finish_reason == "length" and len(choice.logprobs.tokens) == len(ids)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    for position in range(1, len(ids)):
        right = answers(ids[:position], max_new_tokens=1, logit_bias={ids[position]: 100.0})[0]
        assert right.ids == [ids[position]]
        assert choice.logprobs.token_logprobs[position] == pytest.approx(right.logprobs[0], abs=1e-4)
    more = ask(client, "completion", echo=True, logprobs=1).choices[0].logprobs
    assert more.tokens == [
        *choice.logprobs.tokens,
        *(TOKENIZER.spell(token) for token in engine_answers("completion")[0].ids),
    ]
    assert more.text_offset == [len("".join(more.tokens[:position])) for position in range(len(more.tokens))]


def test_a_stream_repeats_the_prompt_with_its_scores(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"echo": True, "max_tokens": 4, "logprobs": 2}
    whole = ask(client, "completion", **asked).choices[0]
    parts = [choice for chunk in ask(client, "completion", **asked, stream=True) for choice in chunk.choices]
    assert "".join(part.text for part in parts) == whole.text
    for key in ("tokens", "text_offset", "token_logprobs"):
        joined = [choice for part in parts if part.logprobs for choice in getattr(part.logprobs, key)]
        right = getattr(whole.logprobs, key)
        assert joined == (near(right) if key == "token_logprobs" else right)


@pytest.mark.parametrize("prompt", [["a", "bb"], [[65, 66], [67]], [70, 71]], ids=["texts", "lists", "ids"])
def test_several_prompts(client: openai.OpenAI, prompt: Any) -> None:
    answer = ask(client, "completion", prompt=prompt, n=2, temperature=1.0, seed=5)
    each = [prompt] if isinstance(prompt[0], int) else prompt
    ids = [TOKENIZER.begin(item) if isinstance(item, str) else item for item in each]
    right = [item.text for prompt in ids for item in answers(prompt, max_new_tokens=8, n=2, temperature=1.0, seed=5)]
    assert texts(answer) == right and [item.index for item in answer.choices] == list(range(len(right)))
    assert answer.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_without_a_seed_differs_each_time(client: openai.OpenAI, kind: str) -> None:
    texts_seen = {texts(ask(client, kind, temperature=2.0, max_tokens=16))[0] for _ in range(3)}
    assert len(texts_seen) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_cached_tokens_and_their_salt(server: Running, client: openai.OpenAI, kind: str) -> None:
    """A prompt is found again under its own salt and key, and under no other."""

    def cached(asker: openai.OpenAI, **options: Any) -> int:
        long = {"prompt": "x" * 40} if kind == "completion" else {"messages": [{"role": "user", "content": "y" * 40}]}
        return int(ask(asker, kind, **long, **options).usage.prompt_tokens_details.cached_tokens)

    assert cached(client, cache_salt="one") == 0
    assert cached(client, cache_salt="one") >= 32
    assert cached(client, cache_salt="two") == 0 and cached(client) == 0
    assert cached(server.client("second-key-of-the-tests"), cache_salt="one") == 0


def test_a_priority_goes_first() -> None:
    """All are there before the first step ends; then they go by priority, and the last preempts the first."""
    options = EngineOptions(exact=True, cache_bytes=2**22, most_sequences=1, most_tokens=64)
    ended, go = list[int](), threading.Event()
    with running(engine=options) as server, ThreadPoolExecutor(4) as pool:
        engine_step, commands = server.engine.step, server.engine_thread._commands
        server.engine.step = lambda: (go.wait(300), engine_step())[1]  # type: ignore[method-assign]

        def ask_one(priority: int) -> None:
            ask(server.client(), "completion", priority=priority, max_tokens=60, ignore_eos=True)
            ended.append(priority)

        jobs = [pool.submit(ask_one, 5)]
        while not server.engine.scheduler.waiting:
            time.sleep(0.01)
        jobs += [pool.submit(ask_one, priority) for priority in (9, 8, 1)]
        while commands.qsize() < 3:
            time.sleep(0.01)
        go.set()
        for job in jobs:
            job.result()
    assert ended == [1, 5, 8, 9]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Earlier.", "refusal": None, "tool_calls": None, "audio": None,
         "annotations": []},
    ],
    ids=["developer", "parts", "assistant"],
)  # fmt: skip
def test_messages(client: openai.OpenAI, message: dict[str, Any]) -> None:
    rows = {"developer": ("system", "Be kind."), "user": ("user", "Hello"), "assistant": ("assistant", "Earlier.")}
    role, content = rows[message["role"]]
    ids = chat_prompt(TOKENIZER, template_of(TOKENIZER), [{"role": role, "content": content}, *MESSAGES[1:]])
    answer = ask(client, "chat", messages=[message, *MESSAGES[1:]])
    assert texts(answer) == [answers(ids, max_new_tokens=8)[0].text]


def test_a_chat_may_be_as_long_as_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=0,
        extra_body={"ignore_eos": True},  # type: ignore[arg-type]
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == small().model.shape.max_positions + 1
    short = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=5)  # type: ignore[arg-type]
    assert short.usage is not None and short.usage.completion_tokens <= 5


def test_models(client: openai.OpenAI) -> None:
    assert [entry.id for entry in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "meshwright"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unknown": ("both", {"unheard_of": 1}, "unheard_of", "unknown_parameter"),
    "tools of completions": ("completion", {"tools": [{"a": 1}]}, "tools", "unsupported_parameter"),
    "reasoning": ("chat", {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    "audio": ("chat", {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    "store": ("chat", {"store": True}, "store", "unsupported_parameter"),
    "min_tokens": ("both", {"min_tokens": 3}, "min_tokens", "unsupported_parameter"),
    "suffix": ("completion", {"suffix": "end"}, "suffix", "unsupported_parameter"),
    "best_of": ("completion", {"best_of": 1, "n": 2}, "best_of", "invalid_value"),
    "temperature": ("both", {"temperature": -1}, "temperature", "invalid_value"),
    "temperature as text": ("both", {"temperature": "0.5"}, "temperature", "invalid_value"),
    "top_p": ("both", {"top_p": 0}, "top_p", "invalid_value"),
    "top_k": ("both", {"top_k": -2}, "top_k", "invalid_value"),
    "min_p": ("both", {"min_p": 1.5}, "min_p", "invalid_value"),
    "n": ("both", {"n": 0}, "n", "invalid_value"),
    "too many": ("both", {"n": 17}, "n", "invalid_value"),
    "seed": ("both", {"seed": 2**63}, "seed", "invalid_value"),
    "penalty": ("both", {"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    "repetition": ("both", {"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "stop": ("both", {"stop": ["x"] * 17}, "stop", "invalid_value"),
    "empty stop": ("both", {"stop": [""]}, "stop", "invalid_value"),
    "bias by text": ("both", {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    "bias beyond": ("both", {"logit_bias": {"5": 1000}}, "logit_bias", "invalid_value"),
    "bias of no token": ("both", {"logit_bias": {"5000": 1}}, "", "invalid_value"),
    "max_tokens": ("both", {"max_tokens": -1}, "max_tokens", "invalid_value"),
    "context": ("both", {"max_tokens": 300}, "max_tokens", "context_length_exceeded"),
    "logprobs": ("completion", {"logprobs": 21}, "logprobs", "invalid_value"),
    "top_logprobs": ("chat", {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    "options of no stream": ("both", {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    "two lengths": ("chat", {"max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    "empty prompt": ("completion", {"prompt": []}, "prompt", "invalid_value"),
    "empty list": ("completion", {"prompt": [[]]}, "prompt", "invalid_value"),
    "long prompt": ("completion", {"prompt": "x" * 257}, "", "context_length_exceeded"),
    "no token": ("completion", {"prompt": [96]}, "", "invalid_value"),
    "no message": ("chat", {"messages": []}, "messages", "invalid_value"),
    "image": (
        "chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages", "invalid_value",
    ),
    "no schema": ("both", {"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    "form": ("both", {"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    "bad regex": ("both", {"structured_outputs": {"regex": "("}}, "", "invalid_value"),
    "two forms": ("both", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value"),
    "no end": ("both", {"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos", "invalid_value"),
    "tools of a model without": (
        "chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value",
    ),
    "choice without tools": ("chat", {"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "answer of no tool": ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages", "invalid_value"),
    "call of a user": (
        "chat",
        {"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
        "messages", "invalid_value",
    ),
    "no content": ("chat", {"messages": [{"role": "user", "content": None}]}, "messages", "invalid_value"),
    "role": ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages", "invalid_value"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for name, (kinds, *_) in REFUSED.items() for kind in KINDS if kinds in (kind, "both")],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.long
def test_what_makes_no_sense_is_refused_by_name(client: openai.OpenAI, kind: str, name: str, stream: bool) -> None:
    _, options, param, code = REFUSED[name]
    if stream and name == "options of no stream":
        return
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, kind, stream=stream, **options)
    error = refusal.value
    assert (error.code, error.type) == (code, "invalid_request_error")
    assert error.param == (param or None) and error.body["message"]  # type: ignore[index]


def test_values_that_ask_for_nothing_are_taken(client: openai.OpenAI) -> None:
    plain = texts(ask(client, "chat"))
    neutral = {"store": False, "service_tier": "auto", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert texts(ask(client, "chat", **neutral)) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_another_model(client: openai.OpenAI, kind: str) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(client, kind, model="gpt-4")
    assert refusal.value.code == "model_not_found" and refusal.value.param == "model"


def test_a_wrong_key(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(server.client("wrong"), "chat")


def test_the_asynchronous_client(server: Running) -> None:
    import asyncio

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.server.address}/v1", api_key="first-key-of-the-tests", max_retries=0
        ) as client:
            asked = [
                client.completions.create(model=NAME, prompt="p" * length, max_tokens=8, temperature=0)
                for length in range(1, 9)
            ]
            return [completion.choices[0].text for completion in await asyncio.gather(*asked)]

    right = [answers(TOKENIZER.begin("p" * length), max_new_tokens=8)[0].text for length in range(1, 9)]
    assert asyncio.run(main()) == right


def test_nothing_is_left_behind(server: Running) -> None:
    assert server.engine.idle and server.engine.tables.pool.free == server.engine.tables.pool.size
    assert server.open_requests == 0
