"""Microseconds of fused attention kernels of inference frameworks: causal prefill, and one token over a cache.

Formulas are arithmetic only, as in product_times.py.
"""

from meshwright.planner.kernels.fitted_kernel import Chip
from meshwright.planner.kernels.product_times import Figures, least, most

ROWS = 128
"""Queries of a tile. Short sequences pack the queries that share a key head into one tile."""
KEYS = 128
"""Keys of a step of decoding."""
PREFILL: dict[str, float] = {
    "launch_us": 7.0, "rate": 0.6, "padding": 64.0, "dim64": 0.7, "dim192": 1.0, "dim256": 1.1, "dim512": 0.7,
    "tile_us": 1.0, "tail": 0.5, "memory": 0.5, "row_us": 1.0,
}  # fmt: skip
"""Constants before a fit.
rate: share of the data sheet's peak at heads of 128. dimN: share of that rate at heads of N.
padding: keys that a tile computes beyond those it needs. tile_us: time of a tile beside its products.
tail: share of the longest tile that the other processors wait for.
memory: share of the bandwidth for queries, keys, values, outputs. row_us: of a thousand sequences x heads.
"""
DECODE: dict[str, float] = {
    "launch_us": 6.0, "memory": 0.85, "cached": 0.3, "cache_rate": 1.2, "rate": 0.2, "step_us": 0.3, "split_us": 1.5,
    "pair_us": 5.0, "row_us": 1.0,
}  # fmt: skip
"""Constants before a fit.
cached, cache_rate, memory: as in product_times.py, of keys and values.
rate: share of the peak, as the queries of a step fill at least 16 rows. step_us: of KEYS keys.
split_us: of merging the parts that processors made of a long context.
pair_us, row_us: of a thousand sequences x key heads, and of a thousand sequences.
"""


def _of_dim(figures: Figures, dim: float) -> float:
    """Return the share of the rate that heads of this dim reach."""
    low, middle, high = (
        (dim <= 64) * figures["dim64"],
        (dim > 64) * (dim <= 128),
        (dim > 128) * (dim <= 192) * figures["dim192"],
    )
    return low + middle + high + (dim > 192) * (dim <= 256) * figures["dim256"] + (dim > 256) * figures["dim512"]


def prefill_us(
    figures: Figures, chip: Chip, batch: float, sequence: float, heads: float, kv_heads: float, dim: float
) -> float:
    """Return the time of a causal forward pass: tiles of ROWS queries, each as long as the keys it sees."""
    short = sequence < ROWS
    packed = -(-sequence * heads / kv_heads // ROWS) * kv_heads
    tiles = batch * (short * packed + (1 - short) * -(-sequence // ROWS) * heads)
    flop = 4.0 * ROWS * most(dim, 64.0) * chip.processors / (chip.peak * figures["rate"] * _of_dim(figures, dim))
    mean = flop * ((sequence + least(sequence, float(ROWS))) / 2 + figures["padding"]) + figures["tile_us"]
    longest = flop * (sequence + figures["padding"]) + figures["tile_us"]
    computing = most(tiles * mean / chip.processors + figures["tail"] * longest, longest)
    moving = 4.0 * batch * sequence * dim * (heads + kv_heads) / (chip.memory * figures["memory"])
    total: float = figures["launch_us"] + (computing**4 + moving**4) ** 0.25 + figures["row_us"] * batch * heads / 1000
    return total


def decode_us(
    figures: Figures, chip: Chip, batch: float, context: float, heads: float, kv_heads: float, dim: float
) -> float:
    """Return the time of one new token a sequence over `context` cached ones.

    It is bound by the bytes of keys and values, or by the steps of the processor with the most.
    """
    pairs, keys = batch * kv_heads, context + 1
    size = 4.0 * pairs * keys * dim
    held = least(figures["cached"] * chip.cache_bytes / size, 1.0)
    moving = size * (held / figures["cache_rate"] + (1 - held) / figures["memory"]) / chip.memory
    rows = -(-heads / kv_heads // 16) * 16
    computing = 4.0 * pairs * -(-keys // KEYS) * KEYS * rows * dim / (chip.peak * figures["rate"])
    parts = least(most(chip.processors / pairs, 1.0), keys / KEYS + 1)
    steps = figures["step_us"] * -(-keys // (KEYS * parts)) * most(pairs / chip.processors, 1.0)
    ends = 4.0 * batch * heads * dim / (chip.memory * figures["memory"]) + figures["split_us"] * (parts > 1.5)
    counted = (figures["pair_us"] * pairs + figures["row_us"] * batch) / 1000
    total: float = figures["launch_us"] + (moving**3 + computing**3 + steps**3) ** (1 / 3) + ends + counted
    return total
