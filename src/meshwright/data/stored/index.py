"""Index of a token store: what its shards hold, by which tokenizer, and what is missing.

    STORE/store.json            what is encoded and how, written by the first worker
    STORE/tokenizer/            tokenizer.json and the files beside it
    STORE/shards/000012-0.train   ids, padded to 8 bytes, and the first token of each document as int64
    STORE/shards/000012-0.held    the same of held-out documents
    STORE/units/000012.json     after a unit of the text: its shards. Without it they do not count
    STORE/index.json            after all units: their shards, column by column, in order

All files but the first are the same whichever worker makes them, and however often.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.remote.locations import Location
from meshwright.spec.errors import DataError, printable

FORMAT: Final = "meshwright-tokens-1"
SHUFFLED_SHARDS: Final = 16
"""Shards whose windows are shuffled together. Recorded in each index, since the order of a run depends on it."""
SIDES: Final = ("train", "held")
ALIGNED: Final = 8
"""Bytes to which ids are padded, so that the starts behind them can be read in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shards of one side, as columns."""

    file: tuple[str, ...]
    """Name below the store."""
    sha256: tuple[str, ...]
    bytes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    """UTF-8 bytes of the text, without marks."""

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> "Shards":
        """Return the columns of an index. Raises KeyError, TypeError, ValueError for others."""
        names: dict[str, Any] = {name: tuple(map(str, columns[name])) for name in ("file", "sha256")}
        counted = ("bytes", "tokens", "documents", "text_bytes")
        numbers: dict[str, Any] = {name: np.array(columns[name], np.int64) for name in counted}
        if len({len(column) for column in (*names.values(), *numbers.values())}) > 1:
            raise ValueError("columns of different lengths")
        return cls(**names, **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """Contents of a finished store."""

    train: Shards
    held: Shards
    tokenizer: str
    """Fingerprint of its tokenizer."""
    vocab: int
    validation: float
    """Share of the documents that are held out."""
    shuffled_shards: int
    malformed: Mapping[str, Any]
    """Fields of MalformedRows."""
    fingerprint: str
    """Hash of the index: equal ones mean equal tokens in an equal order."""


def read_document(location: Location) -> dict[str, Any] | None:
    """Return the object in a JSON file. None = there is none, or it was not written to its end."""
    try:
        document = json.loads(location.read())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def index_bytes(
    definition: Mapping[str, Any], units: Sequence[Mapping[str, Any]], malformed: Mapping[str, Any]
) -> bytes:
    """Return index.json of a store from the records of all its units, in order."""
    sides = {
        side: {column.name: [shard[column.name] for unit in units for shard in unit[side]] for column in fields(Shards)}
        for side in SIDES
    }
    keys = ("format", "tokenizer", "vocab", "validation", "source")
    document = {key: definition[key] for key in keys}
    document |= {"shuffled_shards": SHUFFLED_SHARDS, "malformed": malformed, **sides}
    return json.dumps(document, separators=(",", ":")).encode()


def read_index(location: Location) -> StoreIndex:
    """Read the index of a store. Raises DataError for one that is not finished, damaged, or of a newer version."""
    try:
        content = (location / "index.json").read()
    except FileNotFoundError:
        raise DataError(
            f"{location} is not finished: run `meshwright data prepare` with the words that began it, each part once"
        ) from None
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
            raise DataError(f"{location} is a store of format {document['format']}, and this version reads {FORMAT}")
        return StoreIndex(
            train=Shards.of_columns(document["train"]),
            held=Shards.of_columns(document["held"]),
            **{key: document[key] for key in ("tokenizer", "vocab", "validation", "shuffled_shards")},
            malformed=document["malformed"],
            fingerprint=hashlib.blake2b(content, digest_size=20).hexdigest(),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{location}/index.json is damaged ({error}): {_REMEDY.format('index.json')}") from error


_REMEDY: Final = "remove {} there if it exists, and run `meshwright data prepare` again, which makes only that anew"


def damaged(location: Location, file: str, fault: str) -> DataError:
    """Return the error for a shard that is missing or changed."""
    return DataError(f"{location}/{file} {fault}: {_REMEDY.format(printable(file))}")


def check_files(location: Location, index: StoreIndex) -> None:
    """Raise DataError for the first shard that is missing or cut off. Contents are checked when a shard is opened."""
    sizes = location.list_sizes()
    for shards in (index.train, index.held):
        for file, size in zip(shards.file, shards.bytes.tolist(), strict=True):
            if file not in sizes:
                raise damaged(location, file, "is missing")
            if sizes[file] != size:
                raise damaged(location, file, f"is damaged: it has {sizes[file]:,} bytes of {size:,}")
