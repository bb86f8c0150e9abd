"""Microseconds of a matrix product: tiles in waves over the processors, or the bytes it moves, whichever is longer.

A processor works on one tile at a time, 64 of the inner dim a step. A step takes as long as the tensor cores need, or
the load of both operands, or a fixed latency. Filling the pipeline and storing the tile cost as much as `inner_half`
more of the inner dim. If tiles are few, processors share the inner dim of one (split-K, stream-K) and add up.

The formulas are arithmetic only, so they also work on arrays of shapes: the fit of the constants
(benchmarks/kernel_fit.py) calls these very functions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.planner.kernels.fitted_kernel import Chip

Figures = Mapping[str, float]
TILES = (
    (16, 64), (16, 128), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256),
    (256, 64), (128, 256), (256, 128), (256, 256),
)  # fmt: skip
"""(rows, columns) that cuBLAS and CUTLASS choose from."""
SPLITS = (1, 2, 4, 8, 16)
STEP = 64
"""Inner dim of a step of the pipeline."""
NEVER_US = 1e12
START: dict[str, float] = {
    "launch_us": 2.0, "rate": 0.95, "wave": 0.5, "feed": 100.0, "step_us": 0.06, "inner_half": 200.0, "split_us": 2.0,
    "split_bytes": 4.0, "shortest": 256.0, "cached": 0.4, "cache_rate": 0.7, "memory": 0.85, "blend": 3.0,
}  # fmt: skip
"""Constants before a fit.
rate: share of the best product. wave: 1 = a started wave costs a whole one, 0 = tiles are spread without a rest.
feed: 1e3 bytes per microsecond into a processor. step_us: shortest step.
split_us, split_bytes: of adding up the parts, and bytes of an element and part. shortest: least inner dim of a part.
cached: share of the last-level cache in which operands stay from call to call.
cache_rate, memory: bandwidth there and in memory, as shares of the memory's.
blend: exponent of the sum of computing and moving; infinite = the longer of them.
"""
QUANTIZING: dict[str, float] = {"quantize_us": 3.0, "quantize_memory": 0.6}
"""Constants of fp8 in vLLM, where a kernel scales and casts the activations first. memory: bandwidth it reaches."""


def least(a: float, b: float) -> float:
    """Return the smaller one, elementwise for arrays."""
    return a * (a < b) + b * (a >= b)


def most(a: float, b: float) -> float:
    """Return the larger one, elementwise for arrays."""
    return a * (a > b) + b * (a <= b)


class TileChoice(NamedTuple):
    """Rows, columns, parts of the inner dim."""

    rows: int
    columns: int
    parts: int


CHOICES = tuple(TileChoice(rows, columns, parts) for rows, columns in TILES for parts in SPLITS)


def allowed(figures: Figures, chip: Chip, tile: TileChoice, m: float, n: float, k: float, batch: float = 1.0) -> bool:
    """Return whether a library would split the inner dim so: parts stay long, and make no more than two waves."""
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch
    return (k >= figures["shortest"] * tile.parts) & (tiles * tile.parts <= 2 * chip.processors)


def tiled_us(
    figures: Figures, chip: Chip, tile: TileChoice, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, best: float = 0.0,
) -> float:  # fmt: skip
    """Return the time with this tile. `best`: FLOP per microsecond of the best product, if not bf16's."""
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch * tile.parts
    waves = tiles / chip.processors
    below = (waves < 1) * (1 - waves)
    waves = figures["wave"] * -(-waves // 1) + (1 - figures["wave"]) * (waves + below)
    flop = 2.0 * tile.rows * tile.columns * chip.processors / ((best or chip.best) * figures["rate"])
    feed = (tile.rows + tile.columns) * width / (1e3 * figures["feed"])
    latency = figures["step_us"] / STEP
    each = (flop**4 + feed**4 + latency**4) ** 0.25
    inner = -(-k // (tile.parts * STEP)) * STEP
    added = figures["split_us"] + figures["split_bytes"] * tile.parts * m * n * batch / chip.memory
    total: float = waves * (inner + figures["inner_half"]) * each + (added if tile.parts > 1 else 0.0)
    return total


def moved_us(
    figures: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Return the time of moving operands and output. Bytes that fit into the cache come from there."""
    size = batch * (width * (m * k + k * n) + moved * m * n)
    held = figures["cached"] * chip.cache_bytes / size
    held = held * (held < 1) + (held >= 1)
    return size * (held / figures["cache_rate"] + (1 - held) / figures["memory"]) / chip.memory


def blended_us(figures: Figures, computing: float, moving: float) -> float:
    """Combine both: they overlap except at their beginnings and ends, after the launch."""
    power = figures["blend"]
    total: float = figures["launch_us"] + (computing**power + moving**power) ** (1 / power)
    return total


def quantizing_us(figures: Figures, chip: Chip, m: float, k: float) -> float:
    """Return the time of scaling and casting (m, k) bf16 activations to fp8."""
    return figures["quantize_us"] + 3.0 * m * k / (chip.memory * figures["quantize_memory"])


def product_us(
    figures: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, best: float = 0.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Return the time of one kernel with the fastest tile, (m, k) x (k, n), `batch` times."""
    computing = NEVER_US
    for tiles in zip(*[iter(CHOICES)] * len(SPLITS), strict=True):
        for tile in tiles:
            if tile.parts > 1 and not allowed(figures, chip, tile, m, n, k, batch):
                break
            computing = min(computing, tiled_us(figures, chip, tile, m, n, k, width, batch, best))
    return blended_us(figures, computing, moved_us(figures, chip, m, n, k, width, batch, moved))
