"""Chat templates by name: their texts are those that the publishers document, written here a second time in Python and
rendered by transformers; what is trained is each answer with its end."""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings

from meshwright.data.chat.encoder import TRAINED, EncodedSample, row_encoder, unpack
from meshwright.data.chat.rendering import (
    chat_prompt,
    check_format,
    fitting_formats,
    named_template,
    template_of,
    turn_end_ids,
)
from meshwright.data.chat.template import DEFAULT
from meshwright.data.corpus import sample_cache
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.plan.plan import CHAT_FORMATS, EOS
from tests.data.chats_for_tests import GEMMA, TOOLS, conversations, tokenizer_json, unmarked
from tests.data.tokenizers_for_tests import made, with_added

Messages = Sequence[dict[str, Any]]


def chatml(turns: Messages, asked: bool) -> str:
    """OpenAI, openai-python v0.28, chatml.md."""
    return (
        "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        + "<|im_start|>assistant\n" * asked
    )


def llama_3(turns: Messages, asked: bool) -> str:
    """Meta, llama3/llama/tokenizer.py, ChatFormat."""

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    text = "".join(header(turn["role"]) + turn["content"].strip() + "<|eot_id|>" for turn in turns)
    return "<|begin_of_text|>" + text + header("assistant") * asked


def llama_2(turns: Messages, asked: bool) -> str:
    """Meta, llama/llama/generation.py, chat_completion: pairs between bos and eos."""
    if turns[0]["role"] == "system":
        first = f"<<SYS>>\n{turns[0]['content']}\n<</SYS>>\n\n{turns[1]['content']}"
        turns = [{"role": "user", "content": first}, *turns[2:]]
    pairs = zip(turns[::2], turns[1::2], strict=False)
    text = "".join(f"<s>[INST] {q['content'].strip()} [/INST] {a['content'].strip()} </s>" for q, a in pairs)
    return text + (f"<s>[INST] {turns[-1]['content'].strip()} [/INST]" if len(turns) % 2 else "")


def mistral_v1(turns: Messages, asked: bool) -> str:
    """Mistral AI, model card of Mixtral-8x7B-Instruct-v0.1, and the system message as mistral-common's v1 has it."""
    if turns[0]["role"] == "system":
        turns = [{**turns[1], "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}, *turns[2:]]
    forms = {"user": " [INST] {} [/INST]", "assistant": " {}</s>"}
    return "<s>" + "".join(forms[turn["role"]].replace("{}", turn["content"]) for turn in turns)


def mistral(turns: Messages, asked: bool) -> str:
    """Mistral AI, model card of Mistral-Small-24B-Instruct-2501, "Basic Instruct Template (V7-Tekken)"."""
    forms = {"system": "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "user": "[INST]{}[/INST]", "assistant": "{}</s>"}
    return "<s>" + "".join(forms[turn["role"]].replace("{}", turn["content"]) for turn in turns)


def deepseek_v3(turns: Messages, asked: bool) -> str:
    """DeepSeek, tokenizer_config.json of DeepSeek-V3."""
    forms = {"system": "{}", "user": "<\uff5cUser\uff5c>{}", "assistant": "<\uff5cAssistant\uff5c>{}</s>"}
    text = "".join(forms[turn["role"]].replace("{}", turn["content"]) for turn in turns)
    return "<s>" + text + "<\uff5cAssistant\uff5c>" * asked


PUBLISHED: dict[str, Callable[[Messages, bool], str]] = {
    "chatml": chatml, "llama-3": llama_3, "llama-2": llama_2, "mistral": mistral, "mistral-v1": mistral_v1,
    "deepseek-v3": deepseek_v3,
}  # fmt: skip
ANSWER: dict[str, Callable[[str], str]] = {
    "chatml": lambda text: f"{text}<|im_end|>",
    "llama-3": lambda text: f"{text.strip()}<|eot_id|>",
    "llama-2": lambda text: f" {text.strip()} </s>",
    "mistral": lambda text: f"{text}</s>",
    "mistral-v1": lambda text: f" {text}</s>",
    "deepseek-v3": lambda text: f"{text}</s>",
}
"""Trained text of a turn."""

SPOKEN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote Faust?"},
    {"role": "assistant", "content": "Goethe"},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "1808"},
]
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho wrote Faust?<|im_end|>\n"
    "<|im_start|>assistant\nGoethe<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
    "<|im_start|>assistant\n1808<|im_end|>\n",
    "llama-3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho wrote Faust?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nGoethe<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhen?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n1808<|eot_id|>",
    "llama-2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho wrote Faust? [/INST] Goethe </s>"
    "<s>[INST] When? [/INST] 1808 </s>",
    "mistral": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Who wrote Faust?[/INST]Goethe</s>"
    "[INST]When?[/INST]1808</s>",
    "mistral-v1": "<s> [INST] Be brief.\n\nWho wrote Faust? [/INST] Goethe</s> [INST] When? [/INST] 1808</s>",
    "deepseek-v3": "<s>Be brief.<\uff5cUser\uff5c>Who wrote Faust?<\uff5cAssistant\uff5c>Goethe</s>"
    "<\uff5cUser\uff5c>When?<\uff5cAssistant\uff5c>1808</s>",
}
NAMES = list(CHAT_FORMATS)


def vocabulary(name: str, *, without: str = "") -> Tokenizer:
    """One with the tokens of a format, or without one of them."""
    form, text = CHAT_FORMATS[name], made("llama3")
    for token in ("<s>", "</s>", *form.tokens, *([] if form.turn_end == EOS else [form.turn_end])):
        if token != without:
            text = with_added(text, token, special=True)
    marks = {"bos": "<|begin_of_text|>" if name == "llama-3" else "<s>", "eos": "</s>"}
    return Tokenizer(text, **{side: mark for side, mark in marks.items() if mark != without})


def read(name: str) -> str:
    template = named_template(name)
    assert template is not None
    return template


def trained_by(name: str) -> Tokenizer:
    return vocabulary(name).with_template(read(name))


def encoded(name: str, messages: Messages) -> EncodedSample:
    """One conversation as a run encodes it."""
    tokenizer = vocabulary(name)
    chosen = sample_cache.settings(Data(path="chat.jsonl", form="samples", template=name), tokenizer)
    encode = row_encoder(tokenizers.Tokenizer.from_str(tokenizer.json), tokenizer.vocab, chosen)
    [packed] = encode([json.dumps(["chat.jsonl, line 1", {"messages": list(messages)}])], b"\0")
    [[sample]] = unpack(packed)
    return sample


def ids_and_mask(name: str, messages: Messages) -> tuple[list[int], list[int]]:
    sample = encoded(name, messages)
    ids = np.frombuffer(sample.ids, vocabulary(name).dtype).tolist()
    return ids, [int(mark & TRAINED > 0) for mark in sample.marks]


def transformers_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = vocabulary(name)
    marks = {key: tokenizer.spelled[key] for key in ("bos_token", "eos_token")}
    library = tokenizers.Tokenizer.from_str(tokenizer.json)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, **marks)


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_written_as_it_is_published(name: str) -> None:
    theirs = transformers_of(name)
    assert template_of(trained_by(name)).render(SPOKEN).text == WRITTEN[name] == PUBLISHED[name](SPOKEN, False)
    assert theirs.apply_chat_template(SPOKEN, chat_template=read(name), tokenize=False) == WRITTEN[name]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(messages=conversations())
def test_random_conversations_are_written_as_they_are_published(name: str, messages: Messages) -> None:
    theirs, template = transformers_of(name), template_of(trained_by(name))
    for asked in (False, True) if messages[-1]["role"] == "user" else (False,):
        text = template.render(messages, prompt=asked).text
        assert text == PUBLISHED[name](messages, asked)
        given_options = {"chat_template": read(name), "tokenize": False, "add_generation_prompt": asked}
        assert theirs.apply_chat_template(messages, **given_options) == text


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_mask_are_those_of_transformers(name: str) -> None:
    expected = transformers_of(name).apply_chat_template(
        SPOKEN, chat_template=read(name), return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids_and_mask(name, SPOKEN) == (expected["input_ids"], expected["assistant_masks"])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(answered=True))
def test_exactly_answers_and_their_ends_are_trained(name: str, messages: Messages) -> None:
    tokenizer = trained_by(name)
    ids, mask = ids_and_mask(name, messages)
    trained = [id for id, chosen in zip(ids, mask, strict=True) if chosen]
    answers = [answer["content"] for answer in messages if answer["role"] == "assistant"]
    assert tokenizer.decode(trained) == "".join(ANSWER[name](answer) for answer in answers)
    [end] = turn_end_ids(tokenizer)
    assert trained.count(end) == len(answers) and trained[-1] == end


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(answered=True))
def test_a_conversation_begins_with_each_earlier_part_of_it(name: str, messages: Messages) -> None:
    """So that what a model answers to is what it was trained behind."""
    template = template_of(trained_by(name))
    whole = template.render(messages).text
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            assert whole.startswith(template.render(messages[: turn + 1]).text)
            asked = template.render(messages[:turn], prompt=True).text
            assert whole.startswith(asked + ANSWER[name](message["content"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_text_begins_once(name: str) -> None:
    """llama-2 begins each pair anew; ChatML has no token for it."""
    tokenizer = trained_by(name)
    ids, _ = ids_and_mask(name, SPOKEN)
    assert tokenizer.bos is not None
    wanted = {"chatml": 0, "llama-2": 2}.get(name, 1)
    assert ids.count(tokenizer.bos) == wanted and (not wanted or ids[0] == tokenizer.bos != ids[1])
    assert chat_prompt(tokenizer, template_of(tokenizer), SPOKEN[:2]).count(tokenizer.bos) == min(wanted, 1)


@pytest.mark.parametrize(("name", "end"), [("llama-2", "1808 <|endoftext|>"), ("mistral-v1", "1808<|endoftext|>")])
def test_one_token_for_both_sides_only_ends(name: str, end: str) -> None:
    """One token plays both roles, as in GPT-2. It would otherwise occur twice between turns."""
    text = template_of(Tokenizer.shipped().with_template(read(name))).render(SPOKEN).text
    assert text.count("<|endoftext|>") == 2 and text.endswith(end)


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_shipped_and_marks_its_answers(name: str) -> None:
    folder = resources.files("meshwright.data").joinpath("templates")
    assert sorted(path.name for path in folder.iterdir()) == sorted(form.file for form in CHAT_FORMATS.values())
    assert template_of(trained_by(name)).marks


@pytest.mark.parametrize("name", NAMES)
def test_what_a_format_cannot_write_is_refused(name: str) -> None:
    template = template_of(trained_by(name))
    assert not template.takes_tools
    with pytest.raises(DataError, match="template has no form for tools"):
        template.render(SPOKEN[:2], TOOLS)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    with pytest.raises(DataError, match="template has no form for calls of tools"):
        template.render([*SPOKEN[:2], call])
    if name in ("llama-2", "mistral", "mistral-v1"):
        with pytest.raises(DataError, match="turns must alternate"):
            template.render([SPOKEN[1], SPOKEN[3]])


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_without_a_token_of_the_format_is_refused(name: str) -> None:
    form = CHAT_FORMATS[name]
    check_format(name, vocabulary(name))
    for token in (*form.tokens, *([] if form.turn_end == EOS else [form.turn_end])):
        lacking = Tokenizer(vocabulary(name, without=token).json, bos="<s>", eos="</s>")
        with pytest.raises(DataError) as error:
            check_format(name, lacking)
        message = str(error.value)
        assert message.startswith(f"data.template={name} needs {token}, which the tokenizer lacks as one special token")
        assert "take data.template=llama-2 or mistral-v1 or auto" in message and name not in fitting_formats(lacking)


def test_a_vocabulary_that_ends_nothing_fits_no_format() -> None:
    nothing = Tokenizer(made("llama3"))
    assert fitting_formats(nothing) == []
    with pytest.raises(DataError, match=r"data.template=llama-2 needs an end-of-text token.*take data.template=auto"):
        check_format("llama-2", nothing)


def test_a_turn_end_that_is_no_special_token_is_refused() -> None:
    text = with_added(with_added(made("llama3"), "<|im_start|>", special=True), "<|im_end|>", special=False)
    with pytest.raises(DataError, match=r"data.template=chatml needs <\|im_end\|>"):
        check_format("chatml", Tokenizer(text))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(DataError) as error:
        named_template("chat-ml")
    assert str(error.value) == (
        "data.template=chat-ml cannot be read: No such file or directory; take auto, the path of a Jinja file, or a "
        "format: chatml, llama-3, llama-2, mistral, mistral-v1, deepseek-v3"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_turn_is_the_declared_one_and_is_found_without_marks(name: str) -> None:
    form, tokenizer = CHAT_FORMATS[name], vocabulary(name)
    wanted = tokenizer.encode("</s>" if form.turn_end == EOS else form.turn_end, special=True).tolist()
    for source in (read(name), unmarked(read(name))):
        assert turn_end_ids(tokenizer.with_template(source)) == tuple(wanted)


ENDS = {
    "an answer's words again": (
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
        "yes answer {{ messages[-1].content }}</s>",
        "<|im_end|>",
    ),
    "gemma": (unmarked(GEMMA), "<end_of_turn>"),
    "plain": (DEFAULT, "</s>"),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_turn_stands_behind_the_answer(case: str) -> None:
    source, wanted = ENDS[case]
    tokenizer = Tokenizer(tokenizer_json("llama3"), bos="<s>", eos="</s>", template=source)
    assert turn_end_ids(tokenizer) == tuple(tokenizer.encode(wanted, special=True).tolist())


@pytest.mark.parametrize("source", ["{{ messages[9].content }}", "{{ messages[1].content }}", "{% if %}"])
def test_a_template_that_ends_nothing_has_no_end(source: str) -> None:
    assert turn_end_ids(Tokenizer(tokenizer_json("llama3"), bos="<s>", eos="</s>", template=source)) == ()
