"""Ids and marks of rows: those of transformers and of TRL's SFTTrainer."""

import array
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.chat.encoder import TRAINED, SampleSettings, row_encoder, unpack
from meshwright.data.chat.template import ChatTemplate
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import (
    BYTE_LEVEL,
    CHATML,
    QWEN3,
    SPACED,
    SPELLED,
    TEMPLATES,
    TOOLS,
    conversations,
    tokenizer_json,
    unmarked,
)  # fmt: skip
from tests.data.test_chat_template import DAY, theirs
from tests.data.test_rendering import turns

PLACE = "chat.jsonl:3"


@cache
def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json(name))


def encoded(name: str, source: str, row: Any, **more: Any) -> list[list[tuple[list[int], list[bool]]]]:
    """(ids, whether each is trained) of the samples of a row, in groups."""
    made = tokenizers.Tokenizer.from_str(tokenizer_json(name))
    ids = {"begins": (made.token_to_id("<s>"),), "eos": made.token_to_id("</s>"), **more}
    settings = SampleSettings(template=source, special=SPELLED, today=DAY.isoformat(), **ids)
    encode = row_encoder(made, made.get_vocab_size(), settings)
    (answer,) = encode([json.dumps([PLACE, row])], b"\0")
    return [
        [(list(array.array("H", sample.ids)), [mark & TRAINED > 0 for mark in sample.marks]) for sample in group]
        for group in unpack(answer)
    ]


def only(name: str, source: str, row: Any, **more: Any) -> tuple[list[int], list[bool]]:
    (((ids, marks),),) = encoded(name, source, row, **more)
    return ids, marks


@cache
def hugging_face(name: str) -> Any:
    made = pytest.importorskip("transformers").PreTrainedTokenizerFast
    return made(tokenizer_object=library(name), bos_token="<s>", eos_token="</s>")


def tokenized(name: str, text: str, spans: list[tuple[int, int]], parts: bool) -> tuple[list[int], list[bool]]:
    """Ids by the library; in `parts` that meet where training begins and ends, or whole."""
    borders = sorted({0, len(text), *(start for span in spans for start in span)}) if parts else [0, len(text)]
    ids, marks = [], []
    for begin, end in pairwise(borders):
        encoding = library(name).encode(text[begin:end], add_special_tokens=False)
        ids += encoding.ids
        marks += [any(first <= begin + start < last for first, last in spans) for start, _ in encoding.offsets]
    return ids, marks


@pytest.mark.parametrize("tokenizer", (*BYTE_LEVEL, *SPACED))
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.long
def test_ids_and_masks_are_those_of_transformers(name: str, tokenizer: str, data: st.DataObject) -> None:
    """The template has marks or none. Where possible the words before an answer and the answer are encoded apart.

    Otherwise, and if no token crosses the border, ids are those of the whole text.
    """
    messages = data.draw(conversations(system=name != "gemma", answered=True))
    source = TEMPLATES[name]
    text, spans = theirs(source, messages)
    parts = tokenizer not in SPACED
    expected = tokenized(tokenizer, text, spans, parts)
    for template in (source, unmarked(source)):
        assert only(tokenizer, template, {"messages": messages}) == expected
    whole = hugging_face(tokenizer).apply_chat_template(
        messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    if not parts or expected[0] == whole["input_ids"]:
        assert expected[0] == whole["input_ids"]
        begins = {start for start, _ in library(tokenizer).encode(text, add_special_tokens=False).offsets}
        if all(begin in begins for begin, _ in spans):
            assert expected[1] == [bool(mark) for mark in whole["assistant_masks"]]


@pytest.mark.parametrize("tokenizer", BYTE_LEVEL)
@settings(max_examples=25, deadline=None)
@given(messages=conversations(answered=True))
def test_what_comes_before_an_answer_is_what_a_model_is_asked_with(tokenizer: str, messages: Any) -> None:
    """Token for token, of the first answer; also where whole texts have a token across (a line end and another)."""
    answer = next(answer for answer, message in enumerate(messages) if message["role"] == "assistant")
    for name in ("chatml", "llama3"):
        ids, marks = only(tokenizer, TEMPLATES[name], {"messages": messages})
        asked = hugging_face(tokenizer).apply_chat_template(
            messages[:answer], chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert ids[: len(asked)] == asked and marks.index(True) == len(asked)


@pytest.mark.parametrize("tokenizer", (*BYTE_LEVEL, *SPACED))
@settings(max_examples=25, deadline=None)
@given(messages=conversations(answered=True))
def test_trained_tokens_spell_the_answers_and_their_ends(tokenizer: str, messages: Any) -> None:
    ids, marks = only(tokenizer, CHATML, {"messages": messages})
    end = library(tokenizer).token_to_id("<|im_end|>")
    trained = [token for token, mark in zip(ids, marks, strict=True) if mark]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert trained.count(end) == len(answers) and trained[-1] == end
    if tokenizer == "gpt2":  # the bytes of every text come back
        text = library(tokenizer).decode(trained, skip_special_tokens=False)
        assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_thoughts_of_earlier_answers_make_a_sample_for_each() -> None:
    messages = turns("u", "<think>\nt\n</think>\n\na", "v", "<think>\ns\n</think>\n\nb")
    samples = encoded("qwen2", unmarked(QWEN3), {"messages": messages})
    made = library("qwen2")
    texts = [
        made.decode([token for token, mark in zip(ids, marks, strict=True) if mark], skip_special_tokens=False)
        for ((ids, marks),) in samples
    ]
    assert texts == ["<think>\nt\n</think>\n\na<|im_end|>", "<think>\ns\n</think>\n\nb<|im_end|>"]


def test_a_preference_is_a_pair_with_one_prompt() -> None:
    row = {"prompt": turns("u"), "chosen": turns("", "good")[1:], "rejected": turns("", "bad")[1:]}
    ((chosen, rejected),) = encoded("llama3", unmarked(CHATML), row)
    border = chosen[1].index(True)
    assert chosen[0][:border] == rejected[0][:border] and rejected[1].index(True) == border
    both = {"chosen": turns("u", "good"), "rejected": turns("u", "bad")}
    assert encoded("llama3", unmarked(CHATML), both) == [[chosen, rejected]]


def test_begin_and_end_are_put_once() -> None:
    made = library("llama3")
    begin, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    for row in ({"text": "word"}, {"text": "<s>word</s>"}, {"prompt": "w", "completion": "ord"}):
        ids, marks = only("llama3", "", row)
        assert (ids.count(begin), ids[0], ids.count(end), ids[-1]) == (1, begin, 1, end) and marks[-1]


@pytest.mark.parametrize("tokenizer", (*BYTE_LEVEL, *SPACED))
@pytest.mark.parametrize("behind", ["", "\n", " \n\n"])
def test_a_rendered_conversation_as_text_gets_no_second_end(tokenizer: str, behind: str) -> None:
    """Files for TRL hold `apply_chat_template(..., tokenize=False)` as `text`, with what a template writes behind."""
    text = f"<s>[INST] u [/INST] a</s>[INST] v [/INST] b</s>{behind}"
    ids, marks = only(tokenizer, "", {"text": text})
    assert ids == hugging_face(tokenizer)(text, add_special_tokens=False)["input_ids"] and all(marks)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"messages": turns("u", "a<|im_end|>")},
            "<|im_end|> ends a turn twice: the file spells it and the template adds it; remove it from the file",
        ),
        (
            {"messages": turns("u", "a<|im_end|>\n")},
            "<|im_end|> ends a turn twice: the file spells it and the template adds it; remove it from the file",
        ),
        (
            {"messages": turns("u", "half \ud83d")},
            "the text holds half a surrogate pair, which is not valid Unicode",
        ),
        ({"input_ids": [5, 100_000]}, "token 100000 is outside the tokenizer's vocabulary of 341"),
        ({"input_ids": [5, -1]}, "token -1 is outside the tokenizer's vocabulary of 341"),
        ({"messages": turns("u") + turns("v"), "tools": "[{]"},
         "'tools' is broken JSON, Expecting property name enclosed in double quotes: line 1 column 3 (char 2)"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_encoded(row: Any, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        encoded("llama3", CHATML, row)
    assert str(error.value) == f"chat.jsonl, line 3: {sentence}"


def test_a_preference_of_several_samples_is_refused() -> None:
    thought = turns("u", "<think>\nt\n</think>\n\na", "v", "b")
    with pytest.raises(DataError) as error:
        encoded("llama3", unmarked(QWEN3), {"prompt": [], "chosen": thought, "rejected": thought})
    assert str(error.value) == (
        "chat.jsonl, line 3: the chat template rewrites earlier answers when others follow, so a preference can "
        "compare its last answer alone: give the turns before it as 'prompt'"
    )


def test_rows_that_a_template_makes_huge_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.chat.encoder._MOST_TOKENS", 1000)
    with pytest.raises(DataError) as error:
        encoded("llama3", "{{ 'word ' * 10 ** 4 }}" + CHATML, {"messages": turns("u", "a")})
    assert str(error.value) == "1 rows become more than 1,000 tokens, most of them by the chat template"


def trl_labels(tmp_path: Path, name: str, rows: list[Any], **config: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) as TRL's SFTTrainer makes them."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokenizer = hugging_face(name)
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = config.pop("template", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **shape))
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_length=None, report_to="none", use_cpu=True, eos_token=None, **config
    )
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


TRL = {
    "text": ([{"text": "Hello, caller's name"}, {"text": "\U0001f600</s>"}], {}, {"begins": ()}),
    "strings": (
        [{"prompt": "2+2=", "completion": " 4"}, {"prompt": "say", "completion": ": \u65e5\u672c"}], {}, {"begins": ()},
    ),
    "prompt and answer": (
        [{"prompt": turns("u"), "completion": turns("", "na\u00efve")[1:]},
         {"prompt": turns("u", "a", "v"), "completion": turns("", "b")[1:]}],
        {"template": CHATML}, {},
    ),
    "messages, whole": (
        [{"messages": turns("u", "a", "v", "\U0001f600")}], {"template": CHATML}, {"train_on": "all"},
    ),
    "messages, answers": (
        [{"messages": [{"role": "system", "content": "S"}, *turns("u", "a", "v", "b")]}, {"messages": turns("u", "a")}],
        {"template": CHATML, "assistant_only_loss": True}, {},
    ),
    "messages, answers, plain": (
        [{"messages": turns("u", "a", "v", "b", "w", "")}], {"template": CHATML, "assistant_only_loss": True}, {},
    ),
    "prompt and answers": (
        [{"prompt": turns("u", "a", "v"), "completion": turns("", "b", "w", "c")[1:]}],
        {"template": CHATML, "assistant_only_loss": True}, {"train_on": "assistant"},
    ),
    "tools": (
        [{"messages": turns("u", "a"), "tools": json.dumps(TOOLS)}],
        {"template": CHATML, "assistant_only_loss": True}, {},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of TRL and what it needs
@pytest.mark.parametrize("form", TRL)
def test_masks_are_those_of_trl(form: str, tmp_path: Path) -> None:
    rows, config, ours = TRL[form]
    template = config.get("template", "")
    source = unmarked(template) if form.endswith("plain") else template
    expected = trl_labels(tmp_path, "llama3", rows, **config)
    for row, (ids, labels) in zip(rows, expected, strict=True):
        encoded_ids, marks = only("llama3", source, row, **ours)
        assert encoded_ids == ids
        assert marks[1:] == [label != -100 for label in labels[1:]]


@pytest.mark.filterwarnings("ignore")
def test_a_token_across_the_border_is_not_trained_as_trl_warns(tmp_path: Path) -> None:
    """TRL leaves the end of the prompt out of the sequence; here it is as a model is asked, and the answer is whole."""
    row = {"prompt": "Hel", "completion": "lo"}
    ((theirs_ids, _),) = trl_labels(tmp_path, "llama3", [row])
    ids, marks = only("llama3", "", row, begins=())
    made = library("llama3")
    assert made.encode("Hel", add_special_tokens=False).ids == ids[: marks.index(True)]
    assert made.decode(ids[marks.index(True) :], skip_special_tokens=False) == "lo</s>"
    assert ids != theirs_ids and made.decode(theirs_ids, skip_special_tokens=False) == "Hello</s>"


def test_the_template_of_the_tests_is_the_same_without_marks() -> None:
    for source in (*TEMPLATES.values(), QWEN3):
        for prompt in (True, False):
            messages = turns("u", "a", "v")
            both = [
                ChatTemplate(template, SPELLED, DAY).render(messages, prompt=prompt)
                for template in (source, unmarked(source))
            ]
            assert both[0].text == both[1].text and not both[1].generated


def test_a_completion_that_is_cut_off_has_no_end_of_text() -> None:
    row = {"prompt": "Hel", "completion": "lo"}
    ids, marks = only("gpt2", CHATML, row)
    assert ids[-1] == library("gpt2").token_to_id("</s>")
    assert only("gpt2", CHATML, {**row, "cut_off": False}) == (ids, marks)
    assert only("gpt2", CHATML, {**row, "cut_off": True}) == (ids[:-1], marks[:-1])
