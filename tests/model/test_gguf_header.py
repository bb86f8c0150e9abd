"""Headers of GGUF files, hostile ones too: each ends in one line, and nothing of a claimed size is made."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.formats.gguf.header import MOST_ITEMS, is_gguf, read_gguf_header
from meshwright.formats.gguf.model import PlannedBlocks, gguf_bytes, header_bytes
from meshwright.spec.errors import HubError
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES

KEYS: dict[str, Any] = {
    "general.architecture": "llama", "a.number": 7, "a.large": 2**40, "a.real": 0.5, "a.flag": True,
    "a.words": ["one", "", "drei ✓"], "a.ids": [1, -2, 3], "a.nothing": [],
}  # fmt: skip
TENSORS = [
    PlannedBlocks(name="token_embd.weight", size=(3, 64), kind=BLOCK_TYPES["Q8_0"]),
    PlannedBlocks(name="norm", size=(5,), kind=BLOCK_TYPES["F32"]),
    PlannedBlocks(name="experts", size=(2, 3, 256), kind=BLOCK_TYPES["Q6_K"]),
]


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def start(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str = "x", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, count: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count or len(dims), *dims, kind, offset)


def key(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def whole(*parts: bytes, data: int = 4096) -> bytes:
    """Parts, padded, and data."""
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % 32) + bytes(data)


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    raw = header_bytes(KEYS, TENSORS)
    length = gguf_bytes(KEYS, TENSORS)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw + bytes(length - len(raw)))
    header = read_gguf_header(path)
    assert dict(header.keys) == KEYS and is_gguf(path)
    assert [(name, tensor.size, tensor.kind) for name, tensor in header.tensors.items()] == [
        (tensor.name, tensor.size, tensor.kind) for tensor in TENSORS
    ]
    starts = [tensor.start for tensor in header.tensors.values()]
    assert starts[0] == len(raw) and all(tensor % 32 == 0 for tensor in starts)
    assert starts[-1] + TENSORS[-1].num_bytes <= length < starts[-1] + TENSORS[-1].num_bytes + 32


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    raw, path = header_bytes(KEYS, TENSORS), tmp_path / "model.gguf"
    path.write_bytes(raw + bytes(gguf_bytes(KEYS, TENSORS) - len(raw)))
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert keys == ours.keys
    assert [(entry.name, entry.tensor_type.name, entry.n_bytes, entry.data_offset) for entry in theirs.tensors] == [
        (name, entry.kind.name, entry.num_bytes, entry.start) for name, entry in ours.tensors.items()
    ]


@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 20, 24, 40, 90, 200, 300, 330, -1])
def test_a_file_that_was_cut_is_refused(length: int, tmp_path: Path) -> None:
    raw = header_bytes(KEYS, TENSORS)
    (tmp_path / "cut.gguf").write_bytes((raw + bytes(gguf_bytes(KEYS, TENSORS) - len(raw) - 31))[:length])
    with pytest.raises(HubError, match=r"cut\.gguf.*(truncated|no GGUF file|bytes left)"):
        read_gguf_header(tmp_path / "cut.gguf")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "magic": (whole(start(magic=b"GGML")), "is no GGUF file"),
    "version 1": (whole(start(version=1)), "GGUF version 1 .supported: 2 and 3."),
    "version 9": (whole(start(version=9)), "GGUF version 9"),
    "big-endian": (whole(b"GGUF" + struct.pack(">IQQ", 3, 1, 1)), "is big-endian"),
    "a milliard tensors": (whole(start(tensors=10**9)), "claims 1000000000 tensors, and has 41.. bytes left"),
    "2^64 - 1 tensors": (whole(start(tensors=2**64 - 1)), "claims 18446744073709551615 tensors"),
    "2^63 keys": (whole(start(keys=2**63)), "claims 9223372036854775808 keys"),
    "a key without an end": (whole(start(keys=1), struct.pack("<Q", 2**62)), "name of a key has 4611686018427387904"),
    "a key without a name": (whole(start(keys=1), key("", 4, bytes(4))), "without a name"),
    "a key twice": (whole(start(keys=2), *[key("k", 4, bytes(4))] * 2), "key 'k' is there twice"),
    "no UTF-8": (whole(start(keys=1), struct.pack("<Q", 2) + b"\xff\xfe"), "the name of a key is no UTF-8"),
    "a type of nothing": (whole(start(keys=1), key("k", 99, bytes(8))), "key k has type 99"),
    "an array of arrays": (whole(start(keys=1), key("k", 9, array(9, 1))), "array of type 9"),
    "a long array": (whole(start(keys=1), key("k", 9, array(12, 2**61))), "claims 2305843009213693952 items of k"),
    "many empty words": (whole(start(keys=1), key("k", 9, array(8, 10**6))), "claims 1000000 items of k"),
    "a long word": (whole(start(keys=1), key("k", 8, struct.pack("<Q", 10**12))), "k has 1000000000000 bytes"),
    "no dims": (whole(start(1), tensor(dims=())), "tensor x has 0 dims"),
    "many dims": (whole(start(1), tensor(count=2**31)), "tensor x has 2147483648 dims"),
    "dims that overflow": (whole(start(1), tensor(dims=(2**32, 2**32, 2**32))), "tensor x has dims"),
    "a dim of 0": (whole(start(1), tensor(dims=(8, 0))), "tensor x has dims"),
    "part of a block": (whole(start(1), tensor(dims=(33,), kind=8)), "rows of 33 numbers, no multiple of Q8_0's 32"),
    "a type of tensor": (whole(start(1), tensor(kind=77)), "tensor x has type 77, which does not exist"),
    "a type not read": (whole(start(1), tensor(dims=(256,), kind=19)), "tensor x is IQ1_S .supported: "),
    "outside": (whole(start(1), tensor(offset=8192)), "tensor x ends at"),
    "far outside": (whole(start(1), tensor(offset=2**64 - 32)), "tensor x ends at"),
    "larger than the file": (whole(start(1), tensor(dims=(2**40,))), "the file at .*: it is truncated"),
    "not aligned": (whole(start(1), tensor(offset=8)), "is at 8, no multiple of 32"),
    "over another": (whole(start(2), tensor(dims=(16,)), tensor("y", offset=32)), "y begins at 32, inside x"),
    "a tensor twice": (whole(start(2), tensor(), tensor()), "tensor 'x' is there twice"),
    "a long name": (whole(start(1), tensor("n" * 64)), "name of a tensor has 64 bytes, and at most 63"),
    "alignment 0": (whole(start(keys=1), key("general.alignment", 4, bytes(4))), "must be a power of 2"),
    "alignment 48": (whole(start(keys=1), key("general.alignment", 4, struct.pack("<I", 48))), "is 48, and must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_hostile_file_claims_is_checked_before_it_is_believed(name: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(HubError, match=message) as caught:
            read_gguf_header(tmp_path / "bad.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert peak < 2**20


def test_counts_are_limited_in_a_large_file_too(tmp_path: Path) -> None:
    """A sparse file has room for what it claims, and no header needs so much."""
    for name, raw in {
        "items": whole(start(keys=1), key("k", 9, array(0, MOST_ITEMS + 1))),
        "word": whole(start(keys=1), key("k", 8, struct.pack("<Q", 2**33))),
        "tensors": whole(start(tensors=MOST_ITEMS + 1)),
    }.items():
        path = tmp_path / f"{name}.gguf"
        with open(path, "wb") as file:
            file.write(raw)
            file.truncate(2**34)
        with pytest.raises(HubError, match=r"claims|header is longer"):
            read_gguf_header(path)


@pytest.mark.parametrize("change", [lambda at: at ^ 0xFF, lambda at: 0, lambda at: 0xFF])
def test_no_changed_byte_ends_in_anything_but_a_line(change: Callable[[int], int], tmp_path: Path) -> None:
    raw = header_bytes(KEYS, TENSORS)
    length, path = gguf_bytes(KEYS, TENSORS), tmp_path / "changed.gguf"
    for position in range(len(raw)):
        damaged = bytearray(raw + bytes(length - len(raw)))
        damaged[position] = change(damaged[position])
        path.write_bytes(damaged)
        try:
            read_gguf_header(path)
        except HubError as error:
            assert "\n" not in str(error)


def test_a_folder_or_another_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("GGU")
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "text") and not is_gguf(tmp_path / "nowhere")
    with pytest.raises(HubError, match="is no file"):
        read_gguf_header(tmp_path / "nowhere")
