"""Common code of GPTQ's and AWQ's layouts: 32-bit words of codes, inputs as rows, and fp16 scales.

A matrix W (N, K) of ours is X.qweight, X.qzeros and X.scales of theirs, in place of X.weight. Each format packs words
in its own order (gptq.py, awq.py).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.formats.hub.entries import Entries
from meshwright.formats.hub.transforms import CONV1D, JOINED, TURNED
from meshwright.formats.hub.weight_names import Binding, bindings
from meshwright.formats.quantized.interface import NATIVE, QuantizedModel
from meshwright.formats.quantized.native import check_tensors
from meshwright.formats.quantized.tensors import MatrixFormat, tensors_of_model
from meshwright.formats.safetensors.files import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import QuantizedMatrix, fixed_zero
from meshwright.kernels.quantized.rounding import pack, unpack
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError, argument
from meshwright.spec.model.quantization_schemes import GROUPS, SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape

ORIGINAL = "take the original folder, which it was made from"
Parts = dict[str, Tensor]
"""Tensors of one matrix by the ends of their names."""


class Codes(NamedTuple):
    """Matrix of theirs: codes (N, K) and zeros (N, groups), one per element, uint8; scales (N, groups) fp16."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    order: Tensor | None = None
    """Input of each column (K,) int32. None = they are in order."""


class PackedLinears(MatrixFormat):
    """QuantizedFormat without the packing of a matrix and the entries of the config."""

    name: str
    bits: tuple[int, ...]
    """Supported bits per code."""
    outputs: int
    """Number of which the outputs of a matrix must be a multiple."""

    @abstractmethod
    def sizes(self, rows: int, columns: int, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return size and dtype of each tensor of one matrix."""

    @abstractmethod
    def packed(self, name: str, matrix: Codes, scheme: Scheme) -> Parts:
        """Pack one matrix into its tensors. Raises PlanError for a matrix that the format cannot hold."""

    @abstractmethod
    def unpacked(self, parts: Mapping[str, Stored], size: tuple[int, int], scheme: Scheme, entries: Entries) -> Codes:
        """Unpack one matrix from its tensors, whose sizes were checked."""

    @abstractmethod
    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the config's entry about quantization."""

    @abstractmethod
    def scheme_of(self, entries: Entries) -> Scheme:
        """Return the scheme of a config. Raises HubError for unsupported entries."""

    def scheme_of_matrix(
        self, parts: Mapping[str, Stored], size: tuple[int, ...], scheme: Scheme, entries: Entries
    ) -> Scheme:
        """Return the scheme of one matrix, by its tensors. `scheme` is that of the config."""
        return scheme

    def widths(self, entries: Entries) -> tuple[int, int]:
        """Return bits and group (0 = a row) of a config. Raises HubError when they are not supported."""
        bits, group = entries.integer("bits"), entries.raw("group_size")
        if bits not in self.bits or group not in (-1, *GROUPS) or not isinstance(group, int):
            raise entries.fail(f"bits={bits} with group_size={group!r} is not read: {ORIGINAL}")
        return bits, max(group, 0)

    def refusal(self, model: QuantizedModel) -> str:
        """Return why the format cannot hold the model. Empty = it can."""
        if len(set(model.schemes.values())) > 1:
            return f"{self.name} is written with one scheme, and {argument('budget')} chooses several; take {NATIVE}"
        scheme = next(iter(model.schemes.values()))
        why = self._unwritable(scheme)
        if why:
            return f"{self.name} cannot hold {scheme.name}: {why}; take {NATIVE}"
        if any(binding.transform in JOINED for binding in bindings(model.shape)):
            return f"{self.name} cannot hold {model.shape.family}, whose matrices {TURNED}; take {NATIVE}"
        for name in model.schemes:
            *_, rows, columns = quantizable(model.shape)[name]
            if columns % 32 or columns % (scheme.group or columns):
                fitting = [group for group in GROUPS if columns % group == 0 and columns % 32 == 0]
                other = f"{argument('group', max(fitting))} or " if fitting else ""
                return f"{self.name} cannot hold {name}: {columns} inputs do not fit; take {other}{NATIVE}"
            if rows % self.outputs:
                return f"{self.name} cannot hold {name}: {rows} outputs are no multiple of {self.outputs}"
        return ""

    def _unwritable(self, scheme: Scheme) -> str:
        if scheme.codes != "integer" or scheme.bits not in self.bits:
            return f"it has whole numbers of {', '.join(map(str, self.bits))} bits"
        if scheme.activations != "same" or scheme.outliers != "none":
            return "its activations stay as they are"
        return "its zeros must be whole numbers" if scheme.zeros == "real" else ""

    def plan_matrix(self, name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> list[Planned]:
        """Return the tensors that stand for a matrix of theirs."""
        packed = self.sizes(size[0], size[1], scheme)
        return [Planned(name=_prefix(name) + part, size=dims, dtype=kind) for part, (dims, kind) in packed.items()]

    def encode_matrix(
        self, name: str, binding: Binding, matrix: QuantizedMatrix, model: QuantizedModel
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield those tensors for a matrix of ours."""
        whole = matrix.whole_codes()
        codes = whole if matrix.scheme.packed else (whole.int() + 128).to(torch.uint8)
        middle = float(fixed_zero(matrix.scheme) if matrix.scheme.packed else 128)
        zeros = torch.full_like(matrix.scales.float(), middle) if matrix.zeros is None else matrix.every_zero()
        tensors = (codes, zeros.to(torch.uint8), matrix.scales)
        parts = (binding.transform.export([tensor], model.shape) for tensor in tensors)
        for their, *packed in zip(binding.theirs, *parts, strict=True):
            for part, tensor in self.packed(name, Codes(*packed), matrix.scheme).items():
                yield _prefix(their) + part, tensor

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """Read from the config and the headers of a folder which matrix has which scheme."""
        entries = Entries(config, f"{folder}/config.json, quantization_config")
        config_scheme, stored = self.scheme_of(entries), stored_tensors(folder)
        names, schemes = quantizable(shape), dict[str, Scheme]()
        for binding in bindings(shape):
            if next(iter(binding.ours)) not in names or _prefix(next(iter(binding.theirs))) + "qweight" not in stored:
                continue
            if binding.transform is CONV1D:
                raise HubError(f"{folder}: codes of {shape.family}, whose matrices are stored transposed, are not read")
            found_schemes = {
                self.scheme_of_matrix(
                    _stored_parts(stored, their), self._checked(folder, their, size), config_scheme, entries
                )
                for their, size in binding.theirs.items()
            }
            if len(found_schemes) > 1:
                first, *_, last = binding.theirs
                raise HubError(f"{folder}: {first} to {last} are stacked here, but have codes of several layouts")
            schemes |= dict.fromkeys(binding.ours, found_schemes.pop())
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: there is no qweight")
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=dtype)
        # Sizes are compared before anything is read, so a hostile file cannot make a large tensor.
        planned = self._as_stored(self.planned(model), stored)
        check_tensors(folder, planned, tensors_of_model(folder, shape, planned, stored))
        return model

    def _checked(self, folder: Path, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """Raise HubError for a matrix whose codes do not fill whole words."""
        if size[1] % 32 or size[0] % self.outputs:
            raise HubError(
                f"{folder}: {name} is {list(size)}, whose codes do not fill whole words of 32 bits in {self.name}"
            )
        return size

    def _as_stored(self, planned: list[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
        """Drop planned tensors that a writer may leave out."""
        return planned

    def decode_matrix(self, stored: Mapping[str, Stored], name: str, size: tuple[int, ...], scheme: Scheme) -> Parts:
        """Return one matrix of theirs, packed as ours are."""
        parts = _stored_parts(stored, name)
        where = Entries({}, f"{parts['qweight'].file.parent}: {_prefix(name)}qweight")
        codes = self.unpacked(parts, (size[0], size[1]), scheme, where)
        packed = {"scales": codes.scales.contiguous()} | ({} if codes.order is None else {"order": codes.order})
        middle = fixed_zero(scheme) if scheme.packed else 128
        if scheme.zeros == "whole":
            packed["zeros"] = pack(codes.zeros, scheme.bits)
        elif bool((codes.zeros != middle).any()):
            raise where.fail("some zeros are not the middle code, where config.json says sym=true or codes have 8 bits")
        packed["codes"] = pack(codes.codes, scheme.bits) if scheme.packed else (codes.codes.int() - 128).to(torch.int8)
        return packed


def read_scheme(name: str, bits: int, group: int, symmetric: bool) -> Scheme:
    """Return the scheme of a folder's codes and scales."""
    like = SCHEMES["int8" if bits == 8 else "int4-rtn"]
    return replace(
        SCHEMES["int4-rtn"], name=name, about="as read", bits=bits, group=group, scales="float16",
        zeros="fixed" if symmetric else "whole", method="absmax" if symmetric else "zero-point",
        expected_kl=like.expected_kl, max_kl=like.max_kl,
    )  # fmt: skip


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, C) uint8, C bits a multiple of 32, into one stream of bits per row, int32 (R, C bits / 32)."""
    return pack(codes.contiguous(), bits).contiguous().view(torch.int32)


def codes_of(stream: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack the codes (R, columns) of `words`."""
    return unpack(stream.contiguous().view(torch.uint8), bits, columns)


def _stored_parts(stored: Mapping[str, Stored], their: str) -> dict[str, Stored]:
    """Return the tensors in place of a matrix of theirs, by the ends of their names."""
    names = {part: _prefix(their) + part for part in ("qweight", "qzeros", "scales", "g_idx")}
    return {part: stored[name] for part, name in names.items() if name in stored}


def _prefix(name: str) -> str:
    return name.removesuffix("weight")
