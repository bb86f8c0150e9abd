"""Tensor types of GGUF files, and their choice by the scheme names of llama.cpp's quantizer.

Numbers and sizes of types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h. The rules of
schemes are those of llama-quant.cpp, so a file is as large as one from llama-quantize. Embedding and head are quantized
too, and the most sensitive tensors get more bits. Norms, biases and routers stay in fp32.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.spec.model.shape import ModelShape

SUPER = 256
"""Block size of the K types, whose scales are quantized themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One tensor type."""

    name: str
    number: int
    """Number of the type in the header of a file."""
    block: int
    """Numbers per block. A row is a whole number of blocks."""
    bytes: int
    """Bytes per block."""

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.bytes / self.block

    def holds(self, columns: int) -> bool:
        """Return whether rows of `columns` numbers consist of whole blocks."""
        return columns % self.block == 0

    def num_bytes(self, size: Sequence[int]) -> int:
        """Return the number of bytes of a tensor whose rows are whole blocks."""
        return prod(size[:-1]) * (size[-1] // self.block) * self.bytes


BLOCK_TYPES: Mapping[str, BlockType] = {
    name: BlockType(name=name, number=number, block=block, bytes=size)
    for name, number, block, size in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("BF16", 30, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q2_K", 10, SUPER, 84),
        ("Q3_K", 11, SUPER, 110),
        ("Q4_K", 12, SUPER, 144),
        ("Q5_K", 13, SUPER, 176),
        ("Q6_K", 14, SUPER, 210),
        ("IQ4_NL", 20, 32, 18),
        ("IQ4_XS", 23, SUPER, 136),
    )
}
"""Types that are read. All but Q4_1, Q2_K, Q3_K and the IQ types are also written."""
OTHER_TYPES: Mapping[int, str] = {
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Types known by name only, so that errors can name them."""
FLOATS = ("F32", "F16", "BF16")
"""Types without blocks."""


GGUF = "gguf"
"""Name of the format in options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFScheme:
    """One of llama.cpp's schemes."""

    name: str
    about: str
    main: str
    """Type of most tensors."""
    file_type: int
    """Number in the key general.file_type."""
    more: str = ""
    """Type of the most sensitive tensors in some layers."""
    expected_kl: tuple[float, float] = (0.0, 0.0)
    """Usual range of the divergence from the original model, in nats per token."""
    max_kl: float = 0.1

    def kind_of(self, name: str, columns: int, shape: ModelShape) -> str:
        """Return the type of a tensor by its name in the file and the length of its rows."""
        kind = self._usual_kind(name, columns, shape)
        while not BLOCK_TYPES[kind].holds(columns):
            kind = INSTEAD[kind]
        return kind

    def _usual_kind(self, name: str, columns: int, shape: ModelShape) -> str:
        # Stacked experts count as their matrices, and a fused q, k, v as v.
        part = name.removesuffix(".weight").rpartition(".")[2].removesuffix("_exps").replace("attn_qkv", "attn_v")
        if part == "output" or (shape.tied and part == "token_embd"):
            return "Q8_0" if self.main == "Q8_0" or not BLOCK_TYPES[self.main].holds(columns) else "Q6_K"
        is_mixtral = shape.moe is not None and shape.moe.experts == EXPERTS_OF_MIXTRAL
        layer = int(match.group(1)) if (match := re.match(r"blk\.(\d+)\.", name)) else 0
        if part in ("attn_v", "attn_k") and is_mixtral:
            return "Q8_0"
        if part == "attn_output" and is_mixtral and self.main == "Q4_K":
            return "Q5_K"
        if part in ("attn_v", "ffn_down") and self.more and self._has_more(part, layer, shape.layers):
            return self.more
        is_70b = shape.layers == LAYERS_OF_70B and shape.kv_heads < shape.heads
        return "Q5_K" if part == "attn_v" and is_70b and self.main == "Q4_K" else self.main

    def _has_more(self, part: str, layer: int, layers: int) -> bool:
        if self.more == "Q5_K":
            return layer < (4 if part == "attn_v" else layers // 8)
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


EXPERTS_OF_MIXTRAL, LAYERS_OF_70B = 8, 80
INSTEAD: Mapping[str, str] = {
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q4_0": "F16", "Q5_0": "F16", "Q5_1": "F16", "Q8_0": "F16",
}  # fmt: skip
"""Type -> replacement when its blocks do not fill a row."""
GGUF_SCHEMES: Mapping[str, GGUFScheme] = {
    scheme.name: scheme
    for scheme in (
        GGUFScheme(
            name="q8_0", main="Q8_0", file_type=7, expected_kl=(1e-5, 5e-3), max_kl=0.05,
            about="8-bit codes, a step for each 32",
        ),
        GGUFScheme(
            name="q6_k", main="Q6_K", file_type=18, expected_kl=(1e-4, 1e-2), max_kl=0.05,
            about="6-bit codes, steps searched for each 16",
        ),
        GGUFScheme(
            name="q5_k_m", main="Q5_K", more="Q6_K", file_type=17, expected_kl=(3e-4, 2e-2), max_kl=0.1,
            about="5-bit codes, steps and minima searched for each 32; 6 bits where most is lost",
        ),
        GGUFScheme(
            name="q4_k_m", main="Q4_K", more="Q6_K", file_type=15, expected_kl=(1e-3, 5e-2), max_kl=0.2,
            about="4-bit codes, steps and minima searched for each 32; 6 bits where most is lost",
        ),
        GGUFScheme(
            name="q4_k_s", main="Q4_K", more="Q5_K", file_type=14, expected_kl=(2e-3, 6e-2), max_kl=0.2,
            about="the same, with 5 bits in fewer places",
        ),
        GGUFScheme(
            name="q4_0", main="Q4_0", file_type=2, expected_kl=(3e-3, 0.12), max_kl=0.3,
            about="4-bit codes, a step for each 32",
        ),
    )
}  # fmt: skip
"""Schemes by name. Ranges hold for models of a million to eight billion parameters (docs/quantize.md)."""
