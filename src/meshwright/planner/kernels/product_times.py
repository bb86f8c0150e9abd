"""Microseconds of a matrix product: tiles in waves over the processors, or the bytes it moves, whichever is longer.

A processor works through one tile at a time, 64 of the inner dim a step; a step takes as long as the tensor cores need,
or the load of both operands, or a fixed latency. Filling the pipeline and storing the tile cost as much as `inner_half`
more of the inner dim. Where tiles are few, processors share the inner dim of one (split-K, stream-K) and add up.

The formulas are arithmetic only, so that arrays of shapes go through them as well: the fit of the constants
(benchmarks/kernel_fit.py) calls these very functions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.planner.kernels.chips import Chip

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
"""Constants before a fit. rate: of the best product. wave: 1 = a started wave costs a whole one, 0 = tiles are spread
without a rest. feed: 1e3 bytes a microsecond into a processor. step_us: shortest step. split_us, split_bytes: of adding
up the parts, and bytes of an element and part. shortest: least inner dim of a part. cached: share of the last-level
cache that operands stay in from call to call; cache_rate, memory: bandwidth there and in memory, of the memory's.
blend: exponent of the sum of computing and moving; infinite = the longer of them."""
QUANTIZING: dict[str, float] = {"quantize_us": 3.0, "quantize_memory": 0.6}
"""Of fp8 as vLLM runs it: a kernel scales and casts the activations first. memory: bandwidth it reaches."""


def least(a: float, b: float) -> float:
    """The smaller one; of arrays each."""
    return a * (a < b) + b * (a >= b)


def most(a: float, b: float) -> float:
    """The larger one; of arrays each."""
    return a * (a > b) + b * (a <= b)


class TileChoice(NamedTuple):
    """Rows, columns, parts of the inner dim."""

    rows: int
    columns: int
    parts: int


CHOICES = tuple(TileChoice(rows, columns, parts) for rows, columns in TILES for parts in SPLITS)


def allowed(of: Figures, chip: Chip, tile: TileChoice, m: float, n: float, k: float, batch: float = 1.0) -> bool:
    """Whether a library would split the inner dim like that: parts stay long, and no more than two waves come of it."""
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch
    return (k >= of["shortest"] * tile.parts) & (tiles * tile.parts <= 2 * chip.processors)


def tiled_us(
    of: Figures, chip: Chip, tile: TileChoice, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, best: float = 0.0,
) -> float:  # fmt: skip
    """Of the processors with this tile. `best`: FLOP a microsecond of the best product, where it is not bf16's."""
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch * tile.parts
    waves = tiles / chip.processors
    below = (waves < 1) * (1 - waves)
    waves = of["wave"] * -(-waves // 1) + (1 - of["wave"]) * (waves + below)
    flop = 2.0 * tile.rows * tile.columns * chip.processors / ((best or chip.best) * of["rate"])
    feed = (tile.rows + tile.columns) * width / (1e3 * of["feed"])
    latency = of["step_us"] / STEP
    each = (flop**4 + feed**4 + latency**4) ** 0.25
    inner = -(-k // (tile.parts * STEP)) * STEP
    added = of["split_us"] + of["split_bytes"] * tile.parts * m * n * batch / chip.memory
    found: float = waves * (inner + of["inner_half"]) * each + (added if tile.parts > 1 else 0.0)
    return found


def moved_us(
    of: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Of operands and result, `moved` bytes of an element of it; what fits into the cache comes from there."""
    size = batch * (width * (m * k + k * n) + moved * m * n)
    held = of["cached"] * chip.cache_bytes / size
    held = held * (held < 1) + (held >= 1)
    return size * (held / of["cache_rate"] + (1 - held) / of["memory"]) / chip.memory


def blended_us(of: Figures, computing: float, moving: float) -> float:
    """Both overlap but for their beginnings and ends; before them stands the launch."""
    power = of["blend"]
    found: float = of["launch_us"] + (computing**power + moving**power) ** (1 / power)
    return found


def quantizing_us(of: Figures, chip: Chip, m: float, k: float) -> float:
    """Of scaling and casting (m, k) bf16 activations to fp8."""
    return of["quantize_us"] + 3.0 * m * k / (chip.memory * of["quantize_memory"])


def product_us(
    of: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, best: float = 0.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Of one kernel with the fastest tile, (m, k) x (k, n), `batch` times."""
    computing = NEVER_US
    for tiles in zip(*[iter(CHOICES)] * len(SPLITS), strict=True):
        for tile in tiles:
            if tile.parts > 1 and not allowed(of, chip, tile, m, n, k, batch):
                break
            computing = min(computing, tiled_us(of, chip, tile, m, n, k, width, batch, best))
    return blended_us(of, computing, moved_us(of, chip, m, n, k, width, batch, moved))
