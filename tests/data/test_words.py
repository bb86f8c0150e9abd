"""The fast way of encoding gives the library's tokens, character class by character class."""

import json
import re
import sys
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from meshwright.data.tokens import word_encoder
from meshwright.data.tokens.tokenizer import CODE_PATTERN, Tokenizer
from tests.data.tokenizers_for_tests import LLAMA3, NAMES, O200K, QWEN2, made, metaspace, with_added

TRICKY = [
    *"  \n\r\t\x0b\x1c\x85\xa0\u2028\u3000'.,:;_-/()\"",
    *"aZ0579\u00b2\u00df\u00e9\u0301\u017f\u212a\u0663\u65e5\u4e00\ufb02\u00aa\u2167\U0001f600\U00010400\u0378",
    "'s",
    "'LL",
    "\r\n",
    "\n\n    ",
    "don't",
    "x = 1\n",
    "foo.bar_baz(",
    "<|endoftext|>",
]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(TRICKY), max_size=40).map("".join),
    st.text(alphabet=st.characters(codec="ascii"), max_size=80),
)


@cache
def encoders(text: str) -> tuple[word_encoder.Encode, tokenizers.Tokenizer, np.dtype]:
    library = word_encoder.library(text)
    vocab = max(library.get_vocab().values()) + 1
    return word_encoder.encoder(library, vocab), library, np.dtype(f"u{word_encoder.id_bytes(vocab)}")


def ids(encode: word_encoder.Encode, text: str, dtype: np.dtype) -> list[int]:
    return np.frombuffer(encode([text], b"\0")[0], dtype=dtype).tolist()


def expected(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(text=TEXTS)
@example("it's IT'S '\u017f\n\n\n  x  y\r\n\tz ")
@example("plain line\n\U0001f600 odd line\nplain again\n  and\u0301 more\n")
def test_ids_are_the_library_s(name: str, text: str) -> None:
    encode, library, dtype = encoders(made(name))
    assert type(encode).__name__ == "_Words"
    assert ids(encode, text, dtype) == expected(library, text)


@pytest.mark.parametrize("pattern", [word_encoder.GPT2, LLAMA3, QWEN2, O200K, CODE_PATTERN], ids=NAMES)
def test_every_certain_character_is_classed_as_the_library_does(pattern: str) -> None:
    """All of the basic plane, each between neighbours that tell letters, digits, marks and spaces apart."""
    translated = word_encoder.translate(pattern, unicode=True)
    assert translated is not None
    certain = [chr(c) for c in word_encoder._certain_categories()]
    assert len(certain) > 40000
    text = "".join(f"a{c}1{c}.{c} {c}\n" for c in certain)
    split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    assert re.findall(translated, text) == [word for word, _ in split]


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_a_token_added_to_the_vocabulary_is_found_in_text(text: str) -> None:
    encode, library, dtype = encoders(with_added(made("llama3"), "foo.bar", special=False))
    for case in (text, f"{text}foo.bar{text}"):
        assert ids(encode, case, dtype) == expected(library, case)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(" caller's caller")
def test_whole_words_of_the_vocabulary_come_before_merges(text: str) -> None:
    """Take a word that is a token without merging (`ignore_merges`), as the model of Llama-3 does."""
    spec = json.loads(made("llama3"))
    spec["model"]["ignore_merges"] = True
    spec["model"]["vocab"]["\u0120caller"] = 330
    encode, library, dtype = encoders(json.dumps(spec))
    assert ids(encode, text, dtype) == expected(library, text)
    assert ids(encode, " caller", dtype) == [330]


def test_special_tokens_in_text_are_text() -> None:
    encode, library, dtype = encoders(made("code"))
    encoded = ids(encode, "a<|endoftext|>b", dtype)
    assert library.token_to_id("<|endoftext|>") not in encoded
    assert library.decode(encoded, skip_special_tokens=False) == "a<|endoftext|>b"


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_bytes_are_their_own_ids(text: str) -> None:
    encode, library, dtype = encoders(Tokenizer.bytes().json)
    assert encode is word_encoder._bytes_as_ids
    assert ids(encode, text, dtype) == list(text.encode()) == expected(library, text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a|b)",
        r"\d+",
        r"\w",
        r"a.c",
        r"^a",
        r"a$",
        r"[a[bc]]",
        r"[a&&b]",
        r"(?<=a)b",
        r"[\S]",
        r"a{2}+",
        r"\bx",
        r"\p{Han}",
    ],
)
def test_patterns_that_mean_something_else_to_python_are_left_to_the_library(pattern: str) -> None:
    assert word_encoder.translate(pattern, unicode=False) is None


def test_words_of_a_script_are_left_to_the_library() -> None:
    """Python's categories know no scripts: two words would be one, whose bytes merge across the border."""
    spec = json.loads(made("llama3"))
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\p{Han}|[^\p{Han}]+"}
    alphabet = word_encoder.byte_alphabet()
    pair = [alphabet["\u65e5".encode()[-1]], alphabet["\u672c".encode()[0]]]
    spec["model"]["merges"].append(pair)
    spec["model"]["vocab"]["".join(pair)] = 330
    encode, library, dtype = encoders(json.dumps(spec))
    assert ids(encode, "\u65e5\u672c", dtype) == expected(library, "\u65e5\u672c")


@pytest.mark.parametrize("ending", ["line\nnext", "line\n next", "line \n\n  next", "a.\nb"])
def test_a_text_that_continues_gets_no_space_in_front(ending: str) -> None:
    """A tokenizer that begins every text with a space mark must not do so in the middle of a document."""
    encode, library, dtype = encoders(metaspace())
    for at in [index for index, letter in enumerate(ending) if letter == "\n"]:
        head, tail = encode([ending[:at], ending[at:]], b"\0\1")
        joined = np.frombuffer(head + tail, dtype=dtype).tolist()
        assert joined == expected(library, ending)
        assert library.decode(joined) == ending


def test_wide_vocabularies_take_four_bytes() -> None:
    assert [word_encoder.id_bytes(vocab) for vocab in (257, 2**16, 2**16 + 1)] == [2, 2, 4]
    text = with_added(made("code"), "<far>", special=True)
    library = word_encoder.library(text)
    encode = word_encoder.encoder(library, 2**17)
    assert np.frombuffer(encode(["for i in"], b"\0")[0], dtype=np.uint32).tolist() == expected(library, "for i in")


def test_the_cache_of_words_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoder, "_CACHED_WORDS", 10)
    encode, library, dtype = encoders.__wrapped__(made("llama3"))
    text = " ".join(f"w{number}" for number in range(500))
    for _ in range(3):
        assert ids(encode, text, dtype) == expected(library, text)
        assert len(encode._cache) <= 10  # type: ignore[attr-defined]
    long = "x" * 5000
    assert ids(encode, long, dtype) == expected(library, long)
    assert long not in encode._cache  # type: ignore[attr-defined]


def test_the_worker_needs_no_numpy() -> None:
    import subprocess

    code = "import sys, meshwright.data.corpus.worker; print(sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
