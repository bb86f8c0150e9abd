"""Encoder that merges each distinct word once, several times faster than the batch mode of the tokenizer library.

The library splits text into words and merges each by BPE, keeping offsets and strings for every token. A corpus needs
only the ids, and its words repeat. So the word pattern is translated to Python's `re`, each distinct word is merged by
the library's own model once, and its ids, as bytes, are joined. The ids equal the library's, token by token. Whatever
the translation does not cover is encoded by the library itself (`_Library`). No numpy: workers start light.
"""

import json
import re
import sys
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import tokenizers
from tokenizers import models

Encode = Callable[[Sequence[str], bytes], list[bytes]]
"""(texts, flags) -> ids of each text as native unsigned integers. flags[i] = 1 if text i continues a document."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern built into the library's ByteLevel pre-tokenizer."""

_CACHED_WORDS = 2**17
_CACHED_LENGTH = 64
_NEVER = "\ue000"
"""Private-use character that keeps a character class from being empty. It never occurs in text of the fast path."""


def id_bytes(vocab: int) -> int:
    """Return the number of bytes of one stored token id: 2 up to 65536 ids, else 4."""
    return 2 if vocab <= 2**16 else 4


def encoder(tokenizer: tokenizers.Tokenizer, vocab: int) -> Encode:
    """Return the fastest exact encoder for this tokenizer. Its ids take `id_bytes(vocab)` bytes."""
    spec = json.loads(tokenizer.to_str())
    slow = _Library(tokenizer, vocab)
    if _is_byte_identity(spec):
        return _bytes_as_ids
    pattern = _word_pattern(spec)
    return slow if pattern is None else _Words(tokenizer, vocab, spec, pattern, slow)


def library(text: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer from the text of a tokenizer.json, set up to encode whole documents as plain text.

    Truncation and padding are for inference. Special tokens spelled out in a document are text: a corpus that quotes
    "<|endoftext|>" has not ended there.
    """
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def ids_before(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that the post-processor puts before a text. It ignores the tokens of the text."""
    # A model of one word: the post-processor is asked without the tokenizer's own words.
    text = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a", add_special_tokens=False)
    processed = tokenizer.post_process(text, None, True)
    return tuple(processed.ids[: processed.special_tokens_mask.index(0)])


def byte_alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _bytes_as_ids(texts: Sequence[str], flags: bytes) -> list[bytes]:
    """Widen bytes to 16 bits: as code units of UTF-16, which the codecs write at memory speed."""
    units = f"utf-16-{sys.byteorder[0]}e"
    return [text.encode().decode("latin-1").encode(units) for text in texts]


class _Library:
    """The tokenizer library's own batch mode, without offsets."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._code = "H" if id_bytes(vocab) == 2 else "I"
        ids = self._ids(["a\nb", "a\n", "b", "\n"])
        # Some tokenizers put a space before every text, also before one that continues another.
        self._lead = None if ids[0] == ids[1] + ids[2] else ids[3]

    def __call__(self, texts: Sequence[str], flags: bytes) -> list[bytes]:
        """Encode texts. If a space is put before every text, continued ones get a line end, removed later."""
        if self._lead is None or not any(flags):
            return [array(self._code, ids).tobytes() for ids in self._ids(texts)]
        behind = self._ids(["\n" + text if flag else text for text, flag in zip(texts, flags, strict=True)])
        plain = self._ids(texts)
        size = len(self._lead)
        chosen = [
            with_lead[size:] if flag and with_lead[:size] == self._lead else without
            for with_lead, without, flag in zip(behind, plain, flags, strict=True)
        ]
        return [array(self._code, ids).tobytes() for ids in chosen]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class _Words:
    """Byte-level BPE with cached words."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, vocab: int, spec: dict[str, Any], pattern: str, slow: _Library
    ) -> None:
        self._pattern, self._slow = pattern, slow
        self._ascii = re.compile(translate(pattern, unicode=False) or "")
        self._nfc = (spec["normalizer"] or {}).get("type") == "NFC"
        self._added = [token["content"] for token in spec["added_tokens"] if not token["special"]]
        self._cache = _Cache(tokenizer, "H" if id_bytes(vocab) == 2 else "I")

    def __call__(self, texts: Sequence[str], flags: bytes) -> list[bytes]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> bytes:
        if any(token in text for token in self._added):
            return self._slow([text], b"\0")[0]
        if text.isascii():
            return self._fast(text, self._ascii)
        if self._certain(text):
            return self._fast(text, _compiled(self._pattern))
        return b"".join(self._mixed(text))

    def _mixed(self, text: str) -> Iterator[bytes]:
        """Encode runs of lines with and without characters of uncertain class."""
        for certain, run in groupby(_lines(text), self._certain):
            joined = "".join(run)
            yield self._fast(joined, _compiled(self._pattern)) if certain else self._slow([joined], b"\0")[0]

    def _certain(self, text: str) -> bool:
        return not _odd().search(text) and (not self._nfc or unicodedata.is_normalized("NFC", text))

    def _fast(self, text: str, pattern: re.Pattern[str]) -> bytes:
        words = pattern.findall(text)
        # A pattern that does not cover the text would drop letters without a word.
        if sum(map(len, words)) != len(text):
            return self._slow([text], b"\0")[0]
        ids = b"".join(map(self._cache.__getitem__, words))
        # All at once: text repeats its frequent words soon, and keeping order would cost each look-up.
        if len(self._cache) > _CACHED_WORDS:
            self._cache.clear()
        return ids


class _Cache(dict[str, bytes]):
    """Ids of words met so far. A missing word is merged by the library's model."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, code: str) -> None:
        super().__init__()
        self._model, self._code = tokenizer.model, code
        self._alphabet = dict(enumerate(byte_alphabet()))

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode().decode("latin-1").translate(self._alphabet)
        ids = array(self._code, [token.id for token in self._model.tokenize(spelled)]).tobytes()
        # Long words hardly repeat, and would fill memory.
        if len(word) <= _CACHED_LENGTH:
            self[word] = ids
        return ids


def _is_byte_identity(spec: dict[str, Any]) -> bool:
    """Return whether every byte is its own id: byte-level BPE over the bare alphabet, without merges."""
    model = spec["model"]
    if model.get("type") != "BPE" or model["merges"] or spec["normalizer"] or _plain_pattern(spec) is None:
        return False
    same = all(model["vocab"].get(letter) == byte for byte, letter in enumerate(byte_alphabet()))
    return same and all(token["special"] for token in spec["added_tokens"])


def _word_pattern(spec: dict[str, Any]) -> str | None:
    """Return the word pattern of a byte-level BPE that the fast path supports. None = it does not."""
    model = spec["model"]
    refused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(key) for key in refused):
        return None
    if (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    pattern = _plain_pattern(spec)
    return pattern if pattern and translate(pattern, unicode=False) else None


def _plain_pattern(spec: dict[str, Any]) -> str | None:
    steps = spec["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    level = steps[-1]
    if level.get("type") != "ByteLevel" or level["add_prefix_space"] or len(steps) > 2:
        return None
    if len(steps) == 1:
        return GPT2 if level["use_regex"] else None
    split = steps[0]
    isolated = split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if isolated and not level["use_regex"] else None


_TOKEN = re.compile(r"\\p\{([CLMNPSZ][a-z]?)\}|\\(.)|(\(\?(?:i?:|!|=|>))|(.)", re.DOTALL)


def translate(pattern: str, *, unicode: bool) -> str | None:
    r"""Translate a pattern to Python's `re`, for ASCII or for text without characters of uncertain class.

    None = it contains more than is supported (captures, anchors, look-behind, nested classes, scripts, escapes except
    \p \s \S \r \n \t).
    """
    # `{1,3}+` is possessive in Python and a repetition in the library.
    if re.search(r"\d}\+", pattern):
        return None
    body, spaces = (_unicode_body, _ASCII_SPACES + _SPACES) if unicode else (_ascii_body, _ASCII_SPACES)
    out, inside = [], False
    for category, escaped, opening, plain in (match.groups() for match in _TOKEN.finditer(pattern)):
        if category or escaped in ("s", "S"):
            if escaped == "S" and inside:
                return None
            text = body(category) if category else spaces
            out.append(text if inside else f"[{'^' if escaped == 'S' else ''}{text}]")
        elif escaped:
            if escaped.isalnum() and escaped not in "rnt":
                return None
            out.append("\\" + escaped)
        elif opening:
            out.append(re.escape(opening) if inside else opening)
        elif plain in ("[&" if inside else "(.$") or (plain == "^" and not (inside and out[-1] == "[")):
            return None
        else:
            inside = plain == "[" or (inside and plain != "]")
            out.append(plain)
    return "".join(out)


_ASCII_SPACES = "\\t\\n\\x0b\\x0c\\r "
_SPACES = "\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"


def _ascii_body(category: str) -> str:
    ranges = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
    if category in ranges:
        return ranges[category]
    letters = (chr(c) for c in range(128))
    return _NEVER + "".join(re.escape(c) for c in letters if unicodedata.category(c).startswith(category))


@cache
def _certain_categories() -> dict[int, str]:
    """Return the category of every character that has kept it since Unicode 3.2.

    Python and the library agree on these, whatever their Unicode versions. U+017F is excluded: it equals "s" if case is
    ignored.
    """
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    pairs = ((c, old(chr(c)), new(chr(c))) for c in range(0x10000) if c != 0x17F)
    return {c: before for c, before, now in pairs if before == now and before not in ("Cn", "Co", "Cs")}


@cache
def _unicode_body(category: str) -> str:
    """Return the characters of a general category (`L`, `Lu`), as ranges for a character class."""
    points = [c for c, name in _certain_categories().items() if name.startswith(category)]
    return _NEVER + _ranges(points)


def _ranges(sorted_points: Sequence[int]) -> str:
    parts = []
    for _, run in groupby(enumerate(sorted_points), lambda pair: pair[1] - pair[0]):
        points = [point for _, point in run]
        parts.append(f"\\u{points[0]:04x}-\\u{points[-1]:04x}")
    return "".join(parts)


@cache
def _odd() -> re.Pattern[str]:
    return re.compile(f"[^{_ranges(list(_certain_categories()))}]")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern, unicode=True) or "")


def _lines(text: str) -> Iterator[str]:
    """Cut the text at sure ends of words: before a line end behind a letter or digit."""
    return iter(re.split(r"(?<=[^\W_])(?=\r?\n)", text))
