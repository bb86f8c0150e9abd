"""Safetensors files, read and written one tensor at a time: 8 bytes of length, a JSON header, the tensors' bytes.

Checkpoints use these headers and bytes too (store/checkpoint_files.py). Headers are checked before any data is read.
Format: https://github.com/huggingface/safetensors.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from meshwright.spec.errors import HubError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
"""Names of dtypes in a header."""
PIECE_BYTES = 32 * 2**20
"""Bytes copied from a GPU at once."""
_LARGEST_HEADER_BYTES = 100_000_000
_LARGEST_INDEX_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Location of one tensor, `start` bytes into a file."""

    file: Path
    start: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return math.prod(self.size) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the tensor into newly allocated memory."""
        return read_bytes(self.file, self.start, self.num_bytes).view(self.dtype).view(self.size)


def read_bytes(path: Path, start: int, count: int) -> Tensor:
    """Read bytes (count,) uint8 from a position. Raises HubError when the file was truncated since its header."""
    raw = torch.empty(count, dtype=torch.uint8)
    # Into torch's own memory: `file.read` would hold the bytes twice.
    with open(path, "rb") as file:
        file.seek(start)
        if file.readinto(raw.numpy().data) != count:
            raise HubError(f"{path} ends too early: it is truncated; copy or download it again")
    return raw


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a directory by name, over all its shards. Raises HubError for missing or damaged files."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        index = _find_only_file(folder)
        if index.suffix == ".safetensors":
            return read_header(index)
    file_of = _read_weight_map(index)
    files = sorted(set(file_of.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise HubError(
            f"{folder} lacks {len(missing)} of {len(files)} shards, first {missing[0]}: copy or download it again"
        )
    # All headers are read before any tensor, so a damaged shard fails early.
    headers = {file: read_header(folder / file) for file in files}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise HubError(
                f"{folder / file} lacks {name}, which {index.name} puts there: the files do not belong together"
            )
    return {name: headers[file][name] for name, file in file_of.items()}


def _find_only_file(folder: Path) -> Path:
    """Return the only index, or else the only file, of a writer with other names: gptq_model-4bit-128g.safetensors."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        names = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith("adapter_"))
        if len(names) == 1:
            return names[0]
        if names:
            raise HubError(
                f"{folder} has neither {SINGLE} nor {INDEX}, and {len(names)} other files, as {names[0].name}: "
                "download the index, or leave one file"
            )
    pickles = sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise HubError(
            f"{folder} holds its weights only as pickles ({pickles[0].name}), which may run code when loaded: "
            "get its safetensors, or convert them first"
        )
    raise HubError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to read")


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > _LARGEST_INDEX_BYTES:
        raise HubError(f"{path} has {path.stat().st_size:,} bytes, and at most {_LARGEST_INDEX_BYTES:,} are read")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # A file name with a folder in it could lead out of the directory.
        plain = all(isinstance(name, str) and Path(file).name == file for name, file in weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{path} is not an index of shards ({error}): copy or download it again") from error
    if not plain or not weight_map:
        raise HubError(f"{path}: weight_map must pair names of tensors with names of files beside it")
    return dict(weight_map)


def read_header(path: Path) -> dict[str, Stored]:
    """Return every tensor of one file."""
    length = path.stat().st_size
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        # A hostile size must not make the read below allocate it.
        if length < 8 or size > min(length - 8, _LARGEST_HEADER_BYTES):
            raise HubError(f"{path} is truncated or no safetensors file: copy or download it again")
        raw = file.read(size)
    try:
        entries = json.loads(raw)
        tensors = {
            name: _parse_entry(path, 8 + size, entry) for name, entry in entries.items() if name != "__metadata__"
        }
        _check_order(tensors, 8 + size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{path} has a damaged header ({error}): copy or download it again") from error
    # Tensors are contiguous (checked above), so the last end must be the end of the file.
    end = max((stored.start + stored.num_bytes for stored in tensors.values()), default=8 + size)
    if end != length:
        raise HubError(
            f"{path} is truncated: it has {length} bytes, and its header says {end}. Copy or download it again"
        )
    return tensors


def _check_order(tensors: Mapping[str, Stored], base: int) -> None:
    """Raise ValueError if tensors overlap, or leave bytes between them."""
    end = base
    # By size too: an empty tensor begins where the next one does.
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != end:
            raise ValueError(f"{name[:64]} begins at {tensor.start}, and what is before it ends at {end}")
        end += tensor.num_bytes


def _parse_entry(path: Path, base: int, entry: Mapping[str, Any]) -> Stored:
    code, size, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code not in DTYPES:
        raise ValueError(f"dtype {code} is not supported")
    # isinstance would let true pass as a number.
    if not all(type(number) is int for number in (*size, *offsets)):
        raise ValueError("shapes and offsets must be whole numbers")
    start, end = offsets
    stored = Stored(file=path, start=base + start, size=tuple(size), dtype=DTYPES[str(code)])
    if start < 0 or min(stored.size, default=0) < 0 or end - start != stored.num_bytes:
        raise ValueError(f"offsets {start}..{end} do not fit the shape {list(stored.size)}")
    return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Tensor that is to be written."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return math.prod(self.size) * self.dtype.itemsize


def header(tensors: Sequence[Planned], **about: str) -> bytes:
    """Return length and JSON, padded to 8 bytes, of a file with these tensors in order. `about` is further metadata."""
    entries: dict[str, object] = {"__metadata__": {**about, "format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entries[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.size, "data_offsets": [start, end]}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    # Tensors begin at multiples of 8 bytes, so readers may map them into memory.
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, as views where it is contiguous in host memory."""
    # Lazy conjugates and signs are not in the bytes of a tensor.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].cpu().numpy().data


def write_file(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write one file of tensors that are all in memory, cast to `dtype`."""
    planned = [Planned(name=name, size=tuple(tensor.shape), dtype=dtype) for name, tensor in tensors.items()]
    with open(path, "wb") as file:
        file.write(header(planned))
        for tensor in tensors.values():
            file.writelines(pieces(tensor.detach().to(dtype)))


class ShardWriter:
    """Writer of files that are laid out in advance, so tensors may come in any order and none waits in memory."""

    def __init__(self, folder: Path, planned: list[Planned], max_shard_bytes: int) -> None:
        shards = list(_split(planned, max_shard_bytes))
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        self.folder, self.planned = folder, planned
        self.names = names if len(shards) > 1 else [SINGLE]
        self.waiting: dict[str, tuple[str, int, Planned]] = {}
        self.weight_map: dict[str, str] = {}
        self.files: dict[str, BinaryIO] = {}
        for name, shard in zip(self.names, shards, strict=True):
            self._open(name, shard)

    def _open(self, name: str, shard: list[Planned]) -> None:
        raw, start = header(shard), 0
        self.files[name] = open(self.folder / name, "wb")  # noqa: SIM115  (closed in __exit__)
        self.files[name].write(raw)
        for tensor in shard:
            self.waiting[tensor.name] = (name, len(raw) + start, tensor)
            self.weight_map[tensor.name] = name
            start += tensor.num_bytes

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its position, cast to the planned dtype. Raises HubError when it was written before."""
        if name not in self.waiting:
            raise HubError(f"{name} was given twice")
        file, start, planned = self.waiting.pop(name)
        assert tuple(tensor.shape) == planned.size
        self.files[file].seek(start)
        self.files[file].writelines(pieces(tensor.detach().to(planned.dtype)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in self.files.values():
                file.close()

    def _finish(self) -> None:
        """Flush to disk and write the index. Raises HubError when a tensor is missing."""
        if self.waiting:
            raise HubError(f"{len(self.waiting)} tensors were not given, first {next(iter(self.waiting))}")
        # Before the index names them: after a power cut it must not point to files without data.
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        if len(self.names) > 1:
            totals = {
                "total_size": sum(tensor.num_bytes for tensor in self.planned),
                "total_parameters": sum(math.prod(tensor.size) for tensor in self.planned),
            }
            index = {"metadata": totals, "weight_map": dict(sorted(self.weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def file_bytes(planned: list[Planned], max_shard_bytes: int) -> int:
    """Return the size of all files that ShardWriter makes, without their index."""
    return sum(
        len(header(shard)) + sum(tensor.num_bytes for tensor in shard) for shard in _split(planned, max_shard_bytes)
    )


def _split(planned: list[Planned], max_shard_bytes: int) -> Iterator[list[Planned]]:
    """Yield runs of tensors of at most that many bytes together. A larger tensor is alone."""
    shard: list[Planned] = []
    filled = 0
    for tensor in planned:
        if shard and filled + tensor.num_bytes > max_shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += tensor.num_bytes
    yield shard
