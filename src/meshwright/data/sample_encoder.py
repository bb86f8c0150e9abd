"""Rows of a fine-tuning file -> token ids with their marks, in an encoding process (data/worker.py).

A mark is a byte a token: who says it (rendering.ROLES), and whether it is trained.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from typing import Any

import tokenizers

from meshwright.data import rendering, samples, word_encoder
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.rendering import ROLES, Marked, Policy
from meshwright.data.rows import Malformed, spoken
from meshwright.data.samples import Continuation, Conversation, Preference, TokenIds
from meshwright.spec.errors import DataError, MalformedRowError

TRAINED = 0x80
"""Bit of a mark."""

_FAULT = struct.pack("<I", 2**32 - 1)
"""Begins, in place of the number of groups, what is said of a row that is no sample."""
_AS_TRAINED = bytes(mark | TRAINED for mark in range(256))
_MOST_TOKENS = 2**26
"""Of the rows of one request: a template that writes without end may fill this process and not its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """What decides the tokens of a row beside the tokenizer; goes to encoding processes as JSON."""

    template: str
    special: Mapping[str, str]
    begins: Sequence[int]
    eos: int | None
    today: str
    train_on: str = "auto"
    thinking: str = "keep"
    tool_template: str = ""
    """Of conversations with tools; empty = as others."""
    template_file: str = ""
    """Where the template comes from, for messages; empty = with the tokenizer."""

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return Policy(train_on=self.train_on, thinking=self.thinking)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Ids as the bytes of the tokenizer's dtype, and a mark a token."""

    ids: bytes
    marks: bytes


def row_encoder(tokenizer: tokenizers.Tokenizer, vocab: int, settings: SampleSettings) -> word_encoder.Encode:
    """(JSON of [place, row] each, flags that are not read) -> each row's samples, packed. In place of a row that cannot
    be read stands what is wrong with it."""
    encoder = _RowEncoder(tokenizer, vocab, settings)

    def encode(texts: Sequence[str], flags: bytes) -> list[bytes]:
        found, tokens = [], 0
        for text in texts:
            try:
                where, row = json.loads(text)
                groups = encoder(where, Malformed(row) if isinstance(row, str) else row)
            except MalformedRowError as error:  # the others are read, so that all are named; a template fails at once
                found.append(_FAULT + str(error).encode())
                continue
            tokens += sum(len(one.marks) for group in groups for one in group)
            if tokens > _MOST_TOKENS:
                raise DataError(
                    f"{len(texts)} rows become more than {_MOST_TOKENS:,} tokens, most of them by the chat template"
                )
            found.append(pack(groups))
        return found

    return encode


def pack(groups: Sequence[Sequence[EncodedSample]]) -> bytes:
    """Samples of a row as bytes: a preference is a group of two."""
    parts = [struct.pack("<I", len(groups))]
    for group in groups:
        parts.append(struct.pack("<I", len(group)))
        for one in group:
            parts += [struct.pack("<II", len(one.ids), len(one.marks)), one.ids, one.marks]
    return b"".join(parts)


def unpack(data: bytes) -> list[list[EncodedSample]]:
    """What `pack` made. MalformedRowError: what is wrong with the row."""
    if data.startswith(_FAULT):
        raise MalformedRowError(data.removeprefix(_FAULT).decode())
    place, groups = 4, []
    for _ in range(struct.unpack_from("<I", data)[0]):
        (count,) = struct.unpack_from("<I", data, place)
        place += 4
        group = []
        for _ in range(count):
            ids, marks = struct.unpack_from("<II", data, place)
            begin, place = place + 8, place + 8 + ids + marks
            group.append(EncodedSample(data[begin : begin + ids], data[begin + ids : place]))
        groups.append(group)
    return groups


class _RowEncoder:
    """Encodes one row after the other."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab: int, settings: SampleSettings) -> None:
        tokenizer.encode_special_tokens = False  # what a template writes is read as tokens
        self._tokenizer, self._settings = tokenizer, settings
        self._vocab = vocab
        self._bytes = "H" if word_encoder.id_bytes(vocab) == 2 else "I"
        name = f"the chat template {settings.template_file}".rstrip()
        day, with_tools = date.fromisoformat(settings.today), settings.tool_template
        self._template = ChatTemplate(settings.template, settings.special, day, name, with_tools)
        added, unknown = tokenizer.get_added_tokens_decoder(), getattr(tokenizer.model, "unk_token", None)
        self._special = {id for id, token in added.items() if token.special and token.content != unknown}
        self._blank = {self._encode(blank)[0][0] for blank in ("\n", "\n\n", " ") if len(self._encode(blank)[0]) == 1}
        whole, *parts = (self._encode(text)[0] for text in ("a\nb", "a\n", "b"))
        self._cuts = whole == [*parts[0], *parts[1]]
        """Whether a text may be encoded in parts: a tokenizer may put a space before each."""

    def __call__(self, where: str, row: Mapping[str, Any] | Malformed) -> list[list[EncodedSample]]:
        """DataError names the place; MalformedRowError where the row alone is at fault."""
        try:
            sample = samples.sample((where, row))
        except DataError as error:
            raise MalformedRowError(str(error)) from error
        try:
            if isinstance(sample, Preference):
                return [[self._answer(part) for part in (sample.chosen, sample.rejected)]]
            return [[one] for one in self._one(sample)]
        except DataError as error:
            raise type(error)(f"{spoken(where)}: {error}") from error

    def _answer(self, sample: Conversation | Continuation) -> EncodedSample:
        """One answer of a preference."""
        found = self._one(sample)
        if len(found) != 1:
            raise DataError(
                "the chat template rewrites earlier answers when others follow, so a preference can compare its "
                "last answer alone: give the turns before it as 'prompt'"
            )
        return found[0]

    def _one(self, sample: Conversation | Continuation | TokenIds) -> list[EncodedSample]:
        if isinstance(sample, TokenIds):
            return [self._given(sample)]
        if isinstance(sample, Continuation):
            return [self._marked(rendering.continuation(sample, self._settings.policy))]
        return [self._marked(one) for one in rendering.conversation(sample, self._template, self._settings.policy)]

    def _given(self, sample: TokenIds) -> EncodedSample:
        outside = [token for token in sample.ids if not 0 <= token < self._vocab]
        if outside:
            raise MalformedRowError(f"token {outside[0]} is outside the tokenizer's vocabulary of {self._vocab:,}")
        labels = sample.labels or sample.ids
        return self._made(sample.ids, bytes(TRAINED if label >= 0 else 0 for label in labels))

    def _marked(self, marked: Marked) -> EncodedSample:
        ids: list[int] = []
        marks = bytearray()
        by_character = _painted(marked)
        for begin, end in _parts(marked, cut=self._cuts):
            found, places = self._encode(marked.text[begin:end])
            ids += found
            marks += bytes(by_character[begin + place] for place in places)
        if not marked.ends:
            self._put_marks(marked.text, ids, marks)
        self._check_ends(ids, marks)
        return self._made(ids, bytes(marks))

    def _put_marks(self, text: str, ids: list[int], marks: bytearray) -> None:
        """The tokens that begin and end a text, unless they stand there already: a rendered conversation may have a
        line end behind its last one."""
        before, eos = list(self._settings.begins), self._settings.eos
        if ids[: len(before)] != before:
            ids[:0] = before
            marks[:0] = bytes(len(before))
        if eos is not None and not text.rstrip().endswith(self._tokenizer.id_to_token(eos) or "\0"):
            ids.append(eos)
            marks.append(TRAINED)

    def _check_ends(self, ids: Sequence[int], marks: bytes | bytearray) -> None:
        """A special token that is trained twice in a row, or with blanks between: a file spells what the template
        adds."""
        before = None
        for token, mark in zip(ids, marks, strict=True):
            if token in self._special and mark & TRAINED:
                if token == before:
                    spelled = self._tokenizer.id_to_token(token)
                    raise MalformedRowError(
                        f"{spelled} ends a turn twice: the file spells it and the template adds it; remove it from the "
                        "file"
                    )
                before = token
            elif token not in self._blank:
                before = None

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, and the character that each begins at."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # which one depends on the version of tokenizers
            raise MalformedRowError("the text holds half a surrogate pair, which is not valid Unicode") from None
        return found.ids, [begin for begin, _ in found.offsets]

    def _made(self, ids: Sequence[int], marks: bytes) -> EncodedSample:
        from array import array

        return EncodedSample(array(self._bytes, ids).tobytes(), marks)


def _parts(marked: Marked, *, cut: bool) -> Iterator[tuple[int, int]]:
    """(begin, end) of the text in parts, cut where training begins: a model is asked with the words before, so that no
    token may reach across. A tokenizer that cannot be given parts gets the whole."""
    inside = (place for span in marked.trained for place in span) if cut else ()
    return pairwise(sorted({0, len(marked.text), *inside}))


def _painted(marked: Marked) -> bytearray:
    """The mark of every character, and of what comes behind the last."""
    marks = bytearray(len(marked.text) + 1)
    for (begin, end), role in marked.said:
        marks[begin:end] = bytes([ROLES.index(role)]) * (end - begin)
    for begin, end in marked.trained:
        marks[begin:end] = marks[begin:end].translate(_AS_TRAINED)
    return marks


Make = Callable[[tokenizers.Tokenizer, int], word_encoder.Encode]


def from_json(text: str) -> Make:
    """The encoder of settings that came as JSON."""
    return partial(row_encoder, settings=SampleSettings(**json.loads(text)))
