"""Samples: a form by its columns, and one sentence for every row that has none."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.chat.samples import (
    Continuation,
    Conversation,
    Preference,
    Sample,
    TokenIds,
    find_unread_columns,
    sample,
)
from meshwright.data.text import rows
from meshwright.spec.errors import DataError

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "b"}


def made(fields: Any) -> Sample:
    return sample(("chat.jsonl:7", fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "t", "id": 4}, Continuation(prompt="", completion="t")),
        ({"prompt": "p", "completion": "c"}, Continuation(prompt="p", completion="c")),
        ({"messages": [USER, ANSWER]}, Conversation(messages=(USER, ANSWER))),
        ({"prompt": [USER], "completion": [ANSWER]}, Conversation(messages=(USER, ANSWER), prompt=1)),
        ({"messages": [USER], "tools": None}, Conversation(messages=(USER,))),
        ({"messages": [USER], "tools": '[{"name": "f"}]'}, Conversation(messages=(USER,), tools=({"name": "f"},))),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, TokenIds(ids=(1, 2), labels=(-100, 2))),
        ({"input_ids": [1, 2]}, TokenIds(ids=(1, 2), labels=None)),
        (
            {"instruction": "do", "input": "it", "output": "done", "system": "S"},
            Conversation(
                messages=(
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "do\n\nit"},
                    {"role": "assistant", "content": "done"},
                ),
                prompt=2,
            ),
        ),
        (
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}], "system": ""},
            Conversation(messages=(USER, ANSWER)),
        ),
        ({"conversations": [USER, ANSWER]}, Conversation(messages=(USER, ANSWER))),
        (
            {"prompt": "p", "chosen": " good", "rejected": " bad"},
            Preference(
                chosen=Continuation(prompt="p", completion=" good"),
                rejected=Continuation(prompt="p", completion=" bad"),
            ),
        ),
        (
            {"chosen": "say good", "rejected": "say bad"},
            Preference(
                chosen=Continuation(prompt="say", completion=" good"),
                rejected=Continuation(prompt="say", completion=" bad"),
            ),
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]},
            Preference(
                chosen=Conversation(messages=(USER, ANSWER), prompt=1),
                rejected=Conversation(messages=(USER, {**ANSWER, "content": "b"}), prompt=1),
            ),
        ),
        *(
            (
                {"prompt": prompt, "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
                Preference(
                    chosen=Conversation(messages=(USER, ANSWER), prompt=1),
                    rejected=Conversation(messages=(USER, WORSE), prompt=1),
                ),
            )
            for prompt in ("u", [USER])  # a prompt that is given twice, as in UltraFeedback
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
            Preference(
                chosen=Conversation(messages=(USER, ANSWER), prompt=1),
                rejected=Conversation(messages=(USER, ANSWER), prompt=1),
            ),
        ),
        (
            {"messages": [{**USER, "name": None, "content": [{"type": "text", "text": "u"}]}, ANSWER]},
            Conversation(messages=(USER, ANSWER)),
        ),
    ],
)
def test_columns_say_what_a_row_is(fields: Any, expected: Sample) -> None:
    assert made(fields) == expected


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("name", ["messages", "conversations", "prompt"])
def test_a_table_pads_tools_and_calls_with_nulls(name: str) -> None:
    """Nulls as pyarrow and the datasets library write them. The schema of `unit` takes null, so it stays."""
    pyarrow = pytest.importorskip("pyarrow")
    weather = tool("weather", city={"type": "string"}, unit={"anyOf": [{"type": "string"}, {"type": "null"}]})
    time = tool("time", zone={"type": "string", "enum": ["UTC", "CET"]}, near={"type": "string"})
    tools, rows = [weather, time], []
    for called in (
        {"name": "weather", "arguments": {"city": "Oslo", "unit": None}},
        {"name": "time", "arguments": {"zone": "UTC"}},
        {"name": "time", "arguments": {"near": "Oslo", "zone": "CET"}},
    ):
        answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "abc", "function": called}]}
        turns = {"prompt": [USER], "completion": [answer]} if name == "prompt" else {name: [USER, answer]}
        rows.append({**turns, "tools": tools})
    padded = pyarrow.Table.from_pylist(rows).to_pylist()
    assert "'near': None" in str(padded) and "None" not in str(rows).replace("'unit': None", "")
    for row, plain in zip(padded, rows, strict=True):
        unpadded, wanted = made(row), made(plain)
        assert isinstance(unpadded, Conversation) and isinstance(wanted, Conversation)
        assert unpadded.tools == wanted.tools == tuple(tools)
        assert unpadded.messages == wanted.messages
    assert "'unit': None" in str(made(padded[0])), "a null that the tool takes"


OSLO = {"name": "weather", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize("calls", [[OSLO], [OSLO, {"name": "time", "arguments": {}}]], ids=["one", "two"])
def test_calls_under_older_names_are_tool_calls(calls: list[dict[str, Any]]) -> None:
    """A template writes calls in its model's own words. After bare JSON, a model calls nothing that servers find."""
    wanted = [{"type": "function", "function": call} for call in calls]
    called, told = {"role": "assistant", "content": "", "tool_calls": wanted}, {"role": "tool", "content": "sun"}
    turns, text = [USER, called, told, ANSWER], json.dumps(calls if len(calls) > 1 else calls[0])
    texts = {"human": "u", "function_call": text, "observation": "sun", "gpt": "a"}
    sharegpt = [{"from": role, "value": value} for role, value in texts.items()]
    assert made({"conversations": sharegpt}) == made({"messages": turns})
    thoughts = [
        {**turn, "value": f"<think>\nRain?\n</think>\n{text}"} if turn["value"] == text else turn for turn in sharegpt
    ]
    thought = {**called, "content": "<think>\nRain?\n</think>"}
    assert made({"conversations": thoughts}) == made({"messages": [USER, thought, told, ANSWER]})
    if len(calls) == 1:
        older = [{"role": "assistant", "content": None, "function_call": OSLO}, {**told, "role": "function"}]
        assert made({"messages": [USER, *older, ANSWER]}) == made({"messages": turns})


@pytest.mark.parametrize("text", ["weather(Oslo)", '{"name": "weather"}', "[]", "5", None, '[{"name": "weather"'])
def test_a_function_call_that_is_none_is_refused(text: Any) -> None:
    turns = [{"from": "human", "value": "u"}, {"from": "function_call", "value": text}]
    with pytest.raises(DataError, match=r"turn 2 of 'conversations' is a 'function_call', but its value is not JSON"):
        made({"conversations": turns})


COLUMNS = "chosen + rejected; messages; conversations; completion + prompt; instruction + output; input_ids; text"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"question": "q", "answer": "a"}, f"the columns (question, answer) are none of: {COLUMNS}"),
        ({"messages": None}, f"the columns (messages (null)) are none of: {COLUMNS}"),
        ({}, f"the columns (no fields) are none of: {COLUMNS}"),
        ({"messages": []}, "the conversation has no message"),
        ({"messages": 5}, "'messages' is int, not text and not a list of messages"),
        ({"messages": ["hi"]}, "message 1 of 'messages' is str, not an object"),
        ({"messages": [USER, {"content": "a"}]}, "message 2 of 'messages' has no role, it has: content"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 of 'messages' (assistant) has neither content nor "
                                                      "tool_calls"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1 of 'messages': the content is int, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "message 1 of 'messages' has a part of type image: only text can be trained"),
        ({"messages": [USER], "tools": "[{"}, "'tools' is broken JSON, Expecting property name enclosed in double "
                                              "quotes: line 1 column 3 (char 2)"),
        ({"messages": [USER], "tools": ["f"]}, "'tools' is not a list of objects"),
        ({"conversations": "hi"}, "'conversations' is not a list of turns"),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "bot9", "value": "a"}]},
         "turn 2 of 'conversations' is from 'bot9': known are human, gpt, bing, chatgpt, bard, function_call, "
         "observation, function_response, system, user, assistant, tool"),
        ({"prompt": "p", "completion": ""}, "'completion' is empty, so nothing can be trained: remove the row"),
        ({"prompt": [USER], "completion": []}, "'completion' has no message, so nothing can be trained: remove "
                                               "the row"),
        ({"prompt": "p", "completion": [ANSWER]}, "'prompt' and 'completion' must both be strings or both be lists of "
                                                  "messages"),
        ({"chosen": "a", "rejected": [ANSWER]}, "'chosen' and 'rejected' must both be strings or both be lists of "
                                                "messages"),
        ({"prompt": "v", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
         "'prompt' and 'chosen' must both be strings or both be lists of messages"),
        ({"chosen": "a", "rejected": "b"}, "'chosen' and 'rejected' have different prompts: give the prompt as a "
                                           "column 'prompt'"),
        ({"input_ids": [1, 2], "labels": [1]}, "there are 2 input_ids and 1 labels: give one label for each token"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "label 0 is 2, and its token is 1: give the token itself, or "
                                                     "-100. Labels are not shifted"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": [1.0]}, "'input_ids' is not a list of integers"),
        ({"instruction": "i", "output": 5}, "'output' is int, not text"),
        ({"text": 5}, "'text' is int, not text"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_sample_is_named(fields: Any, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        made(fields)
    assert str(error.value) == f"chat.jsonl, line 7: {sentence}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "from", "value", "tool_calls", "text", "type", "function", "name"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
COLUMN = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "chosen", "rejected", "input_ids", "labels", "text", "tools",
     "instruction", "input", "output", "system"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(COLUMN, JSON, max_size=4))
def test_any_json_is_a_sample_or_a_sentence_with_its_place(fields: Any) -> None:
    try:
        made(fields)
    except DataError as error:
        assert str(error).startswith("chat.jsonl, line 7: ")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "line 2, column 13: broken JSON, Expecting ',' delimiter"),
        ('{"text": \'a\'}', "line 2, column 10: broken JSON, Expecting value"),
        ('  {"text": "a"} x', "line 2, column 17: broken JSON, Extra data"),
        ('{"text": "na\u00efve \U0001f600"; }', "line 2, column 19: broken JSON, Expecting ',' delimiter"),
        ("[1]", "line 2: a row is an object with fields, not list"),
    ],
)  # fmt: skip
def test_broken_json_is_named_by_line_and_column(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\r\n", encoding="utf-8")
    (_, good), (_, broken) = rows.jsonl(path)
    assert good == {"text": "fine"} and broken == rows.Malformed(f"{path}, {sentence}")


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"messages": [], "tools": [], "id": 1, "source": None}, {"id"}),
        ({"messages": [], "mesages": []}, {"mesages"}),
        ({"prompt": "a", "completion": "b", "text": "c"}, {"text"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, set()),
        ({"instruction": "a", "input": "b", "output": "c", "system": "d"}, set()),
        ({"input_ids": [1], "labels": [1], "attention_mask": [1]}, {"attention_mask"}),
        ({"text": "a", "meta": {}}, {"meta"}),
        ({"question": "a"}, set()),
    ],
)
def test_columns_that_no_sample_is_made_of(fields: Any, others: set[str]) -> None:
    assert find_unread_columns(fields) == others
