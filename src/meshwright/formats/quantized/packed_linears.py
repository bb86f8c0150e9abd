"""Layouts of GPTQ and AWQ, as AutoGPTQ, GPTQModel and AutoAWQ write and vLLM, transformers and SGLang read them.

A matrix W (N, K) of ours is X.qweight, X.qzeros and X.scales of theirs, in place of X.weight: 32-bit words of codes.

GPTQ, version 1:

    X.qweight  int32 (K b / 32, N)   codes as one stream of bits along K
    X.qzeros   int32 (groups, N b / 32)   zeros less 1, as one stream along N
    X.scales   fp16 (groups, N)
    X.g_idx    int32 (K,)            the group of each input: k // group, or any (desc_act); absent = k // group

Zeros are stored less 1, so a zero of 0 cannot be stored: codes and zero of such a group are both raised by 1. Version 2
(`checkpoint_format: gptq_v2`), which stores zeros as they are, is read too. Matrices may have several widths, groups
and orders (GPTQModel's `dynamic`). Sizes of tensors tell which, so no pattern from an untrusted file is run.

AWQ's layout for matrix products ("gemm"):

    X.qweight  int32 (K, N / 8)       8 codes of 4 bits, of neighbouring outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
    X.qzeros   int32 (groups, N / 8)  zeros in the same order, stored as they are
    X.scales   fp16 (groups, N)
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.formats.hub.families import Entries
from meshwright.formats.hub.weight_names import CONV1D, JOINED, TURNED, Binding, bindings
from meshwright.formats.quantized.interface import (
    NATIVE,
    MatrixFormat,
    QuantizedModel,
    skipped_modules,
    tensors_of_model,
)
from meshwright.formats.quantized.native import check_tensors
from meshwright.formats.safetensors import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import QuantizedMatrix, fixed_zero
from meshwright.kernels.quantized.rounding import pack, unpack
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError, PlanError, argument
from meshwright.spec.model.quantization_schemes import GROUPS, SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape

ORIGINAL = "take the original folder, which it was made from"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of 8 that each run of 4 bits in a word holds, from the lowest."""
V2 = "-v2"
"""Ending of the name of a scheme whose zeros are stored as they are."""
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
        own_codes = matrix.whole_codes()
        # Their 8-bit codes count from 0 with a zero of 128, ours are signed.
        codes = own_codes if matrix.scheme.packed else (own_codes.int() + 128).to(torch.uint8)
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


class GPTQFiles(PackedLinears):
    """Layout described above."""

    name = "gptq"
    bits = (2, 3, 4, 8)
    outputs = 32

    def sizes(self, rows: int, columns: int, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return size and dtype of each tensor of one matrix."""
        groups, bits = scheme.groups(columns), scheme.bits
        return {
            "qweight": ((columns * bits // 32, rows), torch.int32),
            "qzeros": ((groups, rows * bits // 32), torch.int32),
            "scales": ((groups, rows), torch.float16),
            "g_idx": ((columns,), torch.int32),
        }

    def packed(self, name: str, matrix: Codes, scheme: Scheme) -> Parts:
        """Pack one matrix into its tensors."""
        columns = matrix.codes.shape[1]
        index = torch.arange(columns) // (scheme.group or columns)
        codes, zeros = _raise_zeros(name, matrix, index, scheme.bits)
        return {
            "qweight": words(codes, scheme.bits).t().contiguous(),
            "qzeros": words(zeros.t() - 1, scheme.bits),
            "scales": matrix.scales.t().contiguous(),
            "g_idx": index.int(),
        }

    def unpacked(self, parts: Mapping[str, Stored], size: tuple[int, int], scheme: Scheme, entries: Entries) -> Codes:
        """Unpack one matrix from its tensors. Raises HubError when group sizes differ from those in the config."""
        rows, columns = size
        order = None
        if scheme.ordered:
            # Stable, so inputs of one group keep their order and equal files give equal codes.
            groups, order = parts["g_idx"].read().sort(stable=True)
            if not torch.equal(groups.long(), torch.arange(columns) // (scheme.group or columns)):
                raise entries.fail(f"g_idx has groups of other sizes than group_size={scheme.group}: damaged")
        zeros = codes_of(parts["qzeros"].read(), scheme.bits, rows)
        if not scheme.name.endswith(V2):
            # A stored zero of all ones has wrapped around 0: version 1 subtracts 1 before it packs.
            zeros = (zeros + 1) & (2**scheme.bits - 1)
        codes = codes_of(parts["qweight"].read().t(), scheme.bits, columns)
        codes = codes if order is None else codes[:, order]
        scales = parts["scales"].read().t().to(torch.float16)
        return Codes(codes, zeros.t().contiguous(), scales, None if order is None else order.int())

    def _as_stored(self, planned: list[Planned], stored: Mapping[str, Stored]) -> list[Planned]:
        """Drop planned tensors that a writer may leave out."""
        return [tensor for tensor in planned if tensor.name in stored or not tensor.name.endswith(".g_idx")]

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the config's entry about quantization."""
        scheme = next(iter(model.schemes.values()))
        config: dict[str, Any] = {
            "quant_method": self.name, "bits": scheme.bits, "group_size": scheme.group or -1, "desc_act": False,
            "static_groups": True, "sym": scheme.zeros == "fixed", "true_sequential": True,
            "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32",
        }  # fmt: skip
        left_out: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in skipped_modules(model)}
        return config | ({"dynamic": left_out} if left_out else {})

    def scheme_of(self, entries: Entries) -> Scheme:
        """Return the scheme that a config describes."""
        # GPTQModel writes both.
        key = "checkpoint_format" if "checkpoint_format" in entries else "format"
        layout = entries.text(key, "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise entries.fail(f"{key}={layout!r} is not supported (supported: gptq and gptq_v2): {ORIGINAL}")
        for other in ("is_marlin_format", "lm_head"):
            if entries.raw(other, False):
                raise entries.fail(f"{other}=true is not read: write the model again without it, or {ORIGINAL}")
        if entries.raw("pack_dtype", "int32") not in ("int32", "torch.int32"):
            raise entries.fail(
                f"pack_dtype={entries.raw('pack_dtype')!r} is not supported (supported: int32): {ORIGINAL}"
            )
        bits, group = self.widths(entries)
        others = any(isinstance(rule, dict) and rule.get("sym") is False for rule in _matrix_rules(entries))
        # If some matrices have zeros, those of all are read.
        symmetric = entries.flag("sym", True) and not others
        if bits == 8 and not symmetric:
            raise entries.fail(f"bits=8 with sym=false is not read: {ORIGINAL}")
        return read_scheme(_scheme_name(bits, layout == "gptq_v2"), bits, group, symmetric)

    def scheme_of_matrix(
        self, parts: Mapping[str, Stored], size: tuple[int, ...], scheme: Scheme, entries: Entries
    ) -> Scheme:
        """Return the scheme of one matrix. Sizes unlike the config follow from `dynamic`, or are refused later."""
        if any(part not in parts or len(parts[part].size) != 2 for part in ("qweight", "scales")):
            return scheme
        columns, words, groups = size[1], parts["qweight"].size[0], parts["scales"].size[0]
        bits, remainder = divmod(words * 32, columns)
        fitting = [group for group in (scheme.group, 0, *GROUPS) if groups == (-(-columns // group) if group else 1)]
        if _matrix_rules(entries) and not remainder and bits in self.bits and fitting:
            symmetric = bits == 8 or scheme.zeros == "fixed"
            scheme = read_scheme(_scheme_name(bits, scheme.name.endswith(V2)), bits, fitting[0], symmetric)
        if "g_idx" not in parts:
            return scheme
        neighbours = torch.arange(columns) // (scheme.group or columns)
        return replace(scheme, ordered=not torch.equal(parts["g_idx"].read().long(), neighbours))


def _scheme_name(bits: int, second: bool) -> str:
    return f"int{bits}-gptq{V2 if second else ''}"


def _matrix_rules(entries: Entries) -> list[object]:
    """Return GPTQModel's `dynamic` rules for matrices, without those that it leaves out."""
    rules = entries.inner("dynamic")
    return [] if rules is None else [rule for name, rule in rules.values.items() if not name.startswith("-:")]


def _raise_zeros(name: str, matrix: Codes, index: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and zeros, both 1 more in groups whose zero is 0."""
    is_zero = matrix.zeros == 0
    if not bool(is_zero.any()):
        return matrix.codes, matrix.zeros
    codes = matrix.codes + is_zero[:, index].to(torch.uint8)
    if bool((codes > 2**bits - 1).any()):
        raise PlanError(
            f"{name} has a group whose weights are all positive, which GPTQ files cannot store: take --format "
            "meshwright or awq, or keep the matrix"
        )
    return codes, matrix.zeros + is_zero.to(torch.uint8)


class AWQFiles(PackedLinears):
    """Layout described above."""

    name = "awq"
    bits = (4,)
    outputs = 8

    def sizes(self, rows: int, columns: int, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return size and dtype of each tensor of one matrix."""
        groups = scheme.groups(columns)
        return {
            "qweight": ((columns, rows // 8), torch.int32),
            "qzeros": ((groups, rows // 8), torch.int32),
            "scales": ((groups, rows), torch.float16),
        }

    def packed(self, name: str, matrix: Codes, scheme: Scheme) -> Parts:
        """Pack one matrix into its tensors."""
        return {
            "qweight": _pack_words(matrix.codes.t()), "qzeros": _pack_words(matrix.zeros.t()),
            "scales": matrix.scales.t().contiguous(),
        }  # fmt: skip

    def unpacked(self, parts: Mapping[str, Stored], size: tuple[int, int], scheme: Scheme, entries: Entries) -> Codes:
        """Unpack one matrix from its tensors."""
        codes, zeros = (_unpack_words(parts[part].read(), size[0]).t().contiguous() for part in ("qweight", "qzeros"))
        return Codes(codes, zeros, parts["scales"].read().t().to(torch.float16))

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the config's entry about quantization."""
        scheme = next(iter(model.schemes.values()))
        return {
            "quant_method": self.name, "bits": scheme.bits, "group_size": scheme.group or -1, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": ["lm_head", *skipped_modules(model)],
        }  # fmt: skip

    def scheme_of(self, entries: Entries) -> Scheme:
        """Return the scheme that a config describes."""
        key = "version" if "version" in entries else "format"
        (bits, group), version = self.widths(entries), entries.text(key, "gemm")
        if version.lower() != "gemm":
            raise entries.fail(f"{key}={version!r} is not read: write the model again as gemm, or {ORIGINAL}")
        if not entries.flag("zero_point", True):
            raise entries.fail(f"zero_point=false is not read: {ORIGINAL}")
        return read_scheme("int4-awq", bits, group, False)


def _pack_words(codes: Tensor) -> Tensor:
    """Pack codes (R, C) uint8 into (R, C / 8) int32."""
    return words(codes.reshape(len(codes), -1, 8)[..., ORDER].flatten(1), 4)


def _unpack_words(words_of_codes: Tensor, columns: int) -> Tensor:
    back = [ORDER.index(bit_run) for bit_run in range(8)]
    return codes_of(words_of_codes, 4, columns).view(len(words_of_codes), -1, 8)[..., back].flatten(1)
