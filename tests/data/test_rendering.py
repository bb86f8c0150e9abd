"""Rendering: what is trained is what transformers marks in the same template, with `{% generation %}` or without."""

import datetime
import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from meshwright.data.chat import rendering
from meshwright.data.chat.rendering import Marked, Policy
from meshwright.data.chat.samples import Conversation, sample
from meshwright.data.chat.template import DEFAULT, ChatTemplate
from meshwright.serving.http.request.request_fields import ChatMessage, check_fields
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import (
    CHATML,
    DEEPSEEK,
    LLAMA3,
    MISTRAL,
    QWEN3,
    SPELLED,
    TEMPLATES,
    TOOLS,
    conversations,
    unmarked,
)
from tests.data.test_chat_template import theirs

DAY = datetime.date(2026, 11, 23)
AUTO = Policy()


def rendered(source: str, fields: Any, policy: Policy = AUTO) -> list[Marked]:
    fields = {"messages": fields} if isinstance(fields, list) else fields
    parsed = sample(("chat.jsonl:1", fields))
    assert isinstance(parsed, Conversation)
    return rendering.render_conversation(parsed, ChatTemplate(source, SPELLED, DAY), policy)


def trained(source: str, fields: Any, policy: Policy = AUTO) -> list[str]:
    """The trained texts, of all samples."""
    return [marked.text[begin:end] for marked in rendered(source, fields, policy) for begin, end in marked.trained]


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "plain"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_trained_is_what_transformers_marks(name: str, marks: bool, data: st.DataObject) -> None:
    """A template without marks trains what the same template with marks would mark."""
    messages = data.draw(conversations(system=name != "gemma"))
    source = TEMPLATES[name]
    text, spans = theirs(source, messages)
    (marked,) = rendered(source if marks else unmarked(source), messages)
    assert marked.text == text
    assert list(marked.trained) == spans


SHORT_ANSWER_IN_LONG_TEXT = [
    {"role": role, "content": content}
    for role, content in zip(
        ("system", *("user", "assistant") * 3), ("two  two", "", "", "", "two", "", ""), strict=True
    )
]
"""The text of the second answer stands in that of the system, and the thoughts of the first in the last."""


@settings(max_examples=60, deadline=None)
@example(messages=SHORT_ANSWER_IN_LONG_TEXT, thoughts=["", "", ""])
@given(messages=conversations(answered=True), thoughts=st.lists(st.sampled_from(["", "a", "b\n\nc"]), min_size=3))
def test_a_template_that_drops_thoughts_gives_a_sample_for_each_answer(messages: Any, thoughts: list[str]) -> None:
    """Each as the model sees it: thoughts of its own, none of earlier answers."""
    messages = [dict(message) for message in messages]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number, thought in zip(answers, thoughts, strict=False):
        messages[number]["content"] = f"<think>\n{thought}\n</think>\n\n{messages[number]['content']}"
    texts = [theirs(QWEN3, messages[: number + 1]) for number in answers]
    for source in (QWEN3, unmarked(QWEN3)):
        samples = rendered(source, messages)
        assert [marked.text for marked in samples] == [text for text, _ in texts]
        assert [list(marked.trained) for marked in samples] == [spans[-1:] for _, spans in texts]


NO_THOUGHTS = "the chat template drops the thoughts of message 2: 'sum of both' is missing in the rendered text. Take "


@pytest.mark.parametrize("source", [LLAMA3, DEEPSEEK, DEFAULT], ids=["beside", "within", "default"])
def test_an_answer_is_not_trained_without_its_thoughts_unless_asked_for(source: str) -> None:
    """A model that thinks would learn not to, and nothing would say so."""
    beside, within = turns("2+2", "4"), turns("2+2", "<think>\nsum of both\n</think>\n\n4")
    beside[1]["reasoning_content"] = "sum of both"
    for template in (source, unmarked(source)):
        for messages in (beside, within) if source == DEEPSEEK else (beside,):
            with pytest.raises(DataError, match=re.escape(NO_THOUGHTS)):
                rendered(template, messages)
            (answer,) = trained(template, messages, Policy(thinking="drop"))
            assert answer in ("4</s>", "4<|eot_id|>")
    row = {"prompt": beside, "completion": turns("v", "b")}
    assert len(trained(source, row)) == 1, "of a prompt a template shows what it likes"


HOW_TO_THINK = (
    "The reasoning is enclosed within <think> </think> and <answer> </answer> tags, i.e., <think> reasoning here "
    "</think> <answer> answer here </answer>."
)
"""The system prompt of DeepSeek-R1-Zero (arXiv:2501.12948, table 1), and of many sets of its answers."""


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gemma"])
def test_who_is_told_how_to_think_has_not_thought(name: str) -> None:
    """Texts of a system and of users are whole with the tags that they spell; so is an answer that is shown whole."""
    messages = [{"role": "system", "content": HOW_TO_THINK}, *turns(f"Why {HOW_TO_THINK}?", "Since 4 is even.")]
    (marked,) = rendered(TEMPLATES[name], messages)
    assert marked.text == theirs(TEMPLATES[name], messages)[0] and marked.text.count("<think> reasoning") == 2
    with pytest.raises(DataError, match=r"drops text of message \d \((system|user)\)"):
        rendered("{% for m in messages %}{{ m.content.split('</think>')[-1] }}</s>{% endfor %}", messages)


def test_an_answer_that_is_shown_with_its_thoughts_in_the_middle_is_whole() -> None:
    texts = trained(LLAMA3, turns("2+2", "First <think>sum</think> then 4."))
    assert texts == ["First <think>sum</think> then 4.<|eot_id|>"]


def test_words_that_ask_may_show_more_than_an_answer_has() -> None:
    """DeepSeek asks with `<think>`, and drops thoughts of every answer: also one that begins with a tag."""
    plain = unmarked(DEEPSEEK)
    for answer in ("four", "<tool_call>x", "<b>", "<", "<think", ""):
        for text in (answer, f"<think>sum</think>{answer}"):
            assert trained(plain, turns("2+2", text), Policy(thinking="drop")) == [answer + "</s>"]


def test_an_answer_that_opens_a_conversation_is_trained_without_its_heading() -> None:
    messages = [{"role": "assistant", "content": "How can I help?"}, *turns("hi", "ho")]
    source = unmarked(CHATML)
    assert trained(source, messages) == ["How can I help?<|im_end|>", "ho<|im_end|>"] == trained(CHATML, messages)


@settings(max_examples=60, deadline=None)
@given(messages=conversations(answered=True), cut=st.integers(1, 6))
def test_a_prompt_is_never_trained(messages: Any, cut: int) -> None:
    assume(cut < len(messages) and messages[cut]["role"] == "assistant")
    row = {"prompt": messages[:cut], "completion": messages[cut:]}
    asked, _ = theirs(unmarked(CHATML), messages[:cut], add_generation_prompt=True)
    for source in (CHATML, unmarked(CHATML)):
        (marked,) = rendered(source, row)
        answers = [message["content"] + "<|im_end|>" for message in messages[cut:] if message["role"] == "assistant"]
        if len(answers) == len(messages) - cut:
            assert marked.trained == ((len(asked), len(marked.text)),)
        else:  # what a user says behind the first answer is no answer
            assert [marked.text[begin:end] for begin, end in marked.trained] == answers
        (marked,) = rendered(source, row, Policy(train_on="assistant"))
        assert [marked.text[begin:end] for begin, end in marked.trained] == answers
        assert all(begin >= len(asked) for begin, _ in marked.trained)


@pytest.mark.parametrize("source", [CHATML, unmarked(CHATML)], ids=["marked", "plain"])
def test_roles_choose(source: str) -> None:
    messages = [{"role": "system", "content": "S"}, *turns("u", "a", "v", "b")]
    assert trained(source, messages, Policy(train_on="last")) == ["b<|im_end|>"]
    assert trained(source, messages, Policy(train_on="assistant")) == ["a<|im_end|>", "b<|im_end|>"]
    user = ["<|im_start|>user\nu<|im_end|>\n", "<|im_start|>user\nv<|im_end|>\n"]
    assert trained(source, messages, Policy(train_on="user")) == user
    (whole,) = rendered(source, messages, Policy(train_on="all"))
    assert whole.trained == ((0, len(whole.text)),)
    messages[2]["train"] = False
    messages[4]["weight"] = 0
    assert trained(source, messages) == []
    messages[2] |= {"train": None, "weight": 1.0}  # a table has null where a row says nothing
    assert trained(source, messages) == ["a<|im_end|>"]


@pytest.mark.parametrize(("key", "value"), [("weight", 0.5), ("weight", 2), ("train", "false"), ("train", [])])
def test_a_turn_that_is_trained_by_half_is_refused(key: str, value: Any) -> None:
    messages = turns("u", "a")
    messages[1][key] = value
    with pytest.raises(DataError, match=f"a message has {key}="):
        rendered(CHATML, messages)


def test_thoughts_are_dropped_by_choice() -> None:
    drop = Policy(thinking="drop")
    messages = turns("2+2", "<think>sum</think>\n\nfour", "3+3", "the prompt thinks\n</think>\n\nsix")
    messages[1]["reasoning_content"] = "sum"
    assert trained(CHATML, messages, drop) == ["four<|im_end|>", "six<|im_end|>"]
    assert trained(CHATML, messages)[0] == "<think>sum</think>\n\nfour<|im_end|>"


AS_GIVEN = CHATML.replace(
    "(call.function | tojson)", """'"arguments": ' + call.function.arguments + call.function.name"""
)
"""Joins texts, as DeepSeek's templates do: objects are refused."""


def test_tools_and_calls_are_shown() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": '{"c": -3}'},
        {"role": "assistant", "content": "cold"},
    ]
    row = {"messages": messages, "tools": json.dumps(TOOLS)}
    shown = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    for source in (CHATML, unmarked(CHATML)):
        assert trained(source, row) == [shown, "cold<|im_end|>"]
    (marked,) = rendered(CHATML, row)
    assert {role for _, role in marked.roles} == {"user", "tool", "assistant"}


def test_calls_whose_arguments_are_json_are_shown_as_objects() -> None:
    """Arguments are JSON texts in OpenAI's files. A template would quote them, and a server gives objects."""
    opened = {"city": "Oslo", "days": [1, 2]}
    for source, arguments in ((CHATML, opened), (CHATML, json.dumps(opened)), (AS_GIVEN, json.dumps(opened))):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "user", "content": "weather?"}, {"role": "assistant", "tool_calls": [call]}]
        (text,) = trained(source, messages)
        assert '"arguments": {"city": "Oslo", "days": [1, 2]}' in text
    for arguments in ("[1]", "{", "5"):  # no object: as it is given
        call = {"name": "weather", "arguments": arguments}
        messages = [{"role": "user", "content": "weather?"}, {"role": "assistant", "tool_calls": [{"function": call}]}]
        assert f'"arguments": {json.dumps(arguments)}' in trained(CHATML, messages)[0]


def test_what_a_turn_says_may_stand_in_the_words_of_the_template() -> None:
    """ "user" and "user two" spell "useruser" where blanks do not count."""
    for first in ("user  two", "u"):
        assert trained(CHATML, turns(first, "useruser")) == ["useruser<|im_end|>"]


def test_a_template_may_write_what_is_said_in_another_order() -> None:
    last = "{% for m in messages[1:] %}[{{ m.content }}]</s>{% endfor %}{{ messages[0].content }}"
    messages = [{"role": "system", "content": "sys"}, *turns("ask", "say")]
    (marked,) = rendered(last, messages, Policy(train_on="all"))
    assert marked.text == "[ask]</s>[say]</s>sys"


DROPS = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}] {{ m.content }}</s>{% endif %}{% endfor %}"
NAMES_ALONE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.name }}"
    "{% endfor %}</s>{% endfor %}"
)
CALLS = [{"function": {"name": "weather", "arguments": {"where": {"city": "Berlin"}}}}]
UPPER = "{% for m in messages %}[{{ m.role }}] {{ m.content | upper }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "fields", "sentence"),
    [
        (
            DROPS,
            [{"role": "system", "content": "Be brief."}, *turns("u", "a")],
            "the chat template drops text of message 1 (system): 'Be brief.' is missing in the rendered text. Take "
            "another data.template, or another role",
        ),
        (
            CHATML,
            [*turns("u", "a"), {"role": "critic", "content": "wrong!"}],
            "the chat template drops text of message 3 (critic): 'wrong!' is missing in the rendered text. Take "
            "another data.template, or another role",
        ),
        (
            UPPER,
            turns("question", "answer"),
            "the chat template drops text of message 1 (user): 'question' is missing in the rendered text. Take "
            "another data.template, or another role",
        ),
        (
            DEFAULT,
            [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"function": {"name": "find"}}]}],
            "the chat template drops a tool call of message 2: 'find' is not in the rendered text; take a "
            "data.template that writes tool_calls",
        ),
        (
            NAMES_ALONE,
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": CALLS}],
            "the chat template drops what a tool call of message 2 is given: 'Berlin' is not in the rendered text; "
            "take a data.template that writes arguments",
        ),
        (
            DROPS,
            [{"role": "system", "content": "hi"}, *turns("hi there", "a")],
            "the chat template drops text of message 1 (system): 'hi' is missing in the rendered text. Take "
            "another data.template, or another role",
        ),
        (
            DEFAULT,
            {"messages": turns("u", "a"), "tools": TOOLS},
            "the chat template drops the tool 'weather': it is not in the rendered text; take a data.template that "
            "writes tools, or remove the column 'tools'",
        ),
        (
            MISTRAL,
            [*turns("u"), *turns("v")],
            "the chat template fails in line 9: roles must alternate: user, assistant",
        ),
    ],
)
def test_what_a_template_drops_or_refuses_is_said(source: str, fields: Any, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        rendered(source, fields)
    assert str(error.value) == sentence


ONE_CALL = (
    "{% for m in messages %}[{{ m.role }}]{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{{ m.content + m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)
"""Calls as templates of Llama 3.1 ask for them, and as DeepSeek-V3's add them to a content."""


def test_what_a_turn_leaves_empty_is_trained_as_a_server_writes_it() -> None:
    """Logs of servers have `tool_calls: []` in plain answers, and `content: null` beside calls."""
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "call00001", "tool_calls": None},
        {"role": "assistant", "content": "a", "tool_calls": []},
    ]
    (marked,) = rendered(ONE_CALL, messages)
    sparse = [{name: field for name, field in message.items() if field is not None} for message in messages]
    served = [check_fields(ChatMessage, message).row for message in sparse]
    assert marked.text == ChatTemplate(ONE_CALL, SPELLED, DAY).render(served).text
    plain = [{name: field for name, field in message.items() if field} for message in messages]
    plain[1] |= {"content": "", "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "Rom"}}}]}
    assert marked.text == theirs(ONE_CALL, plain)[0]


def test_a_role_that_nobody_knows_is_refused() -> None:
    """A misspelled answer would be masked, and nobody would see it."""
    any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    messages = [{"role": "user", "content": "u"}, {"role": "asistant", "content": "a"}]
    with pytest.raises(DataError, match="message 2 has the role 'asistant', which the chat template does not know"):
        rendered(any_role, messages)
    named = any_role + "{# critic #}"
    assert rendered(named, [{"role": "critic", "content": "c"}, *turns("u", "a")])


def test_an_answer_in_another_form_than_it_is_asked_for_is_refused() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    source = "{{ 'answered ' if messages[-1].role == 'assistant' else 'open ' }}" + source
    with pytest.raises(DataError) as error:
        rendered(source, turns("u", "a"))
    assert str(error.value) == (
        "the chat template writes turn 2 in two forms, so its trained part is not known. Put "
        "{% generation %} around the answers in the template, or take data.train_on=all"
    )
    (whole,) = rendered(source, turns("u", "a"), Policy(train_on="all"))
    assert whole.trained == ((0, len(whole.text)),)


@pytest.mark.parametrize("word", ["search", "get", "run", "u"])
@pytest.mark.parametrize("source", [DEFAULT, LLAMA3, MISTRAL], ids=["default", "llama3", "mistral"])
def test_a_tool_whose_name_is_a_word_of_the_text_is_missed(source: str, word: str) -> None:
    """The template writes the same text with and without the tool, as transformers shows."""
    plain = turns("please search, get and run u", "u search, get and run")
    tool = {"type": "function", "function": {"name": word, "description": "d", "parameters": {}}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": word, "arguments": {"q": "please"}}}
    called = [plain[0], {**plain[1], "tool_calls": [call]}]
    for fields, wanted in (
        ({"messages": plain, "tools": [tool]}, f"drops the tool '{word}'"),
        ({"messages": called}, f"drops a tool call of message 2: '{word}'"),
    ):
        messages, tools = fields["messages"], fields.get("tools")
        assert theirs(unmarked(source), messages, tools=tools)[0] == theirs(unmarked(source), plain)[0]
        with pytest.raises(DataError, match=re.escape(wanted)):
            rendered(source, fields)
    assert rendered(CHATML, {"messages": called, "tools": [tool]})[0].text == theirs(CHATML, called, tools=[tool])[0]


def test_an_argument_that_is_a_word_of_the_text_is_missed() -> None:
    call = {"function": {"name": "get", "arguments": json.dumps({"city": "get"})}}
    with pytest.raises(DataError, match="what a tool call of message 2 is given: 'get' is not in the rendered text"):
        rendered(NAMES_ALONE, [{"role": "user", "content": "get"}, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "plain"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_an_answer_that_is_cut_off_is_trained_to_its_last_character_and_no_end_follows(
    name: str, marks: bool, data: st.DataObject
) -> None:
    messages = data.draw(conversations(system=name != "gemma"))
    assume(messages[-1]["role"] == "assistant")
    text, spans = theirs(TEMPLATES[name], messages)
    words = messages[-1]["content"].strip()
    assume(words)
    end = text.rindex(words) + len(words)
    source = TEMPLATES[name] if marks else unmarked(TEMPLATES[name])
    (marked,) = rendered(source, {"messages": messages, "cut_off": True})
    assert marked.text == text[:end]
    assert list(marked.trained) == [*spans[:-1], (spans[-1][0], end)]


def test_a_cut_off_row_whose_last_message_is_no_answer_is_malformed() -> None:
    with pytest.raises(DataError, match="is marked as cut off"):
        rendered(DEFAULT, {"messages": [*turns("a", "b"), {"role": "user", "content": "c"}], "cut_off": True})
    with pytest.raises(DataError, match="'cut_off' is 'yes': write true"):
        sample(("chat.jsonl:1", {"messages": turns("a", "b"), "cut_off": "yes"}))
