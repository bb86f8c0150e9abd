"""Tools through the official client: what is offered, what must be called, and what earlier answers called."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from meshwright.data.chat.rendering import chat_prompt, template_of
from meshwright.serving.http.server_options import ServerLimits
from tests.serving.engine.test_tool_calls import TOOLS
from tests.serving.http.running import NAME, letters, running, small

TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}
{#- <tool_call>{"name": ..., "arguments": ...}</tool_call> #}{%- endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.zone }}{% endfor %}
{%- endfor %}"""
TOKENIZER = letters().with_template(TEMPLATE)
MESSAGES: list[Any] = [{"role": "user", "content": "When?"}]
CALL = r'<tool_call>\{"name": "time", "arguments": \{"zone": "(UTC|CET)"\}\}</tool_call>'


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running(hosted=replace(small(), tokenizer=TOKENIZER), limits=ServerLimits(drain_seconds=0.1)) as served:
        yield served.client()


def asked(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"structured_outputs": {"regex": options.pop("regex")}} if "regex" in options else {}
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 150, "tools": TOOLS, "seed": 1, **options}
    return client.chat.completions.create(**fields, extra_body=extra)


def joined(chunks: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and the reason of a stream."""
    content, calls, reason = "", dict[int, dict[str, Any]](), ""
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index not in calls and call.id and call.type == "function"
            calls[call.index] = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        reason = choice.finish_reason or reason
    return content, [calls[index] for index in sorted(calls)], reason


def whole(answer: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Return the same of a complete answer."""
    message = answer.choices[0].message
    calls = message.tool_calls or ()
    assert message.content or calls
    listed = [{"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in calls]
    assert len({call.id for call in calls}) == len(calls)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls), "as Mistral's templates want them"
    return message.content or "", listed, answer.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_calls(client: openai.OpenAI, stream: bool) -> None:
    """A regular expression makes the model call once, twice, or after words."""
    for regex, number in ((CALL, 1), (CALL + CALL, 2), ("(yes|no) " + CALL, 1)):
        answer = asked(client, regex=regex, stream=stream)
        content, calls, reason = joined(answer) if stream else whole(answer)
        assert reason == "tool_calls" and len(calls) == number
        assert all(call["name"] == "time" and call["arguments"]["zone"] in ("UTC", "CET") for call in calls)
        assert content in (("yes", "no") if "yes" in regex else ("",))


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_says_something(client: openai.OpenAI, stream: bool) -> None:
    answer = asked(client, regex="<tool is no call", stream=stream)
    assert (joined(answer) if stream else whole(answer)) == ("<tool is no call", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "weather", "time"])
def test_a_call_that_must_be(client: openai.OpenAI, choice: str, stream: bool) -> None:
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    answer = asked(client, tool_choice=named, stream=stream)
    content, calls, reason = joined(answer) if stream else whole(answer)
    assert (content, len(calls), reason) == ("", 1, "tool_calls")
    assert calls[0]["name"] in (("weather", "time") if choice == "required" else (choice,))
    assert set(calls[0]["arguments"]) == ({"town", "at"} if calls[0]["name"] == "weather" else {"zone"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_content(client: openai.OpenAI, stream: bool) -> None:
    answer = asked(client, tool_choice="required", max_tokens=5, stream=stream)
    content, calls, reason = joined(answer) if stream else whole(answer)
    assert content.startswith("{") and not calls and reason == "length"


def test_what_the_template_reads(client: openai.OpenAI) -> None:
    """Tools unless none may be called; earlier calls as objects, and their answers."""
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    rows = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
    ]
    sent = json.loads(json.dumps(rows))
    sent[1] |= {"content": None}
    sent[1]["tool_calls"][0]["function"]["arguments"] = '{"zone": "UTC"}'
    sent[1]["tool_calls"][0]["index"] = 0  # put together from the pieces of a stream
    for arguments in ("", " "):  # some clients send that of a call without any
        empty = json.loads(json.dumps(sent))
        empty[1]["tool_calls"][0]["function"]["arguments"] = arguments
        call["function"] = {"name": "time", "arguments": {}}
        ids = chat_prompt(TOKENIZER, template_of(TOKENIZER), rows, TOOLS)
        assert asked(client, messages=empty, max_tokens=1).usage.prompt_tokens == len(ids)
    call["function"] = {"name": "time", "arguments": {"zone": "UTC"}}
    for tools, choice in ((TOOLS, "auto"), (None, "none")):
        ids = chat_prompt(TOKENIZER, template_of(TOKENIZER), rows, tools)
        assert ("weather time" in TOKENIZER.decode(ids)) == (tools is not None)
        assert "time:UTC[tool]noon" in TOKENIZER.decode(ids)
        answer = asked(client, messages=sent, max_tokens=1, tool_choice=choice)
        assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_refusals(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        asked(client, **options)
    assert refusal.value.param == param
