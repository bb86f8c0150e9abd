"""GPTQ's layout, version 1, as AutoGPTQ and GPTQModel write and vLLM, transformers and SGLang read it.

    X.qweight  int32 (K b / 32, N)   codes as one stream of bits along K
    X.qzeros   int32 (groups, N b / 32)   zeros less 1, as one stream along N
    X.scales   fp16 (groups, N)
    X.g_idx    int32 (K,)            the group of each input: k // group, or any (desc_act); absent = k // group

Zeros are stored less 1, so a zero of 0 cannot be stored: codes and zero of such a group are both raised by 1. Version 2
(`checkpoint_format: gptq_v2`), which stores zeros as they are, is read too. Matrices may have several widths, groups
and orders (GPTQModel's `dynamic`). Sizes of tensors tell which, so no pattern from an untrusted file is run.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub.entries import Entries
from meshwright.formats.quantized.interface import QuantizedModel
from meshwright.formats.quantized.packed_linears import (
    ORIGINAL,
    Codes,
    PackedLinears,
    Parts,
    codes_of,
    read_scheme,
    words,
)
from meshwright.formats.quantized.tensors import skipped_modules
from meshwright.formats.safetensors.files import Planned, Stored
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import GROUPS, Scheme

V2 = "-v2"
"""Ending of the name of a scheme whose zeros are stored as they are."""


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
            groups, order = parts["g_idx"].read().sort(stable=True)
            if not torch.equal(groups.long(), torch.arange(columns) // (scheme.group or columns)):
                raise entries.fail(f"g_idx has groups of other sizes than group_size={scheme.group}: damaged")
        zeros = codes_of(parts["qzeros"].read(), scheme.bits, rows)
        if not scheme.name.endswith(V2):
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
        key = "checkpoint_format" if "checkpoint_format" in entries else "format"  # GPTQModel writes both
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
        symmetric = entries.flag("sym", True) and not others  # if some matrices have zeros, those of all are read
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
        bits, left = divmod(words * 32, columns)
        fitting = [group for group in (scheme.group, 0, *GROUPS) if groups == (-(-columns // group) if group else 1)]
        if _matrix_rules(entries) and not left and bits in self.bits and fitting:
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
