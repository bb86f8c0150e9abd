"""A GGUF file: laid out before a byte is written, so that its size is known, and whole or not there."""

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from torch import Tensor

from meshwright.model.gguf.gguf_header import (
    ARRAY,
    BOOL,
    LONGEST_NAME,
    MAGIC,
    NUMBERS,
    STRING,
    Value,
    padded,
)
from meshwright.model.hub.directory import partial_of
from meshwright.model.hub.safetensors_files import pieces
from meshwright.spec.block_types import BlockType
from meshwright.spec.errors import HubError

VERSION = 3
UINT32, INT32, FLOAT32, UINT64 = 4, 5, 6, 10
LARGEST = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlocks:
    """A tensor that is to be written."""

    name: str
    size: tuple[int, ...]
    kind: BlockType

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return self.kind.num_bytes(self.size)


def gguf_bytes(keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> int:
    """Of the whole file."""
    return len(header_bytes(keys, tensors)) + sum(padded(one.num_bytes) for one in tensors)


def header_bytes(keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> bytes:
    """Everything before the data, which lies in the order of the tensors, each padded."""
    found = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(keys))]
    found += [_text(name) + _value(value) for name, value in keys.items()]
    offset = 0
    for one in tensors:
        assert len(one.name.encode()) < LONGEST_NAME and one.kind.holds(one.size[-1])
        dims = struct.pack(f"<I{len(one.size)}Q", len(one.size), *reversed(one.size))
        found.append(_text(one.name) + dims + struct.pack("<IQ", one.kind.number, offset))
        offset += padded(one.num_bytes)
    raw = b"".join(found)
    return raw + bytes(padded(len(raw)) - len(raw))


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Value) -> int:
    """The type of a value in a file: whole numbers are unsigned with 32 bits where that is enough."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return STRING
    if isinstance(value, float):
        return FLOAT32
    if isinstance(value, list):
        return ARRAY
    return UINT32 if 0 <= value < LARGEST else UINT64


def _value(value: Value) -> bytes:
    kind = _kind(value)
    return struct.pack("<I", kind) + (_items(value) if isinstance(value, list) else _plain(value, kind))


def _plain(value: bool | int | float | str, kind: int) -> bytes:
    return _text(value) if isinstance(value, str) else struct.pack("<" + NUMBERS[kind], value)


def _items(values: list[bool | int | float | str]) -> bytes:
    """Of one type; whole numbers are signed with 32 bits, as readers of token types expect. None: an array of texts."""
    kind = _kind(values[0]) if values else STRING
    kind = INT32 if kind in (UINT32, UINT64) else kind
    return struct.pack("<IQ", kind, len(values)) + b"".join(_plain(one, kind) for one in values)


class GGUFWriter:
    """Tensors may come in any order, and none waits in memory. `with fresh_file(path) as partial` around it."""

    def __init__(self, path: Path, keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> None:
        raw = header_bytes(keys, tensors)
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115  (closed in __exit__)
        self.file.write(raw)
        self.waiting: dict[str, tuple[int, PlannedBlocks]] = {}
        place = len(raw)
        for one in tensors:
            self.waiting[one.name] = (place, one)
            place += padded(one.num_bytes)
        self.file.truncate(place)

    def write(self, name: str, raw: Tensor) -> None:
        """The bytes (..., bytes of a row) uint8 of one tensor. HubError where it was written before."""
        if name not in self.waiting:
            raise HubError(f"{name} was given twice")
        place, planned = self.waiting.pop(name)
        assert raw.numel() == planned.num_bytes and math.prod(raw.shape[:-1]) == math.prod(planned.size[:-1])
        self.file.seek(place)
        self.file.writelines(pieces(raw))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.waiting:
                raise HubError(f"{len(self.waiting)} tensors were not given, first {next(iter(self.waiting))}")
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            self.file.close()


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A file beside the wanted one that takes its name at the end, durably; gone on any error. HubError where one is
    there already."""
    if path.exists():
        raise HubError(f"{path} is there already: take another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
