"""Blocks that are quantized already, in a folder beside the one that is made: what a run that was killed goes on from.

.OUT.blocks/00003/model.safetensors    parameters of block 3; of matrices the parts, as NAME.codes and NAME.scales
.OUT.blocks/00003/block.json           a key, the sha256 of the file, and what is said of the matrices

The key hashes what the block was made from: schemes, text and weights, of the block and of all before it. A block of
other content is made again, and so is one whose file was damaged. A block's folder appears whole or not at all.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.compress.calibrated_block import Parts, QuantizedBlock
from meshwright.compress.stream import QuantizedLayer
from meshwright.kernels.quantized_matrix import PARTS, QuantizedMatrix
from meshwright.model.hub.directory import fresh_folder
from meshwright.model.hub.folder_config import read_json
from meshwright.model.hub.safetensors_files import SINGLE, Planned, ShardWriter, pieces, stored_tensors
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.units import GB
from meshwright.store.commit import record as record_of

RECORD = "block.json"
VERSION = 1
"""Of methods and files: blocks of another one are made again."""
WHOLE_BYTES = 1000 * GB
"""A block is one file."""


class Fingerprint:
    """Of everything so far; blocks have those of all before them."""

    def __init__(self, about: object) -> None:
        self._hash = hashlib.sha256(repr((VERSION, about)).encode())

    def add(self, tensors: Mapping[str, Tensor], about: object = None) -> str:
        """With these; the key so far."""
        self._hash.update(repr(about).encode())
        for name, tensor in tensors.items():
            self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for piece in pieces(tensor):
                self._hash.update(piece)
        return self._hash.hexdigest()


class FinishedBlocks:
    """In one folder."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f".{out.name}.blocks")

    def save(self, number: int, key: str, block: QuantizedBlock) -> None:
        """Put one there, durably. OSError as it comes."""
        folder = self._folder(number)
        shutil.rmtree(folder, ignore_errors=True)
        for rest in self.path.glob(f".{folder.name}.partial-*"):  # of a process that was killed
            shutil.rmtree(rest, ignore_errors=True)
        tensors = dict(_flat(block.parts))
        planned = [Planned(name=name, size=tuple(one.shape), dtype=one.dtype) for name, one in tensors.items()]
        with fresh_folder(folder) as partial:
            with ShardWriter(partial, planned, WHOLE_BYTES) as writer:
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            layers = [asdict(one) for one in block.layers]
            record = {"key": key, "sha256": record_of(partial / SINGLE).sha256, "layers": layers}
            (partial / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def find(
        self, number: int, key: str, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]
    ) -> QuantizedBlock | None:
        """One that was made from the same, with matrices of these schemes and sizes; None = it must be made."""
        folder = self._folder(number)
        try:
            record = read_json(folder / RECORD) or {}
            if record.get("key") != key or record.get("sha256") != record_of(folder / SINGLE).sha256:
                return None
            layers = tuple(QuantizedLayer(**one) for one in record["layers"])
            return QuantizedBlock(self.parts(number, schemes, sizes), layers)
        except (HubError, OSError, TypeError, KeyError):
            return None

    def parts(self, number: int, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]) -> Parts:
        """Parameters of a block that is there, by name."""
        stored, found = stored_tensors(self._folder(number)), Parts()
        for full in stored:
            name, _, part = full.rpartition(".")
            if name not in schemes or part not in PARTS:
                found[full] = stored[full].read()
            elif name not in found:
                parts: dict[str, Any] = {
                    one: stored[f"{name}.{one}"].read() for one in PARTS if f"{name}.{one}" in stored
                }
                found[name] = QuantizedMatrix(scheme=schemes[name], size_in=sizes[name][-1], **parts)
        return found

    @property
    def bytes(self) -> int:
        """Of the files of parameters that are there."""
        return sum(file.stat().st_size for file in self.path.glob(f"[0-9]*/{SINGLE}"))

    def remove(self) -> None:
        """All of them."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return self.path / f"{number:05d}"


def _flat(parts: Mapping[str, Tensor | QuantizedMatrix]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for name, one in parts.items():
        if isinstance(one, QuantizedMatrix):
            found += [(f"{name}.{part}", tensor.cpu()) for part, tensor in one.tensors.items()]
        else:
            found.append((name, one.cpu()))
    return found
