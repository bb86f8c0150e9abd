"""Calls of tools: what each family writes is read back, at once and letter by letter."""

import json
import random
from datetime import date
from itertools import pairwise
from typing import Any

import pytest
from pydantic_core import from_json

from meshwright.data.chat.template import DEFAULT, ChatTemplate
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.answers.tool_calls import (
    FAMILIES,
    ToolFamily,
    family_of,
    find_open_thought,
    force_call,
    read_answer,
)
from meshwright.spec.errors import ArgumentError, DataError
from tests.serving.engine.test_grammar import answers, engine

HERMES = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
For each function call, return <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>
{%- endif %}{% for message in messages %}{{ message.content }}{% endfor %}"""
LLAMA = """{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of
argument name and its value}.{% for t in tools %}{{ t | tojson }}{% endfor %}{%- endif %}"""
MISTRAL = "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[TOOL_CALLS] [{{ 1 }}]"
MISTRAL_NAMES = "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[TOOL_CALLS]{{ 1 }}[ARGS]{{ 2 }}"
DEEPSEEK = "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ 1 }}"  # noqa: RUF001
TEMPLATES = {
    "hermes": HERMES, "llama-json": LLAMA, "mistral": MISTRAL, "mistral-names": MISTRAL_NAMES, "deepseek": DEEPSEEK,
}  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"town": {"enum": ["Rom", "Ulm"]}, "at": {"$ref": "#/$defs/hour"}},
        "required": ["town", "at"], "additionalProperties": False,
        "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    }}},
    {"type": "function", "function": {"name": "time", "parameters": {
        "type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"],
        "additionalProperties": False, "$defs": {"zone": {"enum": ["UTC", "CET"]}},
    }}},
]  # fmt: skip


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, date(2026, 1, 1))


WRITTEN = {
    "hermes": '<tool_call>{"name": "f", "arguments": ARGUMENTS}</tool_call>',
    "llama-json": '{"name": "f", "parameters": ARGUMENTS}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": ARGUMENTS}]',
    "mistral-names": "[TOOL_CALLS]f[ARGS]ARGUMENTS",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS"  # noqa: RUF001
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
}
"""A call in the words of each family."""


@pytest.mark.parametrize("family", WRITTEN)
def test_arguments_are_json_that_can_be_sent(family: str) -> None:
    """By a strict reader, pydantic's; what Python alone takes for JSON is content. A server that sends half a surrogate
    pair fails."""
    for arguments in ('{"x": "\\ud83d\\ude00"}', '{"x": 1e5, "y": "\\u0000"}', '{"\u2028": "\U0001f600"}'):
        [call] = read_answer(BY_NAME[family], WRITTEN[family].replace("ARGUMENTS", arguments)).calls
        assert from_json(call.arguments.encode(), allow_inf_nan=False) == from_json(arguments)
    for refused in ("NaN", "-Infinity", "1e999", '"\\ud83d"', '{"\\udc00": 1}', "[[-1e999]]"):
        text = WRITTEN[family].replace("ARGUMENTS", f'{{"x": {refused}}}')
        reading = read_answer(BY_NAME[family], text)
        assert not reading.calls and reading.content.strip() == text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_its_family(name: str) -> None:
    assert family_of(template(TEMPLATES[name])).name == name


def test_a_template_without_tools_is_refused() -> None:
    for source in (DEFAULT, '{% for m in messages %}{{ m.tool_calls }}<tool_call>"arguments"{% endfor %}'):
        with pytest.raises(ArgumentError, match="has no place for tools: leave tools out"):
            family_of(template(source))
    with pytest.raises(ArgumentError, match=r"unknown way \(hermes, mistral-names, .*leave tools out"):
        family_of(template("{{ tools }}<function=name>"))
    with pytest.raises(DataError, match="no Jinja template"):
        family_of(template("{{ tools "))


def spelled(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model of a family writes."""
    under = "parameters" if family == "llama-json" else "arguments"
    objects = [json.dumps({"name": name, under: arguments}, ensure_ascii=False) for name, arguments in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{document}\n</tool_call>" for document in objects)
    if family == "llama-json":
        return "; ".join(objects)
    if family == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if family == "mistral-names":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"  # noqa: RUF001


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {}, {"a": 1}, {"text": 'quotes " and \\ and } ] </tool_call> ; [TOOL_CALLS] <｜tool▁call▁end｜>'},  # noqa: RUF001
    {"deep": {"list": [1, -2.5e3, {"x": None}], "true": True}}, {"é": "ü\n\t\u2028"},
)  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_family_writes_is_read_back(name: str) -> None:
    chance = random.Random(0)
    for _ in range(30):
        calls = [
            (chance.choice(["f", "get_weather", "a.b-c"]), chance.choice(ARGUMENTS))
            for _ in range(chance.randint(1, 3))
        ]
        before = "" if name == "llama-json" else chance.choice(["", "Let me see.\n", "a < b [TOOL "])
        reading = read_answer(BY_NAME[name], before + spelled(name, calls))
        assert [(call.name, json.loads(call.arguments)) for call in reading.calls] == calls
        assert reading.content == before.rstrip()


NO_CALLS = (
    "plain text",
    "  {not json",
    '{"name": "Bob", "age": 3}',
    "<tool_call>{oops}</tool_call> and on",
    "<tool",
    "[TOOL_CALLS]",
    "<|python_tag|> search",
    '[TOOL_CALLS] [{"name": 3}] x',
    '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '{"name": "f", "parameters": {}} hm',
)


def grown(family: ToolFamily, text: str) -> None:
    """What is certain only grows, and becomes what the whole text says."""
    content, calls = "", 0
    whole = read_answer(family, text)
    for size in range(len(text) + 1):
        part = read_answer(family, text[:size], ended=False)
        assert part.content.startswith(content) and len(part.calls) >= calls, text[:size]
        content, calls = part.content, len(part.calls)
        assert whole.content.startswith(content), (text[:size], content)
        assert whole.calls[:calls] == part.calls
    assert whole.content.rstrip().startswith(content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_letter_by_letter_nothing_is_taken_back(name: str) -> None:
    chance, family = random.Random(1), BY_NAME[name]
    for _ in range(12):
        calls = [("f", chance.choice(ARGUMENTS)) for _ in range(chance.randint(1, 2))]
        grown(
            family,
            chance.choice(["", "I think\n\n", "1 < 2, "]) + spelled(name, calls) + chance.choice(["", "\n", " then"]),
        )
    for text in NO_CALLS:
        grown(family, text)
        assert read_answer(family, text) == type(read_answer(family, ""))(text, ()), "no call: all of it is content"
    marks = [
        *family.openers,
        "{",
        "}",
        '"name"',
        ":",
        ",",
        "[",
        "]",
        "</tool_call>",
        "[ARGS]",
        "f",
        " ",
        "\n",
        "\\",
        '"',
    ]
    for _ in range(60):
        grown(family, "".join(chance.choice(marks) for _ in range(chance.randint(1, 14))))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<think>a <tool_call> or not?</think>" + CALL, "<think>a <tool_call> or not?</think>", ["f"]),
        ("<tool_call>{oops}</tool_call>\n" + CALL, "<tool_call>{oops}</tool_call>", ["f"]),
        (f"Before {CALL} after", "Before after", ["f"]),
        (f"Before\n\n{CALL}\n{CALL}\n", "Before", ["f", "f"]),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", ["f"]),
    ],
)
def test_a_call_is_found_whatever_is_said_before(text: str, content: str, calls: list[str]) -> None:
    """As in vllm#19513, vllm#39056 and vllm#28806: calls behind a thought that names the tag, and of tools without
    parameters, were lost."""
    family = BY_NAME["hermes"]
    reading = read_answer(family, text)
    assert (reading.content, [call.name for call in reading.calls]) == (content, calls)
    assert all(json.loads(call.arguments) == {} for call in reading.calls)
    grown(family, text)


def by_vllm(text: str, opened: bool) -> tuple[str, str]:
    """(thought, what follows), by the rule of vLLM's reasoning parsers (deepseek_r1, qwen3): up to the first end of a
    thought all is thought where the prompt or the answer opens one, and all of it where the end is missing."""
    if not opened and not text.startswith("<think>"):
        return "", text
    thought, end, answer = text.partition("</think>")
    return thought + end, answer


@pytest.mark.parametrize("opened", ["", "<think>"])
@pytest.mark.parametrize(
    "text",
    [
        f"<think>I could say {CALL}</think>Sunny.",
        f"<think>I could say {CALL}</think>{CALL}",
        f"<think>I could say {CALL}",
        f"I could say {CALL}</think>\n\n{CALL}",
        f"I could say {CALL}</think>Sunny.",
        f"I could say {CALL}",
        f"<think></think>{CALL}{CALL}",
    ],
)
def test_a_call_inside_of_a_thought_is_no_call(text: str, opened: str) -> None:
    thought, answer = by_vllm(text, bool(opened))
    family = BY_NAME["hermes"]
    whole = read_answer(family, text, opened=opened)
    assert len(whole.calls) == answer.count(CALL)
    assert whole.content == thought + read_answer(family, answer).content
    seen = [read_answer(family, text[:size], ended=False, opened=opened) for size in range(len(text) + 1)]
    for before, after in pairwise([*seen, whole]):
        assert after.content.startswith(before.content) and after.calls[: len(before.calls)] == before.calls


def test_a_prompt_says_whether_it_opens_a_thought() -> None:
    """Ends of prompts: DeepSeek-R1, Qwen3 with thinking switched off, Magistral, and a model without thoughts."""
    assert find_open_thought("<|Assistant|><think>\n") == "<think>" and find_open_thought("[/INST][THINK]") == "[THINK]"
    assert (
        find_open_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        == find_open_thought("What is <think>?")
        == ""
    )


def test_json_without_arguments_is_no_bare_call() -> None:
    text = '{"name": "f"}'
    assert read_answer(BY_NAME["llama-json"], text).content == text


def test_a_call_is_held_back_until_it_is_whole() -> None:
    family = BY_NAME["hermes"]
    text = 'See: <tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    seen = [read_answer(family, text[:size], ended=False) for size in range(len(text) + 1)]
    assert {reading.content for reading in seen} == {"", "S", "Se", "See", "See:"}
    assert [len(reading.calls) for reading in seen] == [0] * len(text) + [1]
    cut = text[:-30]
    assert read_answer(family, cut).content == cut and not read_answer(family, cut).calls
    assert read_answer(family, text.removesuffix("</tool_call>")).calls, "the end of a text closes the tag"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", [None, "weather", "time"])
def test_an_answer_that_must_call_does(name: str, choice: str | None) -> None:
    family = BY_NAME[name]
    forced = force_call(family, TOOLS, choice)
    for seed in range(2):
        (answer,) = answers(engine(), json_schema=forced.json_schema, seed=seed, max_new_tokens=200)
        call = forced.read(answer.text)
        assert answer.ending == "stop" and call is not None and call.name in ("weather", "time")
        assert choice in (None, call.name)
        sent_arguments = json.loads(call.arguments)
        assert set(sent_arguments) == ({"town", "at"} if call.name == "weather" else {"zone"})
    assert forced.read('{"name": "we') is None
    if forced.prefix and not forced.name:
        assert forced.prefix.startswith(family.openers)


def test_tools_that_are_none_are_refused() -> None:
    family = BY_NAME["hermes"]
    unspeakable = {"type": "function", "function": {"name": "a b"}}
    unbound = {"type": "function", "function": {"name": "a", "parameters": 3}}
    for tools, word in (
        ([], "0 entries"),
        ([{"type": "other"}], r"tools\[0\]"),
        ([unspeakable], "'a b'"),
        ([TOOLS[0], TOOLS[0]], "twice"),
        ([unbound], "no JSON schema"),
    ):
        with pytest.raises(ArgumentError, match=word):
            force_call(family, tools)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tool_choice names 'x', and the tools are weather, time"):
        force_call(family, TOOLS, "x")
    assert RequestOptions(json_schema=force_call(family, [{"type": "function", "function": {"name": "a"}}]).json_schema)
