"""What folders in GPTQ's and in AWQ's layout have in common: 32-bit words of codes, inputs as rows, and fp16 scales.

A matrix W (N, K) of ours is X.qweight, X.qzeros and X.scales of theirs, where X.weight was. How codes lie in a word is
each format's own (gptq_files.py, awq_files.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.quantization import pack, unpack
from meshwright.kernels.quantized_matrix import QuantizedMatrix, fixed_zero
from meshwright.model.hub.entries import Entries
from meshwright.model.hub.safetensors_files import Planned, Stored, stored_tensors
from meshwright.model.hub.transforms import CONV1D, JOINED, TURNED
from meshwright.model.hub.weight_names import Binding, bindings
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Wanted, Weights, every
from meshwright.model.quantized_formats.hub_tensors import (
    encoded_tensors,
    planned_tensors,
    restored_parts,
    tensors_of_model,
)
from meshwright.model.quantized_formats.native import check
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import GROUPS, SCHEMES, Scheme
from meshwright.spec.shape import ModelShape

ORIGINAL = "take the original folder, which it was made from"
Parts = dict[str, Tensor]
"""Tensors of one matrix by what their names end with."""


class Codes(NamedTuple):
    """One matrix of theirs: codes (N, K) and zeros (N, groups), one an element, uint8; scales (N, groups) fp16."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    order: Tensor | None = None
    """(K,) int32: the input of each column, where they do not stand as they are numbered."""


class PackedLinears(ABC):
    """A QuantizedFormat, but for how a matrix is packed and what the config says."""

    name: str
    bits: tuple[int, ...]
    """That it holds."""
    outputs: int
    """Whose multiple a matrix must have."""

    @abstractmethod
    def sizes(self, rows: int, columns: int, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of the tensors of one matrix."""

    @abstractmethod
    def packed(self, name: str, found: Codes, scheme: Scheme) -> Parts:
        """Tensors of one matrix. PlanError names one that the format cannot hold."""

    @abstractmethod
    def unpacked(self, parts: Mapping[str, Stored], size: tuple[int, int], scheme: Scheme, entries: Entries) -> Codes:
        """The matrix of these tensors, whose sizes were checked."""

    @abstractmethod
    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """As QuantizedFormat."""

    @abstractmethod
    def scheme_of(self, entries: Entries) -> Scheme:
        """Of a config; HubError where it holds what is not read."""

    def scheme_of_matrix(
        self, parts: Mapping[str, Stored], size: tuple[int, ...], scheme: Scheme, entries: Entries
    ) -> Scheme:
        """Of one matrix, by its tensors; `scheme`: of the config, whose entries may say that there are others."""
        return scheme

    def widths(self, entries: Entries) -> tuple[int, int]:
        """Bits and group (0 = a row) of a config; HubError where they are not read."""
        bits, group = entries.integer("bits"), entries.raw("group_size")
        if bits not in self.bits or group not in (-1, *GROUPS) or not isinstance(group, int):
            raise entries.fail(f"bits={bits} with group_size={group!r} is not read: {ORIGINAL}")
        return bits, max(group, 0)

    def refusal(self, model: QuantizedModel) -> str:
        """Why it cannot hold the model; empty where it can."""
        if len(set(model.schemes.values())) > 1:
            return f"{self.name} is written with one scheme, and budget= chooses several; take format=meshwright"
        scheme = next(iter(model.schemes.values()))
        why = self._unwritable(scheme)
        if why:
            return f"{self.name} cannot hold {scheme.name}: {why}; take format=meshwright"
        if any(binding.transform in JOINED for binding in bindings(model.shape)):
            return f"{self.name} cannot hold {model.shape.family}, whose matrices {TURNED}; take format=meshwright"
        for name in model.schemes:
            *_, rows, columns = quantizable(model.shape)[name]
            if columns % 32 or columns % (scheme.group or columns):
                fitting = [group for group in GROUPS if columns % group == 0 and columns % 32 == 0]
                other = f"group={max(fitting)} or " if fitting else ""
                return f"{self.name} cannot hold {name}: {columns} inputs do not fit; take {other}format=meshwright"
            if rows % self.outputs:
                return f"{self.name} cannot hold {name}: {rows} outputs are no multiple of {self.outputs}"
        return ""

    def _unwritable(self, scheme: Scheme) -> str:
        if scheme.codes != "integer" or scheme.bits not in self.bits:
            return f"it has whole numbers of {', '.join(map(str, self.bits))} bits"
        if scheme.activations != "same" or scheme.outliers != "none":
            return "its activations stay as they are"
        return "its zeros must be whole numbers" if scheme.zeros == "real" else ""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """As QuantizedFormat."""

        def plan(name: str, size: tuple[int, ...], scheme: Scheme) -> list[Planned]:
            packed = self.sizes(size[0], size[1], scheme)
            return [Planned(name=_start(name) + part, size=dims, dtype=kind) for part, (dims, kind) in packed.items()]

        return planned_tensors(model, plan)

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """As QuantizedFormat."""

        def encode(name: str, binding: Binding, matrix: QuantizedMatrix) -> Iterator[tuple[str, Tensor]]:
            for their, one in _each(binding, matrix, model.shape):
                parts = self.packed(name, one, matrix.scheme).items()
                yield from ((_start(their) + part, tensor) for part, tensor in parts)

        return encoded_tensors(model, weights, encode)

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """As QuantizedFormat."""
        entries = Entries(config, f"{folder}/config.json, quantization_config")
        whole, stored = self.scheme_of(entries), stored_tensors(folder)
        names, schemes = quantizable(shape), dict[str, Scheme]()
        for binding in bindings(shape):
            if next(iter(binding.ours)) not in names or _start(next(iter(binding.theirs))) + "qweight" not in stored:
                continue
            if binding.transform is CONV1D:
                raise HubError(f"{folder}: codes of {shape.family}, whose matrices are stored transposed, are not read")
            each = {
                self.scheme_of_matrix(_parts(stored, their), self._checked(folder, their, size), whole, entries)
                for their, size in binding.theirs.items()
            }
            if len(each) > 1:
                first, *_, last = binding.theirs
                raise HubError(f"{folder}: {first} to {last} have codes of several layouts, and are one stack here")
            schemes |= dict.fromkeys(binding.ours, each.pop())
        if not schemes:
            raise entries.fail("no tensor of the folder is quantized: there is no qweight")
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=dtype)
        planned = self._as_stored(self.planned(model), stored)
        check(folder, planned, tensors_of_model(folder, shape, planned, stored))
        return model

    def _checked(self, folder: Path, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """HubError for a matrix whose codes are no whole words."""
        if size[1] % 32 or size[0] % self.outputs:
            raise HubError(f"{folder}: {name} is {list(size)}, of which {self.name} makes no whole words of 32 bits")
        return size

    def _as_stored(self, planned: list[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
        """Without what a writer may leave out."""
        return planned

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | Parts]]:
        """As QuantizedFormat."""
        stored = stored_tensors(folder)
        for binding in bindings(model.shape):
            if not any(map(wanted, binding.ours)):
                continue
            name, rows = next(iter(binding.ours)), [size[0] for size in binding.ours.values()]
            if name not in model.schemes:
                theirs = [stored[one].read() for one in binding.theirs]
                yield from zip(binding.ours, binding.transform.restore(theirs, rows, model.shape), strict=True)
                continue
            each = [
                self._matrix(folder, stored, their, size, model.schemes[name]) for their, size in binding.theirs.items()
            ]
            yield from restored_parts(binding, each, model.shape)

    def _matrix(
        self, folder: Path, stored: Mapping[str, Stored], their: str, size: tuple[int, ...], scheme: Scheme
    ) -> Parts:
        """One matrix of theirs, packed as ours are."""
        parts = _parts(stored, their)
        where = Entries({}, f"{folder}: {_start(their)}qweight")
        found = self.unpacked(parts, (size[0], size[1]), scheme, where)
        packed = {"scales": found.scales.contiguous()} | ({} if found.order is None else {"order": found.order})
        middle = fixed_zero(scheme) if scheme.packed else 128
        if scheme.zeros == "whole":
            packed["zeros"] = pack(found.zeros, scheme.bits)
        elif bool((found.zeros != middle).any()):
            raise where.fail("some zeros are not the middle code, where config.json says sym=true or codes have 8 bits")
        packed["codes"] = pack(found.codes, scheme.bits) if scheme.packed else (found.codes.int() - 128).to(torch.int8)
        return packed


def _each(binding: Binding, matrix: QuantizedMatrix, shape: ModelShape) -> Iterator[tuple[str, Codes]]:
    """The matrices of theirs that one of ours is."""
    whole = matrix.whole_codes()
    codes = whole if matrix.scheme.packed else (whole.int() + 128).to(torch.uint8)
    middle = float(fixed_zero(matrix.scheme) if matrix.scheme.packed else 128)
    zeros = torch.full_like(matrix.scales.float(), middle) if matrix.zeros is None else matrix.every_zero()
    parts = (binding.transform.export([one], shape) for one in (codes, zeros.to(torch.uint8), matrix.scales))
    for name, *packed in zip(binding.theirs, *parts, strict=True):
        yield name, Codes(*packed)


def whole_scheme(name: str, bits: int, group: int, symmetric: bool) -> Scheme:
    """What a folder's codes and scales are."""
    like = SCHEMES["int8" if bits == 8 else "int4-rtn"]
    return replace(
        SCHEMES["int4-rtn"], name=name, about="as read", bits=bits, group=group, scales="float16",
        zeros="fixed" if symmetric else "whole", method="absmax" if symmetric else "zero-point",
        expected_kl=like.expected_kl, max_kl=like.max_kl,
    )  # fmt: skip


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes (R, C) uint8, C bits a multiple of 32 -> one stream of bits for each row, int32 (R, C bits / 32)."""
    return pack(codes.contiguous(), bits).contiguous().view(torch.int32)


def codes_of(found: Tensor, bits: int, columns: int) -> Tensor:
    """The codes (R, columns) of `words`."""
    return unpack(found.contiguous().view(torch.uint8), bits, columns)


def names_kept(model: QuantizedModel) -> Sequence[str]:
    """Layers of theirs, by name, that could be quantized and are not."""
    return [
        their.removesuffix(".weight")
        for binding in bindings(model.shape)
        if next(iter(binding.ours)) in model.skipped
        for their in binding.theirs
    ]


def _parts(stored: Mapping[str, Stored], their: str) -> dict[str, Stored]:
    """The tensors that stand where a matrix of theirs was, by what their names end with."""
    names = {part: _start(their) + part for part in ("qweight", "qzeros", "scales", "g_idx")}
    return {part: stored[name] for part, name in names.items() if name in stored}


def _start(name: str) -> str:
    return name.removesuffix("weight")
