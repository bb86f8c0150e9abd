"""Header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), from untrusted sources.

    "GGUF", version u32, tensors u64, keys u64
    keys      name, type u32, value; a string is its length u64 and UTF-8; an array its type u32, length u64, items
    tensors   name, dims u32, each u64, fastest first; type u32; offset u64 from the start of the data
    data      at the next multiple of the alignment

This module parses keys and tensors; metadata.py maps the keys to a shape. Every count is compared with the
remaining bytes before anything of that size is allocated. Why this is not the `gguf` package:
docs/decisions/0064-readers-of-our-own.md.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from meshwright.spec.errors import HubError
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, OTHER_TYPES, BlockType

if TYPE_CHECKING:
    from torch import Tensor

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
LARGEST_ALIGNMENT = 2**20
MOST_DIMS, LONGEST_NAME = 4, 64
"""llama.cpp's limits. A name ends with a zero byte there."""
LONGEST_KEY = 2**16 - 1
MOST_HEADER_BYTES, MOST_ITEMS = 2**27, 2**24
"""Limits that no vocabulary reaches. A file that claims more would fill the memory."""
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: Mapping[int, struct.Struct] = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
"""Types of values that have one size."""
U32, U64 = NUMBERS[4], NUMBERS[10]
LEAST_TENSOR_BYTES, LEAST_KEY_BYTES = 8 + 4 + 8 + 4 + 8, 8 + 4 + 1
COUNT_KEY, NUMBER_KEY, TENSORS_KEY = "split.count", "split.no", "split.tensors.count"
"""Keys of a file in parts."""
PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
Value = bool | int | float | str | list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """Location of a tensor in a file."""

    file: Path
    start: int
    """Offset of its first byte."""
    size: tuple[int, ...]
    """Size in numbers, the fastest dim last."""
    kind: BlockType

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return self.kind.num_bytes(self.size)

    def read(self) -> "Tensor":
        """Read the bytes (..., bytes of a row) uint8. Raises HubError when the file was truncated."""
        # Here, since it loads torch, which a header does not need.
        from meshwright.formats.safetensors import read_bytes

        return read_bytes(self.file, self.start, self.num_bytes).view(*self.size[:-1], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """Keys and tensors of a file, without its data."""

    file: Path
    keys: Mapping[str, Value]
    tensors: Mapping[str, StoredBlocks]


def is_gguf(path: Path) -> bool:
    """Return True if the name or the first bytes of a file say that it is GGUF."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of one file, which may be a part of several. Raises HubError for an unsupported file."""
    if not path.is_file():
        raise HubError(f"{path} is no file: give a .gguf")
    with open(path, "rb") as file:
        return _HeaderReader(path, file, path.stat().st_size).header()


def read_gguf_parts(path: Path) -> GGUFHeader:
    """Read the header of a whole file, or of its first part with the tensors of all parts.

    Parts are named as llama-gguf-split does: NAME-00001-of-00003.gguf. The first has the keys of the model. Raises
    HubError as read_gguf_header does, for another part than the first, and for a part that is missing or of another
    file.
    """
    first = read_gguf_header(path)
    count = int_or(first.keys.get(COUNT_KEY), 1)
    if count <= 1:
        return first
    # The names of the other parts follow from this one, so it must be in llama-gguf-split's form.
    name_match = PART_NAME.fullmatch(path.name)
    number = int_or(first.keys.get(NUMBER_KEY), 0)
    if name_match is None or int(name_match["count"]) != count or int(name_match["number"]) != number + 1:
        raise HubError(
            f"{path} is part {number + 1} of {count}, but its name does not say so: rename it, as "
            f"NAME-00001-of-{count:05}.gguf"
        )
    names = [path.with_name(f"{name_match['name']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number:
        raise HubError(f"{path} is part {number + 1} of {count}: give the first, {names[0].name}")
    missing = [part.name for part in names if not part.is_file()]
    if missing:
        raise HubError(f"{path} has {count} parts, and {missing[0]} is not beside it: copy or download it")
    tensors = dict(first.tensors)
    for index, part in enumerate(names[1:], start=1):
        tensors |= _read_part(part, index, count, tensors)
    expected = int_or(first.keys.get(TENSORS_KEY), len(tensors))
    if len(tensors) != expected:
        raise HubError(
            f"{path} and its parts hold {len(tensors)} tensors, and {expected} belong there: a part is of "
            "another file. Download all parts again"
        )
    return replace(first, tensors=tensors)


def _read_part(path: Path, index: int, count: int, known: Mapping[str, StoredBlocks]) -> Mapping[str, StoredBlocks]:
    header = read_gguf_header(path)
    stated = int_or(header.keys.get(NUMBER_KEY), -1), int_or(header.keys.get(COUNT_KEY), -1)
    if stated != (index, count):
        raise HubError(
            f"{path}: the header says part {stated[0] + 1} of {stated[1]}, and the file name says {index + 1} of "
            f"{count}: download the file again, under its own name"
        )
    twice = sorted(header.tensors.keys() & known.keys())
    if twice:
        raise HubError(f"{path} holds {twice[0]}, which a part before it holds: a part is of another file")
    return header.tensors


class _HeaderReader:
    """Position in a file, with checks against its remaining length. A vocabulary is 400,000 calls of `text`."""

    def __init__(self, path: Path, file: BinaryIO, length: int) -> None:
        self.path, self.file, self.length, self.position = path, file, length, 0

    @property
    def left(self) -> int:
        return self.length - self.position

    def damaged(self, what: str) -> HubError:
        return HubError(f"{self.path}: {what}; copy or download it again")

    def take(self, count: int, what: str) -> bytes:
        self.position += count
        if self.position > min(self.length, MOST_HEADER_BYTES):
            self.position -= count
            if count <= self.left:
                raise self.damaged(f"its header is longer than {MOST_HEADER_BYTES} bytes")
            raise self.damaged(f"{what} needs {count} bytes and {self.left} are left: the file is truncated or damaged")
        return self.file.read(count)

    def number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.take(kind.size, what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        (count,) = U64.unpack(self.take(8, what))
        most = self.left if most is None else most
        if count > most:
            raise self.damaged(f"{what} has {count} bytes, and at most {most} are possible")
        try:
            return self.take(count, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is no UTF-8") from None

    def counted(self, least: int, what: str) -> int:
        """Read the number of things that have at least `least` bytes each."""
        count: int = self.number(U64, f"the number of {what}")
        # Before a list of that length is made.
        if count * least > self.left or count > MOST_ITEMS:
            raise self.damaged(f"it claims {count} {what}, and has {self.left} bytes left for them")
        return count

    def header(self) -> GGUFHeader:
        self.check_kind()
        num_tensors = self.counted(LEAST_TENSOR_BYTES, "tensors")
        count = self.counted(LEAST_KEY_BYTES, "keys")
        keys: dict[str, Value] = {}
        for _ in range(count):
            name = self.text("the name of a key", LONGEST_KEY)
            if not name or name in keys:
                raise self.damaged(f"key {name!r} is {'there twice' if name else 'without a name'}")
            keys[name] = self.read_value(name)
        tensors_by_name: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for _ in range(num_tensors):
            name = self.text("the name of a tensor", LONGEST_NAME - 1)
            if not name or name in tensors_by_name:
                raise self.damaged(f"tensor {name!r} is {'there twice' if name else 'without a name'}")
            tensors_by_name[name] = self.tensor(name)
        return GGUFHeader(file=self.path, keys=keys, tensors=self.locate_tensors(tensors_by_name, self.alignment(keys)))

    def check_kind(self) -> None:
        if self.length < 4 or self.take(4, "the first word") != MAGIC:
            raise HubError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        raw = self.take(4, "the version")
        version = int.from_bytes(raw, "little")
        # The version is a small number, so it shows in which order the bytes are.
        if int.from_bytes(raw, "big") in (1, *VERSIONS):
            raise HubError(f"{self.path} is big-endian, which is not supported: convert it (gguf-convert-endian)")
        if version not in VERSIONS:
            raise HubError(f"{self.path} is GGUF version {version} (supported: {VERSIONS[0]} and {VERSIONS[1]})")

    def read_value(self, name: str) -> Value:
        kind = self.number(U32, f"the type of {name}")
        if kind == STRING:
            return self.text(name)
        if kind == ARRAY:
            return self.array(name)
        if kind not in NUMBERS:
            raise self.damaged(f"key {name} has type {kind}, which does not exist")
        number: Value = self.number(NUMBERS[kind], name)
        return number

    def array(self, name: str) -> list[Any]:
        kind = self.number(U32, f"the type of the items of {name}")
        if kind == STRING:
            what = f"an item of {name}"
            return [self.text(what) for _ in range(self.counted(8, f"items of {name}"))]
        if kind not in NUMBERS:
            raise self.damaged(f"key {name} is an array of type {kind}, which is not possible")
        number = NUMBERS[kind]
        count = self.counted(number.size, f"items of {name}")
        return [value for (value,) in number.iter_unpack(self.take(count * number.size, name))]

    def tensor(self, name: str) -> tuple[tuple[int, ...], BlockType, int]:
        count = self.number(U32, f"the dims of {name}")
        if not 1 <= count <= MOST_DIMS:
            raise self.damaged(f"tensor {name} has {count} dims, and 1 to {MOST_DIMS} are possible")
        dims = [self.number(U64, f"a dim of {name}") for _ in range(count)]
        number, offset = self.number(U32, f"the type of {name}"), self.number(U64, f"the offset of {name}")
        kind = next((block_type for block_type in BLOCK_TYPES.values() if block_type.number == number), None)
        if kind is None:
            known = OTHER_TYPES.get(number)
            if known is None:
                raise self.damaged(f"tensor {name} has type {number}, which does not exist")
            raise HubError(f"{self.path}: tensor {name} is {known} (supported: {', '.join(BLOCK_TYPES)})")
        # Python integers do not overflow, so a product of hostile dims is caught here.
        if not 0 < math.prod(dims) < 2**62:
            raise self.damaged(f"tensor {name} has dims {dims}, which no file holds")
        if dims[0] % kind.block:
            raise self.damaged(
                f"tensor {name} has rows of {dims[0]} numbers, no multiple of {kind.name}'s {kind.block}"
            )
        # ggml names the fastest dim first, torch last.
        return tuple(reversed(dims)), kind, offset

    def alignment(self, keys: Mapping[str, Value]) -> int:
        alignment = keys.get(ALIGNMENT_KEY, ALIGNMENT)
        possible = (
            isinstance(alignment, int) and not isinstance(alignment, bool) and 8 <= alignment <= LARGEST_ALIGNMENT
        )
        # A power of two has no bit in common with the number before it.
        if not possible or int_or(alignment, 0) & (int_or(alignment, 0) - 1):
            raise self.damaged(
                f"{ALIGNMENT_KEY} is {alignment!r}, and must be a power of 2 from 8 to {LARGEST_ALIGNMENT}"
            )
        return int_or(alignment, ALIGNMENT)

    def locate_tensors(
        self, declared: Mapping[str, tuple[tuple[int, ...], BlockType, int]], alignment: int
    ) -> dict[str, StoredBlocks]:
        """Compute the location of each tensor. None may end after the file or overlap another."""
        base = padded(self.file.tell(), alignment)
        tensors, before, end = {}, "the header", 0
        # In order of offsets, one comparison with the tensor before finds every overlap.
        for name, (size, kind, offset) in sorted(declared.items(), key=lambda item: item[1][2]):
            if offset % alignment:
                raise self.damaged(f"tensor {name} is at {offset}, no multiple of {alignment}")
            if offset < end:
                raise self.damaged(f"tensor {name} begins at {offset}, inside {before}, which ends at {end}")
            before, end = name, offset + kind.num_bytes(size)
            if base + end > self.length:
                raise self.damaged(
                    f"tensor {name} ends at {base + end}, and the file at {self.length}: it is truncated or damaged"
                )
            tensors[name] = StoredBlocks(file=self.path, start=base + offset, size=size, kind=kind)
        # In the order of the header again, which is that of the layers.
        return {name: tensors[name] for name in declared}


def padded(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of the alignment."""
    return -(-offset // alignment) * alignment


def int_or(value: object, absent: int) -> int:
    """Return a whole number, or `absent` for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else absent


def required_value(header: GGUFHeader, name: str, check: Callable[[object], bool], what: str) -> Any:
    """Return the value of a required key. Raises HubError with the expected kind of value."""
    if name not in header.keys:
        raise HubError(f"{header.file} has no key {name}, which must be {what}")
    stored_value = header.keys[name]
    if not check(stored_value):
        shown = repr(stored_value) if len(repr(stored_value)) <= 60 else type(stored_value).__name__
        raise HubError(f"{header.file}: key {name} is {shown}, and must be {what}")
    return stored_value
