"""Quantized blocks stored in a folder beside the output, from which a killed run resumes.

.OUT.blocks/00003/model.safetensors    parameters of block 3; matrices as NAME.codes and NAME.scales
.OUT.blocks/00003/block.json           a key, the sha256 of the file, and the report of each matrix

The key hashes the inputs of the block: schemes, text and weights, of this block and of all before it. A block with
another key or a damaged file is recomputed. A block's folder appears complete or not at all.
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
from meshwright.formats.hub.directory import fresh_folder
from meshwright.formats.hub.json_files import read_json
from meshwright.formats.safetensors.files import SINGLE, Planned, ShardWriter, pieces, stored_tensors
from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix
from meshwright.spec.errors import HubError
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.units import GB
from meshwright.store.commit import record as record_of

RECORD = "block.json"
VERSION = 1
"""Version of methods and files. Blocks of another version are recomputed."""
WHOLE_BYTES = 1000 * GB
"""Shard size above that of any block, so that a block is one file."""


class Fingerprint:
    """Running hash over the inputs of all blocks so far."""

    def __init__(self, about: object) -> None:
        self._hash = hashlib.sha256(repr((VERSION, about)).encode())

    def add(self, tensors: Mapping[str, Tensor], about: object = None) -> str:
        """Add tensors and metadata, and return the key so far."""
        self._hash.update(repr(about).encode())
        for name, tensor in tensors.items():
            self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for piece in pieces(tensor):
                self._hash.update(piece)
        return self._hash.hexdigest()


class FinishedBlocks:
    """The finished blocks of one output folder."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f".{out.name}.blocks")

    def save(self, number: int, key: str, block: QuantizedBlock) -> None:
        """Store a block durably. Raises OSError."""
        folder = self._folder(number)
        shutil.rmtree(folder, ignore_errors=True)
        for rest in self.path.glob(f".{folder.name}.partial-*"):  # left behind by a killed process
            shutil.rmtree(rest, ignore_errors=True)
        tensors = dict(_flat(block.parts))
        planned = [Planned(name=name, size=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()]
        with fresh_folder(folder) as partial:
            with ShardWriter(partial, planned, WHOLE_BYTES) as writer:
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            layers = [asdict(report) for report in block.layers]
            # the key says what the block was made from, the hash that its file is whole
            record = {"key": key, "sha256": record_of(partial / SINGLE).sha256, "layers": layers}
            (partial / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def find(
        self, number: int, key: str, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]
    ) -> QuantizedBlock | None:
        """Load a block with this key, whose matrices have these schemes and sizes. None = it must be computed."""
        folder = self._folder(number)
        try:
            record = read_json(folder / RECORD) or {}
            if record.get("key") != key or record.get("sha256") != record_of(folder / SINGLE).sha256:
                return None
            layers = tuple(QuantizedLayer(**report) for report in record["layers"])
            return QuantizedBlock(self.parts(number, schemes, sizes), layers)
        except (HubError, OSError, TypeError, KeyError):
            return None

    def parts(self, number: int, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]) -> Parts:
        """Read the parameters of a stored block, by name."""
        stored, parameters = stored_tensors(self._folder(number)), Parts()
        for full in stored:
            name, _, leaf = full.rpartition(".")
            if name not in schemes or leaf not in PARTS:
                parameters[full] = stored[full].read()
            elif name not in parameters:
                parts: dict[str, Any] = {
                    attribute: stored[f"{name}.{part}"].read()
                    for part, attribute in PARTS.items()
                    if f"{name}.{part}" in stored
                }
                parameters[name] = QuantizedMatrix(scheme=schemes[name], size_in=sizes[name][-1], **parts)
        return parameters

    @property
    def bytes(self) -> int:
        """Size of the stored parameter files."""
        return sum(file.stat().st_size for file in self.path.glob(f"[0-9]*/{SINGLE}"))

    def remove(self) -> None:
        """Delete all stored blocks."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return self.path / f"{number:05d}"


def _flat(parts: Mapping[str, Tensor | QuantizedMatrix]) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = []
    for name, parameter in parts.items():
        if isinstance(parameter, QuantizedMatrix):
            tensors += [(f"{name}.{part}", tensor.cpu()) for part, tensor in parameter.tensors.items()]
        else:
            tensors.append((name, parameter.cpu()))
    return tensors
