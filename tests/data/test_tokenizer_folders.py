"""The tokenizer of a folder gives the ids that transformers' AutoTokenizer gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.chat.encoder import row_encoder, unpack
from meshwright.data.chat.rendering import chat_prompt, template_of
from meshwright.data.corpus import sample_cache
from meshwright.data.preparation import prepare
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.data.tokens.word_encoder import library
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import TOOLS
from tests.data.tokenizers_for_tests import WRITTEN, written

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")

TEXTS = ("Hello, caller's name", "  two words", "def greet(name):\n    return 1\n")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_begins_as_transformers_begins_it(name: str, tmp_path: Path) -> None:
    """Prompts, rows without a template, and the documents of a corpus."""
    folder = written(tmp_path, name)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    end = [theirs.eos_token_id]
    chosen = sample_cache.settings(Data(path="chat.jsonl", form="samples"), ours)
    encode = row_encoder(library(ours.json), ours.vocab, chosen)
    for text in TEXTS:
        wanted = theirs(text).input_ids
        assert ours.begin(text) == wanted
        [[sample]] = unpack(encode([json.dumps(["chat.jsonl, line 1", {"text": text}])], b"\0")[0])
        assert memoryview(sample.ids).cast("H").tolist() == wanted + end
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text(TEXTS[0], encoding="utf-8")
    data = Data(path=str(tmp_path / "text"), tokenizer=str(folder), validation=0.0)
    corpus = prepare(data, cache_root=tmp_path / "cache")
    assert corpus.train.tokens.tolist() == theirs(TEXTS[0]).input_ids + end


@pytest.mark.parametrize("name", WRITTEN)
def test_a_prompt_that_spells_its_beginning_gets_no_second_one(name: str, tmp_path: Path) -> None:
    """Text in the form of a rendered chat template."""
    folder = written(tmp_path, name)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    text = ours.decode(ours.begins) + TEXTS[0]
    assert ours.begin(text) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversation_without_a_template_begins_as_a_text(name: str, tmp_path: Path) -> None:
    ours = Tokenizer.load(written(tmp_path, name))
    ids = chat_prompt(ours, template_of(ours), [{"role": "user", "content": "Hi"}])
    assert ids.count(ours.bos) == (1 if ours.bos in ours.begins else 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_follows_a_prompt_keeps_its_first_space(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    ids = theirs("the quick caf\u00e9 \u65e5!").input_ids
    for cut in range(2, len(ids)):
        before, whole = (theirs.decode(part, clean_up_tokenization_spaces=False) for part in (ids[:cut], ids))
        if "\ufffd" not in before:
            assert ours.continuation_text(ids[:cut], ids[cut:]) == whole[len(before) :]
            assert before + "".join(map(ours.spell, ids[cut:])) == whole or "\ufffd" in map(ours.spell, ids[cut:])
    assert b"".join(map(ours.token_bytes, ids)).decode() == theirs.decode(ids) or name.startswith("Phi-3")


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TOOL, PLAIN = "<tool_call>", "plainword"
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "added_tokens_decoder": (
        {"added_tokens_decoder": {
            "1": FLAGS | {"content": "<s>", "special": True}, "286": FLAGS | {"content": TOOL, "special": True},
            "287": FLAGS | {"content": PLAIN, "special": False, "normalized": True, "rstrip": True},
        }}, {}, {},
    ),
    "flags that tokenizer.json has otherwise": (
        {"added_tokens_decoder": {"2": FLAGS | {"content": "</s>", "special": False, "lstrip": True}}}, {}, {},
    ),
    "additional_special_tokens": ({"additional_special_tokens": [TOOL, PLAIN]}, {}, {}),
    "extra_special_tokens": ({"extra_special_tokens": [TOOL, PLAIN]}, {}, {}),
    "extra_special_tokens by name": ({"extra_special_tokens": {"tool_token": TOOL, "image_token": PLAIN}}, {}, {}),
    "special_tokens_map.json": ({}, {"additional_special_tokens": [TOOL]}, {}),
    "added_tokens.json": ({"additional_special_tokens": [TOOL]}, {}, {PLAIN: 287, TOOL: 286}),
    "a name of its own": ({"tool_token": TOOL}, {}, {}),
    "a plain entry of the vocabulary": ({"pad_token": "a", "sep_token": "b"}, {}, {}),
}  # fmt: skip
"""Name -> (what tokenizer_config.json says more, special_tokens_map.json, added_tokens.json)."""


@pytest.mark.parametrize("name", NAMED)
def test_tokens_that_neighbours_alone_name(name: str, tmp_path: Path) -> None:
    config, special, added = NAMED[name]
    folder = written(tmp_path, "Llama-2: added", **config)
    for file, content in (("special_tokens_map.json", special), ("added_tokens.json", added)):
        if content:
            (folder / file).write_text(json.dumps(content), encoding="utf-8")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.vocab == len(theirs)
    special_ids = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == special_ids
    for text in (f"a{TOOL}b", f"call {TOOL} {PLAIN}  twice </s> c", f"{PLAIN}s{TOOL}", "a b"):
        assert ours.begin(text) == theirs(text).input_ids, text
    (tmp_path / "copy").mkdir()
    ours.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").fingerprint == ours.fingerprint


def test_a_declared_id_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """AutoTokenizer gives it another one, and the model has another row there."""
    decoder = {"300": FLAGS | {"content": TOOL, "special": True}}
    with pytest.raises(DataError, match=r"gives '<tool_call>' the id 300, but the next id of tokenizer\.json is 286"):
        Tokenizer.load(written(tmp_path, "Llama-2: added", added_tokens_decoder=decoder))
    with pytest.raises(DataError, match="names tokens in a form that is not known"):
        Tokenizer.load(written(tmp_path, "Llama-2: added", added_tokens_decoder={"286": TOOL}))


SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
WITHOUT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
WITH = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + WITHOUT
LISTED = [{"name": "default", "template": WITHOUT}, {"name": "tool_use", "template": WITH}]
SHIPPED: dict[str, tuple[Any, str | None, str | None]] = {
    "a list": (LISTED, None, None),
    "a list behind chat_template.jinja": (LISTED, WITH + "!", None),
    "additional_chat_templates": (None, WITHOUT, WITH),
    "an additional one beside a list": (LISTED, WITHOUT + "!", WITH + "?"),
    "one for all": (WITH, None, None),
}
"""Name -> (chat_template of tokenizer_config.json, chat_template.jinja, additional_chat_templates/tool_use.jinja)."""


@pytest.mark.parametrize("name", SHIPPED)
def test_the_template_for_tools_is_taken_where_there_are_tools(name: str, tmp_path: Path) -> None:
    """In prompts and in training, and in what is saved."""
    config, default, additional = SHIPPED[name]
    folder = written(tmp_path, "Llama-2: added", **({"chat_template": config} if config else {}))
    for file, source in (("chat_template.jinja", default), ("additional_chat_templates/tool_use.jinja", additional)):
        if source is not None:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(source, encoding="utf-8")
    theirs, first = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    first.save(copy)
    again = transformers.AutoTokenizer.from_pretrained(copy)
    for ours in (first, Tokenizer(**first.parts), Tokenizer.load(copy)):
        chosen = sample_cache.settings(Data(path="chat.jsonl", form="samples", train_on="all"), ours)
        encode = row_encoder(library(ours.json), ours.vocab, chosen)
        for tools in (None, TOOLS):
            wanted = theirs.apply_chat_template(SAID, tools=tools).input_ids
            assert again.apply_chat_template(SAID, tools=tools).input_ids == wanted
            assert chat_prompt(ours, template_of(ours), SAID, tools) == wanted
            row = {"messages": SAID, "tools": tools}
            [[sample]] = unpack(encode([json.dumps(["chat.jsonl, line 1", row])], b"\0")[0])
            assert memoryview(sample.ids).cast("H").tolist() == wanted
    assert template_of(first).takes_tools
    assert not template_of(first.with_template(WITHOUT)).takes_tools, "a named one is for all conversations"
