"""Tensor types of GGUF files: numbers per block and bytes per block.

Numbers and sizes: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

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
        """Return the bytes of a tensor whose rows are whole blocks."""
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
