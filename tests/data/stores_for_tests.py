"""Token stores of chosen tokens, written without the encoder, and their rows."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data import Tokenizer
from meshwright.data.sequences.stored_rows import StoredRows
from meshwright.data.stored.index import FORMAT, StoreIndex, index_bytes, read_index
from meshwright.data.stored.shard_cache import ShardCache, StoredStream
from meshwright.remote.locations import Location

VOCAB = 2**17
"""Ids take four bytes, so that each window can have a number of its own."""


def shard_bytes(tokens: NDArray[Any], starts: Sequence[int]) -> bytes:
    ids = tokens.astype("<u2" if len(tokens) and tokens.dtype.itemsize == 2 else "<u4").tobytes()
    return ids + bytes(-len(ids) % 8) + np.array(starts, "<i8").tobytes()


def write_store(folder: Path, shards: Sequence[NDArray[Any]], *, vocab: int = VOCAB, held: Sequence[Any] = ()) -> Path:
    """Write a finished store of shards with one document each."""
    (folder / "shards").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    tokenizer = Tokenizer.bytes()
    tokenizer.save(folder / "tokenizer")
    unit: dict[str, list[dict[str, Any]]] = {"train": [], "held": []}
    for side, arrays in (("train", shards), ("held", held)):
        for number, tokens in enumerate(arrays):
            content, name = shard_bytes(tokens, [0]), f"shards/{number:06d}-0.{side}"
            (folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            record = {"file": name, "sha256": digest, "bytes": len(content), "tokens": len(tokens)}
            unit[side].append({**record, "documents": 1, "text_bytes": len(tokens)})
    definition = {
        "format": FORMAT, "tokenizer": tokenizer.fingerprint, "vocab": vocab, "validation": 0.0, "source": "numbers",
    }  # fmt: skip
    (folder / "store.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "index.json").write_bytes(index_bytes(definition, [unit], {}))
    return folder


def numbered_shards(windows: Sequence[int], sequence: int) -> list[NDArray[np.uint32]]:
    """Tokens of shards whose windows all have a number of their own, which each of their tokens is."""
    firsts = np.cumsum(windows) - windows
    return [
        np.append(np.repeat(np.arange(first, first + number), sequence), 0).astype(np.uint32)
        for first, number in zip(firsts.tolist(), windows, strict=True)
    ]


def stored_rows(store: str, folder: Path, *, sequence: int, seed: int = 5, limit_bytes: int = 2**40) -> StoredRows:
    """Rows of a store, read as a new process would."""
    location = Location.at(store)
    index: StoreIndex = read_index(location)
    cache = ShardCache(location, index.train, index.vocab, folder, limit_bytes)
    stream = StoredStream(
        tokens=np.zeros(0, np.uint32), starts=np.zeros(0, np.int64), num_tokens=int(index.train.tokens.sum()),
        num_bytes=0, num_documents=0, cache=cache, shuffled_shards=index.shuffled_shards,
    )  # fmt: skip
    return StoredRows(stream, sequence=sequence, tokenizer_separator=True, seed=seed)
