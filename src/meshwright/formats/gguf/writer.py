"""Writer of a GGUF file. It is laid out before a byte is written, so its size is known, and appears complete or not."""

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

from meshwright.formats.gguf.header import (
    ARRAY,
    BOOL,
    LONGEST_NAME,
    MAGIC,
    NUMBERS,
    STRING,
    Value,
    padded,
)
from meshwright.formats.hub.directory import partial_of, sync
from meshwright.formats.safetensors.files import pieces
from meshwright.spec.errors import HubError
from meshwright.spec.weights.gguf_schemes import BlockType

VERSION = 3
UINT32, INT32, FLOAT32, UINT64 = 4, 5, 6, 10
LARGEST = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlocks:
    """Tensor that is to be written."""

    name: str
    size: tuple[int, ...]
    kind: BlockType

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return self.kind.num_bytes(self.size)


def gguf_bytes(keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> int:
    """Return the size of the whole file."""
    return len(header_bytes(keys, tensors)) + sum(padded(tensor.num_bytes) for tensor in tensors)


def header_bytes(keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> bytes:
    """Return everything before the data, which follows in the order of the tensors, each padded."""
    chunks = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(keys))]
    for name, setting in keys.items():
        kind, raw = _typed(setting)
        chunks.append(_text(name) + struct.pack("<I", kind) + raw)
    offset = 0
    for tensor in tensors:
        assert len(tensor.name.encode()) < LONGEST_NAME and tensor.kind.holds(tensor.size[-1])
        dims = struct.pack(f"<I{len(tensor.size)}Q", len(tensor.size), *reversed(tensor.size))
        chunks.append(_text(tensor.name) + dims + struct.pack("<IQ", tensor.kind.number, offset))
        offset += padded(tensor.num_bytes)
    raw = b"".join(chunks)
    return raw + bytes(padded(len(raw)) - len(raw))


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _typed(setting: Value) -> tuple[int, bytes]:
    """Return the type and the bytes of a key's value. Whole numbers are unsigned, with 32 bits where that is enough."""
    if isinstance(setting, str):
        return STRING, _text(setting)
    if isinstance(setting, list):
        kind = _typed(setting[0])[0] if setting else STRING
        kind = INT32 if kind in (UINT32, UINT64) else kind  # readers expect signed numbers in arrays
        return ARRAY, struct.pack("<IQ", kind, len(setting)) + b"".join(
            map(_text if kind == STRING else NUMBERS[kind].pack, setting)
        )
    if isinstance(setting, bool | float):
        kind = BOOL if isinstance(setting, bool) else FLOAT32
    else:
        kind = UINT32 if 0 <= setting < LARGEST else UINT64
    return kind, NUMBERS[kind].pack(setting)


class GGUFWriter:
    """Writer for tensors in any order, none of which waits in memory. Use inside `with fresh_file(path) as partial`."""

    def __init__(self, path: Path, keys: Mapping[str, Value], tensors: Sequence[PlannedBlocks]) -> None:
        raw = header_bytes(keys, tensors)
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115  (closed in __exit__)
        self.file.write(raw)
        self.waiting: dict[str, tuple[int, PlannedBlocks]] = {}
        offset = len(raw)
        for tensor in tensors:
            self.waiting[tensor.name] = (offset, tensor)
            offset += padded(tensor.num_bytes)
        self.file.truncate(offset)

    def write(self, name: str, raw: Tensor) -> None:
        """Write the bytes (..., bytes of a row) uint8 of one tensor. Raises HubError when it was written before."""
        if name not in self.waiting:
            raise HubError(f"{name} was given twice")
        offset, planned = self.waiting.pop(name)
        assert raw.numel() == planned.num_bytes and math.prod(raw.shape[:-1]) == math.prod(planned.size[:-1])
        self.file.seek(offset)
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
    """Yield a temporary path that becomes `path` at the end, or is removed on error. HubError when `path` exists."""
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
    sync(path.parent)
