"""GGUF file as a model: its shape, its tokenizer, and its weights one tensor at a time.

A file is laid out before a byte is written, so its size is known, and appears complete or not at all.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from meshwright.formats.gguf.header import (
    ARRAY,
    BOOL,
    LONGEST_NAME,
    MAGIC,
    NUMBERS,
    STRING,
    GGUFHeader,
    Value,
    padded,
    read_gguf_parts,
)
from meshwright.formats.gguf.metadata import (
    ARCHITECTURES,
    FREQUENCIES,
    ROUTERS,
    architecture_of,
    frequency_factors,
    gguf_bindings,
    shape_keys,
    shape_of,
)
from meshwright.formats.gguf.vocabulary import TEMPLATE_KEY, TOOL_TEMPLATE_KEY, GGUFVocabulary, read_vocabulary
from meshwright.formats.hub.directory import partial_of, sync
from meshwright.formats.hub.weight_names import Binding
from meshwright.formats.safetensors import pieces
from meshwright.kernels.quantized.gguf_blocks import FLOAT_DTYPES, decode
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, FLOATS, BlockType

VERSION = 3
UINT32, INT32, FLOAT32, UINT64 = 4, 5, 6, 10
LARGEST = 2**32
F32 = BLOCK_TYPES["F32"]
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
"""Values of general.file_type, for files without codes."""
QUANTIZATION_VERSION = 2
"""Version of the layouts of blocks."""


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
        # Readers expect signed numbers in arrays.
        kind = INT32 if kind in (UINT32, UINT64) else kind
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
        # The last tensor may be written before others, and its padding never is.
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
        # The writer has synced the contents: after a power cut the name is that of a whole file or of none.
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """Opened file, with a checked header and every tensor of the shape in its size."""

    header: GGUFHeader
    shape: ModelShape
    vocabulary: GGUFVocabulary | None
    bound: Sequence[Binding] = field(repr=False)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.header.file

    @property
    def chat_template(self) -> str | None:
        """Jinja template of conversations. None = it has none."""
        return self._text(TEMPLATE_KEY)

    @property
    def tool_template(self) -> str | None:
        """Template of conversations with tools. None = it is the same one."""
        return self._text(TOOL_TEMPLATE_KEY)

    def _text(self, key: str) -> str | None:
        text = self.header.keys.get(key)
        return text if isinstance(text, str) else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices. For codes fp16, the dtype of their scales."""
        embedding = self.header.tensors["token_embd.weight"].kind.name
        return FLOAT_DTYPES.get(embedding, torch.float16)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors of each type."""
        names = [tensor.kind.name for tensor in self.header.tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by our names, restored and cast.

        Raises HubError if codes restore to NaN or infinity.
        """
        for binding in self.bound:
            stored = [self.header.tensors[name] for name in binding.theirs]
            tensors = [decode(blocks.kind.name, blocks.read()).view(blocks.size) for blocks in stored]
            for blocks, tensor in zip(stored, tensors, strict=True):
                # Numbers that are stored as such may be what was trained. Codes restore to NaN only when damaged.
                if blocks.kind.name not in FLOATS and not bool(tensor.isfinite().all()):
                    raise HubError(
                        f"{blocks.file}: {min(binding.theirs)} is infinite or NaN; copy or download it again"
                    )
            rows = [size[0] for size in binding.ours.values()]
            restored = binding.transform.restore(tensors, rows, self.shape)
            for name, tensor in zip(binding.ours, restored, strict=True):
                yield name, tensor.to(dtype)


def open_gguf(path: Path) -> GGUFModel:
    """Read everything but the weights. Raises HubError for a damaged, unsupported or inconsistent file."""
    header = read_gguf_parts(path)
    shape = shape_of(header)
    model = GGUFModel(
        header=header, shape=shape, vocabulary=read_vocabulary(header),
        bound=gguf_bindings(shape, ARCHITECTURES[str(header.keys["general.architecture"])]),
    )  # fmt: skip
    expected = {name: size for binding in model.bound for name, size in binding.theirs.items()}
    # Factors of rotary frequencies are no weight: `shape_of` has read and checked them.
    missing, extra = expected.keys() - header.tensors.keys(), header.tensors.keys() - expected.keys() - {FREQUENCIES}
    what = f"a {shape.family} of {shape.layers} layers"
    if missing:
        raise HubError(f"{path} lacks {len(missing)} tensors of {what}, first {min(missing)}")
    if extra:
        raise HubError(f"{path} holds {len(extra)} tensors that {what} does not have, first {min(extra)}")
    for name, size in expected.items():
        if header.tensors[name].size != size:
            raise HubError(f"{path}: {name} is {list(header.tensors[name].size)} where its keys say {list(size)}")
    return model


def stays_wide(name: str, size: Sequence[int]) -> bool:
    """Return True for a tensor that llama.cpp expects in fp32: norms, biases, routers and positions."""
    return len(size) == 1 or name.endswith(ROUTERS) or name == "position_embd.weight"


def planned_tensors(shape: ModelShape, kinds: dict[str, BlockType]) -> list[PlannedBlocks]:
    """Return every tensor of a file in order. `kinds` has the types of those that are not in fp32."""
    bound = gguf_bindings(shape, architecture_of(shape))
    planned = [
        PlannedBlocks(name=name, size=size, kind=kinds.get(name, F32))
        for binding in bound
        for name, size in binding.theirs.items()
    ]
    factors = frequency_factors(shape)
    if factors is not None:
        planned.insert(0, PlannedBlocks(name=FREQUENCIES, size=tuple(factors.shape), kind=F32))
    return planned


def general_keys(shape: ModelShape, name: str, file_type: int, *, quantized: bool) -> dict[str, Value]:
    """Return the keys of general.* and of the shape."""
    keys: dict[str, Value] = {
        "general.architecture": architecture_of(shape).name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
    }
    keys |= {"general.quantization_version": QUANTIZATION_VERSION} if quantized else {}
    return keys | shape_keys(shape)
