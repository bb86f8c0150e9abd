"""AWQ's layout for matrix products ("gemm"), as AutoAWQ writes and vLLM, transformers and SGLang read it.

X.qweight  int32 (K, N / 8)       8 codes of 4 bits, of neighbouring outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
X.qzeros   int32 (groups, N / 8)  zeros in the same order, stored as they are
X.scales   fp16 (groups, N)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub.entries import Entries
from meshwright.formats.quantized.interface import QuantizedModel, skipped_modules
from meshwright.formats.quantized.packed_linears import (
    ORIGINAL,
    Codes,
    PackedLinears,
    Parts,
    codes_of,
    read_scheme,
    words,
)
from meshwright.formats.safetensors.files import Stored
from meshwright.spec.model.quantization_schemes import Scheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of 8 that each run of 4 bits in a word holds, from the lowest."""


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
