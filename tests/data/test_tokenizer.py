"""Tokenizers give back the text, know their marks, and refuse what cannot be read."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.tokens.tokenizer import Tokenizer, choose
from meshwright.spec.errors import DataError
from tests.data.tokenizers_for_tests import NAMES, TEXT, made, metaspace, with_added

SHIPPED, BYTES = Tokenizer.shipped(), Tokenizer.bytes()
MADE = {name: Tokenizer(made(name), eos="<|endoftext|>") for name in NAMES if name != "qwen2"}
ALL = {"shipped": SHIPPED, "bytes": BYTES, **MADE}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=100))
def test_any_text_comes_back(name: str, text: str) -> None:
    tokenizer = ALL[name]
    ids = tokenizer.encode(text)
    assert ids.dtype == tokenizer.dtype == np.uint16
    assert tokenizer.decode(ids) == text


def test_the_shipped_one_is_small_and_reads_python_well() -> None:
    assert SHIPPED.vocab == 2048
    assert SHIPPED.separator and SHIPPED.bos == SHIPPED.eos == 0
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    assert len(text) / len(SHIPPED.encode(text)) > 3
    assert SHIPPED.spell(int(SHIPPED.encode("\n        return")[0])) == "\n        "


def test_bytes_are_256_and_a_separator() -> None:
    assert BYTES.vocab == 257 and BYTES.separator and BYTES.eos == 256
    assert BYTES.encode("h\u00e9").tolist() == [0x68, 0xC3, 0xA9]


def test_special_tokens_are_read_only_when_asked_for() -> None:
    for tokenizer in (SHIPPED, BYTES):
        plain, special = (tokenizer.encode("a<|endoftext|>b", special=flag) for flag in (False, True))
        assert tokenizer.eos not in plain
        assert tokenizer.eos in special and len(special) == 3
        assert tokenizer.decode(plain) == tokenizer.decode(special)


def test_nothing_is_added_by_truncation_padding_or_a_template() -> None:
    spec = json.loads(made("gpt2"))
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    changed = Tokenizer(json.dumps(spec), eos="<|endoftext|>")
    assert changed.encode(TEXT).tolist() == MADE["gpt2"].encode(TEXT).tolist()
    assert changed.fingerprint == MADE["gpt2"].fingerprint


def test_fingerprints_tell_tokenizers_apart() -> None:
    fingerprints = {tokenizer.fingerprint for tokenizer in ALL.values()}
    assert len(fingerprints) == len(ALL)
    assert Tokenizer.shipped().fingerprint == SHIPPED.fingerprint


@pytest.mark.parametrize("name", ALL)
def test_saved_and_loaded_it_is_the_same(name: str, tmp_path: Path) -> None:
    tokenizer = ALL[name]
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert (loaded.fingerprint, loaded.bos, loaded.eos) == (tokenizer.fingerprint, tokenizer.bos, tokenizer.eos)
        assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    SHIPPED.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT, add_special_tokens=False) == SHIPPED.encode(TEXT).tolist()
    assert theirs.eos_token_id == SHIPPED.eos == theirs.bos_token_id
    assert theirs.decode(SHIPPED.encode(TEXT).tolist()) == TEXT


def _folder(path: Path, config: dict[str, object] | None, name: str = "tokenizer_config.json") -> Path:
    text = with_added(with_added(made("llama3"), "<|begin_of_text|>", special=True), "<|end_of_text|>", special=True)
    (path / "tokenizer.json").write_text(with_added(text, "<|eot|>", special=True), encoding="utf-8")
    if config is not None:
        (path / name).write_text(json.dumps(config), encoding="utf-8")
    return path


def test_marks_come_from_the_config_beside_it(tmp_path: Path) -> None:
    config = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot|>"}, "chat_template": "{{ x }}"}
    loaded = Tokenizer.load(_folder(tmp_path, config))
    assert [loaded.spell(mark) for mark in (loaded.bos or 0, loaded.eos or 0)] == ["<|begin_of_text|>", "<|eot|>"]
    assert not loaded.separator
    copy = tmp_path / "copy"
    copy.mkdir()
    loaded.save(copy)
    assert json.loads((copy / "tokenizer_config.json").read_text()) == config


def test_one_mark_alone_plays_both(tmp_path: Path) -> None:
    loaded = Tokenizer.load(_folder(tmp_path, {"bos_token": None, "eos_token": "<|eot|>"}))
    assert loaded.separator and loaded.spell(loaded.bos or 0) == "<|eot|>"


def test_marks_come_from_the_special_tokens_map(tmp_path: Path) -> None:
    loaded = Tokenizer.load(_folder(tmp_path, {"eos_token": "<|eot|>"}, "special_tokens_map.json"))
    assert loaded.spell(loaded.eos or 0) == "<|eot|>"


def test_marks_are_known_by_their_usual_names(tmp_path: Path) -> None:
    loaded = Tokenizer.load(_folder(tmp_path, None))
    assert [loaded.spell(mark) for mark in (loaded.bos or 0, loaded.eos or 0)] == [
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ]
    (tmp_path / "tokenizer.json").write_text(metaspace(), encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.bos, loaded.eos) == (1, 2)


def test_without_marks_documents_have_none(tmp_path: Path) -> None:
    spec = json.loads(made("gpt2"))
    spec["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.bos is None and loaded.eos is None and not loaded.separator


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": "1.0"}', "not json \u00e9", '{"model": {"type": "X"}}']
)
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a readable tokenizer\.json") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist: data\.tokenizer takes"):
        Tokenizer.load(tmp_path)


def test_a_config_that_names_an_unknown_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'<what>'"):
        Tokenizer.load(_folder(tmp_path, {"eos_token": "<what>"}))
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not readable JSON"):
        Tokenizer.load(tmp_path)


def test_training_gives_exactly_so_many_tokens() -> None:
    trained = Tokenizer.train([TEXT] * 3, 300)
    assert trained.vocab == 300 and trained.separator
    assert trained.decode(trained.encode(TEXT)) == TEXT
    assert len(trained.encode(TEXT)) < len(TEXT.encode())
    with pytest.raises(DataError, match=r"too short for 5000 tokens: it yields \d+"):
        Tokenizer.train([TEXT], 5000)
    with pytest.raises(DataError, match="at least 257"):
        Tokenizer.train([TEXT], 100)


def test_the_setting_names_a_tokenizer(tmp_path: Path) -> None:
    assert choose("bytes", None, iter(())).fingerprint == BYTES.fingerprint
    assert choose("auto", tmp_path, iter(())).fingerprint == SHIPPED.fingerprint
    assert choose("bpe:280", None, iter([TEXT])).vocab == 280
    BYTES.save(tmp_path)
    assert choose("auto", tmp_path, iter(())).fingerprint == BYTES.fingerprint
    assert choose(str(tmp_path), None, iter(())).fingerprint == BYTES.fingerprint
    with pytest.raises(DataError, match="bpe:4096"):
        choose("bpe:many", None, iter(()))
    with pytest.raises(DataError, match="does not exist"):
        choose("nowhere", None, iter(()))
