"""Microseconds of fused attention kernels of inference frameworks: a causal prefill, and one token over a cache.

Formulas are arithmetic only, as in product_times.py.
"""

from meshwright.planner.kernels.chips import Chip
from meshwright.planner.kernels.product_times import Figures, least, most

ROWS = 128
"""Queries of a tile. Short sequences pack the queries that share a key head into one tile."""
KEYS = 128
"""Of a step of decoding."""
PREFILL: dict[str, float] = {
    "launch_us": 7.0, "rate": 0.6, "padding": 64.0, "dim64": 0.7, "dim192": 1.0, "dim256": 1.1, "dim512": 0.7,
    "tile_us": 1.0, "tail": 0.5, "memory": 0.5, "row_us": 1.0,
}  # fmt: skip
"""Constants before a fit. rate: of the data sheet's peak at heads of 128; dimN: at heads of N, of that. padding: keys a
tile computes beyond those it needs. tile_us: of a tile beside its products. tail: share of the longest tile that the
other processors wait for. memory: bandwidth of queries, keys, values, outputs. row_us: of a thousand sequences x
heads."""
DECODE: dict[str, float] = {
    "launch_us": 6.0, "memory": 0.85, "cached": 0.3, "cache_rate": 1.2, "rate": 0.2, "step_us": 0.3, "split_us": 1.5,
    "pair_us": 5.0, "row_us": 1.0,
}  # fmt: skip
"""cached, cache_rate, memory: as in product_times.py, of keys and values. rate: of the peak, as the queries of a step
fill at least 16 rows. step_us: of KEYS keys. split_us: of merging the parts that processors made of a long context.
pair_us, row_us: of a thousand sequences x key heads, and of a thousand sequences."""


def _of_dim(of: Figures, dim: float) -> float:
    """Share of the rate that heads of this dim reach."""
    low, middle, high = (dim <= 64) * of["dim64"], (dim > 64) * (dim <= 128), (dim > 128) * (dim <= 192) * of["dim192"]
    return low + middle + high + (dim > 192) * (dim <= 256) * of["dim256"] + (dim > 256) * of["dim512"]


def prefill_us(
    of: Figures, chip: Chip, batch: float, sequence: float, heads: float, kv_heads: float, dim: float
) -> float:
    """Of a causal forward pass: tiles of ROWS queries, each as long as the keys it sees."""
    short = sequence < ROWS
    packed = -(-sequence * heads / kv_heads // ROWS) * kv_heads
    tiles = batch * (short * packed + (1 - short) * -(-sequence // ROWS) * heads)
    flop = 4.0 * ROWS * most(dim, 64.0) * chip.processors / (chip.peak * of["rate"] * _of_dim(of, dim))
    mean = flop * ((sequence + least(sequence, float(ROWS))) / 2 + of["padding"]) + of["tile_us"]
    longest = flop * (sequence + of["padding"]) + of["tile_us"]
    computing = most(tiles * mean / chip.processors + of["tail"] * longest, longest)
    moving = 4.0 * batch * sequence * dim * (heads + kv_heads) / (chip.memory * of["memory"])
    found: float = of["launch_us"] + (computing**4 + moving**4) ** 0.25 + of["row_us"] * batch * heads / 1000
    return found


def decode_us(
    of: Figures, chip: Chip, batch: float, context: float, heads: float, kv_heads: float, dim: float
) -> float:
    """Of one new token a sequence over `context` cached ones: bound by the bytes of keys and values, or by the steps of
    the processor with the most."""
    pairs, keys = batch * kv_heads, context + 1
    size = 4.0 * pairs * keys * dim
    held = least(of["cached"] * chip.cache_bytes / size, 1.0)
    moving = size * (held / of["cache_rate"] + (1 - held) / of["memory"]) / chip.memory
    rows = -(-heads / kv_heads // 16) * 16
    computing = 4.0 * pairs * -(-keys // KEYS) * KEYS * rows * dim / (chip.peak * of["rate"])
    parts = least(most(chip.processors / pairs, 1.0), keys / KEYS + 1)
    steps = of["step_us"] * -(-keys // (KEYS * parts)) * most(pairs / chip.processors, 1.0)
    ends = 4.0 * batch * heads * dim / (chip.memory * of["memory"]) + of["split_us"] * (parts > 1.5)
    counted = (of["pair_us"] * pairs + of["row_us"] * batch) / 1000
    found: float = of["launch_us"] + (moving**3 + computing**3 + steps**3) ** (1 / 3) + ends + counted
    return found
