"""Encoder of fine-tuning rows into token ids with marks, run in an encoding process (data/corpus/worker.py).

A mark is one byte per token: its role (rendering.ROLES), and whether it is trained.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import Any

import tokenizers

from meshwright.data.chat import rendering, samples
from meshwright.data.chat.rendering import ROLES, Marked, Policy
from meshwright.data.chat.samples import Continuation, Conversation, Preference, TokenIds
from meshwright.data.chat.template import ChatTemplate
from meshwright.data.text.rows import Malformed, readable_location
from meshwright.data.tokens import word_encoder
from meshwright.spec.errors import DataError, MalformedRowError

TRAINED = 0x80
"""Bit of a mark for a trained token."""

_FAULT = struct.pack("<I", 2**32 - 1)
"""Prefix of a complaint about a row, in place of the number of groups."""
_AS_TRAINED = bytes(mark | TRAINED for mark in range(256))
_MOST_TOKENS = 2**26
"""Most tokens of a request: a template that writes endlessly may fill this process but not its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings that decide the tokens of a row besides the tokenizer, sent to encoding processes as JSON."""

    template: str
    special: Mapping[str, str]
    begins: Sequence[int]
    eos: int | None
    today: str
    train_on: str = "auto"
    thinking: str = "keep"
    tool_template: str = ""
    """Template for conversations with tools. Empty = the same."""
    template_file: str = ""
    """Origin of the template, for messages. Empty = the tokenizer."""

    @property
    def policy(self) -> Policy:
        """Choice of what is trained."""
        return Policy(train_on=self.train_on, thinking=self.thinking)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Ids as bytes of the tokenizer's dtype, and one mark per token."""

    ids: bytes
    marks: bytes


def row_encoder(tokenizer: tokenizers.Tokenizer, vocab: int, settings: SampleSettings) -> word_encoder.Encode:
    """Return an encoder of rows, given as JSON of [location, row], into packed samples or complaints."""
    encoder = _RowEncoder(tokenizer, vocab, settings)

    def encode(texts: Sequence[str], flags: bytes) -> list[bytes]:
        encoded, tokens = [], 0
        for text in texts:
            try:
                where, row = json.loads(text)
                groups = encoder(where, Malformed(row) if isinstance(row, str) else row)
            except MalformedRowError as error:  # the others are read, so that all are named; a template fails at once
                encoded.append(_FAULT + str(error).encode())
                continue
            tokens += sum(len(sample.marks) for group in groups for sample in group)
            if tokens > _MOST_TOKENS:
                raise DataError(
                    f"{len(texts)} rows become more than {_MOST_TOKENS:,} tokens, most of them by the chat template"
                )
            encoded.append(pack(groups))
        return encoded

    return encode


def pack(groups: Sequence[Sequence[EncodedSample]]) -> bytes:
    """Serialize the samples of a row. A preference is a group of two."""
    parts = [struct.pack("<I", len(groups))]
    for group in groups:
        parts.append(struct.pack("<I", len(group)))
        for sample in group:
            parts += [struct.pack("<II", len(sample.ids), len(sample.marks)), sample.ids, sample.marks]
    return b"".join(parts)


def unpack(data: bytes) -> list[list[EncodedSample]]:
    """Deserialize the output of `pack`. Raises MalformedRowError with the complaint about the row."""
    if data.startswith(_FAULT):
        raise MalformedRowError(data.removeprefix(_FAULT).decode())
    offset, groups = 4, []
    for _ in range(struct.unpack_from("<I", data)[0]):
        (count,) = struct.unpack_from("<I", data, offset)
        offset += 4
        group = []
        for _ in range(count):
            ids, marks = struct.unpack_from("<II", data, offset)
            begin, offset = offset + 8, offset + 8 + ids + marks
            group.append(EncodedSample(data[begin : begin + ids], data[begin + ids : offset]))
        groups.append(group)
    return groups


class _RowEncoder:
    """Encoder of single rows."""

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
        self._cuts = whole == [*parts[0], *parts[1]]  # some tokenizers put a space before each part

    def __call__(self, where: str, row: Mapping[str, Any] | Malformed) -> list[list[EncodedSample]]:
        """Encode a row. Raises DataError naming the location, or MalformedRowError if the row alone is at fault."""
        try:
            sample = samples.sample((where, row))
        except DataError as error:
            raise MalformedRowError(str(error)) from error
        try:
            if isinstance(sample, Preference):
                return [[self._encode_answer(part) for part in (sample.chosen, sample.rejected)]]
            return [[encoded] for encoded in self._encode_sample(sample)]
        except DataError as error:
            raise error.reworded(f"{readable_location(where)}: ") from error

    def _encode_answer(self, sample: Conversation | Continuation) -> EncodedSample:
        encoded = self._encode_sample(sample)
        if len(encoded) != 1:
            raise DataError(
                "the chat template rewrites earlier answers when others follow, so a preference can compare its "
                "last answer alone: give the turns before it as 'prompt'"
            )
        return encoded[0]

    def _encode_sample(self, sample: Conversation | Continuation | TokenIds) -> list[EncodedSample]:
        if isinstance(sample, TokenIds):
            return [self._take_ids(sample)]
        if isinstance(sample, Continuation):
            return [self._encode_marked(rendering.render_continuation(sample, self._settings.policy))]
        return [
            self._encode_marked(marked)
            for marked in rendering.render_conversation(sample, self._template, self._settings.policy)
        ]

    def _take_ids(self, sample: TokenIds) -> EncodedSample:
        outside = [token for token in sample.ids if not 0 <= token < self._vocab]
        if outside:
            raise MalformedRowError(f"token {outside[0]} is outside the tokenizer's vocabulary of {self._vocab:,}")
        labels = sample.labels or sample.ids
        return self._store_ids(sample.ids, bytes(TRAINED if label >= 0 else 0 for label in labels))

    def _encode_marked(self, marked: Marked) -> EncodedSample:
        ids: list[int] = []
        marks = bytearray()
        by_character = _mark_characters(marked)
        for begin, end in _cut_at_borders(marked, cut=self._cuts):
            part_ids, starts = self._encode(marked.text[begin:end])
            ids += part_ids
            marks += bytes(by_character[begin + start] for start in starts)
        if not marked.ends:
            self._add_ends(marked, ids, marks)
        self._check_ends(ids, marks)
        return self._store_ids(ids, bytes(marks))

    def _add_ends(self, marked: Marked, ids: list[int], marks: bytearray) -> None:
        """Add the tokens that begin and end a text, unless it has them, perhaps before a line end, or is cut."""
        before, eos = list(self._settings.begins), self._settings.eos
        if ids[: len(before)] != before:
            ids[:0] = before
            marks[:0] = bytes(len(before))
        if marked.is_cut or eos is None:
            return
        if not marked.text.rstrip().endswith(self._tokenizer.id_to_token(eos) or "\0"):
            ids.append(eos)
            marks.append(TRAINED)

    def _check_ends(self, ids: Sequence[int], marks: bytes | bytearray) -> None:
        """Raise MalformedRowError for a special token trained twice in a row: file and template both add it."""
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
        """Return the ids, and the character at which each begins."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # which one depends on the version of tokenizers
            raise MalformedRowError("the text holds half a surrogate pair, which is not valid Unicode") from None
        return encoding.ids, [begin for begin, _ in encoding.offsets]

    def _store_ids(self, ids: Sequence[int], marks: bytes) -> EncodedSample:
        from array import array

        return EncodedSample(array(self._bytes, ids).tobytes(), marks)


def _cut_at_borders(marked: Marked, *, cut: bool) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the parts of a text, cut where training begins.

    A model gets the words before as its prompt, so no token may cross the border. A tokenizer that cannot encode parts
    gets the whole text.
    """
    inside = (border for span in marked.trained for border in span) if cut else ()
    return pairwise(sorted({0, len(marked.text), *inside}))


def _mark_characters(marked: Marked) -> bytearray:
    """Return the mark of every character, and of the end."""
    marks = bytearray(len(marked.text) + 1)
    for (begin, end), role in marked.roles:
        marks[begin:end] = bytes([ROLES.index(role)]) * (end - begin)
    for begin, end in marked.trained:
        marks[begin:end] = marks[begin:end].translate(_AS_TRAINED)
    return marks
