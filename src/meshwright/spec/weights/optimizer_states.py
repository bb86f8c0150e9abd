"""Storage of optimizer states: bytes of the moments of each parameter, and the blocks that share a scale.

Read by the engine (its allocations), the planner, the dry run, the checkpoint and the rules of layouts.

    fp32   4 bytes for each moment
    bf16   2, rounded stochastically
    int8   1, an index into a code book, and one fp32 scale for each block of a row (Dettmers et al. 2022,
           arXiv:2110.02861); a parameter of fewer than SMALL elements stays in fp32, as in bitsandbytes

AdamW has two moments per parameter, Muon one per matrix (`Parameter.matrices`).

A block is a run of a row, the last dim of a parameter. Cuts along other dims (ZeRO, column-parallel tp, ep) keep blocks
whole, so no layout changes a number. A cut inside a row must fall between blocks (`cut_blocks`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import Box, boxes, sharded_dim
from meshwright.spec.weights.inventory import Parameter, parameters

SMALL = 4096
"""Size of a whole parameter, in elements, below which its moments stay in fp32 (bitsandbytes' min_8bit_size)."""
BLOCK, LEAST_BLOCK = 256, 32
"""Elements of a block: of a row that no layout cuts, and the least."""
SCALE_BYTES = 4
"""Bytes of a block's fp32 scale."""
WORK_BYTES = 32
"""Temporary bytes per element updated by plain code: moments, weight and gradient in fp32, random bits, indices."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentFormat:
    """Storage of the moments of one parameter. `block` = 0: without scales."""

    dtype: str
    """fp32, bf16 or int8."""
    block: int = 0
    moments: int = 2
    """2 for AdamW: means of the gradient and of its square. 1 for Muon: mean of the gradient."""

    @property
    def element_bytes(self) -> int:
        """Bytes per element of all moments together."""
        return self.moments * MOMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of the scales per block, all moments together."""
        return self.moments * SCALE_BYTES if self.block else 0

    def nbytes(self, sizes: tuple[int, ...]) -> int:
        """Return the number of bytes of the moments of a piece of these sizes."""
        blocks = prod(self.scale_sizes(sizes)) if self.block else 0
        return self.element_bytes * prod(sizes) + self.block_bytes * blocks

    def scale_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the tensor of scales of a piece."""
        return *sizes[:-1], -(-sizes[-1] // self.block)

    def box(self, state: str, box: Box) -> Box:
        """Return the box of a state (`moment1`, `moment1_scale`, ...) for the box of its parameter."""
        if not state.endswith("_scale"):
            return box
        offsets = (*box.offsets[:-1], box.offsets[-1] // self.block)
        sizes, whole = self.scale_sizes(box.sizes), self.scale_sizes(box.whole)
        return replace(box, whole=whole, offsets=offsets, sizes=sizes)


@dataclass(frozen=True, slots=True)
class StateStorage:
    """Settings of a recipe for optimizer states (`Recipe.storage`)."""

    moments: str = "fp32"
    masters: bool = True
    """16-bit weights have an fp32 copy, which is updated."""
    optimizer: str = "adamw"
    """adamw or muon."""

    @property
    def narrow(self) -> bool:
        """Any state is stored in less than fp32."""
        return self.moments != "fp32" or not self.masters

    def by_muon(self, parameter: Parameter) -> bool:
        """Return whether Muon updates a parameter, rather than AdamW."""
        return self.optimizer == "muon" and parameter.matrices is not None

    def format_of(self, parameter: Parameter) -> MomentFormat:
        """Return the storage of the moments of a parameter, the same on every rank of every layout."""
        moments = 1 if self.by_muon(parameter) else 2
        if self.moments != "int8":
            return MomentFormat(dtype=self.moments, moments=moments)
        if parameter.numel < SMALL or len(parameter.shape) == 1:  # ZeRO cuts a vector anywhere
            return MomentFormat(dtype="fp32", moments=moments)
        return MomentFormat(dtype="int8", block=_block(parameter), moments=moments)


FP32_STATES = StateStorage()


def _block(parameter: Parameter) -> int:
    """Return BLOCK, or for rows that tp may cut, the largest power of two that 8 ranks can share, else 4, else 2."""
    if parameter.axes[-1] != "tp":
        return BLOCK
    shared = (gcd(parameter.shape[-1], tp * BLOCK) // tp for tp in (8, 4, 2))
    return next((block for block in shared if block >= LEAST_BLOCK), BLOCK)


@lru_cache(maxsize=4096)
def cut_blocks(shape: ModelShape, tp: int, ep: int, sharers: int) -> tuple[str, int, int] | None:
    """Return (parameter, row elements, block) of the first block that a layout would cut. None = no cut."""
    storage = StateStorage("int8")
    held = boxes(shape, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    for parameter in parameters(shape):
        block, sizes = storage.format_of(parameter).block, held[parameter.name].sizes
        row, whole = sizes[-1], parameter.shape[-1]
        if not block or not parameter.trained:
            continue
        if row < whole and (row % block or whole % row):
            return parameter.name, row, block
        if parameter.group == "expert" and sharded_dim(sizes, sharers) == len(sizes) - 1 and row // sharers % block:
            return parameter.name, row // sharers, block
    return None
