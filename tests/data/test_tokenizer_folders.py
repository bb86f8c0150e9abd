"""The tokenizer of a folder gives the ids that transformers' AutoTokenizer gives."""

import json
from pathlib import Path

import pytest

from meshwright.data import sample_cache, token_cache
from meshwright.data.chat_prompt import chat_prompt, template_of
from meshwright.data.sample_encoder import row_encoder, unpack
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.word_encoder import library
from meshwright.spec import Data
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
    corpus = token_cache.prepare(data, cache_root=tmp_path / "cache")
    assert corpus.train.tokens.tolist() == theirs(TEXTS[0]).input_ids + end


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
        before, whole = (theirs.decode(some, clean_up_tokenization_spaces=False) for some in (ids[:cut], ids))
        if "\ufffd" not in before:
            assert ours.text_behind(ids[:cut], ids[cut:]) == whole[len(before) :]
            assert before + "".join(map(ours.spell, ids[cut:])) == whole or "\ufffd" in map(ours.spell, ids[cut:])
    assert b"".join(map(ours.token_bytes, ids)).decode() == theirs.decode(ids) or name.startswith("Phi-3")
