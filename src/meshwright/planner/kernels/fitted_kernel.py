"""Times of single kernels on an otherwise idle device: formulas, fitted to measurements, and the figures of each chip.

Formulas of matrix products, of attention and fused experts in inference frameworks, and of collectives inside a node.
They are arithmetic only, so they also work on arrays of shapes: the fit of their constants (benchmarks/kernel_fit.py)
calls these very functions.

A product is tiles in waves over the processors, or the bytes it moves, whichever is longer. A processor works on one
tile at a time, 64 of the inner dim a step. A step takes as long as the tensor cores need, or the load of both operands,
or a fixed latency. Filling the pipeline and storing the tile cost as much as `inner_half` more of the inner dim. If
tiles are few, processors share the inner dim of one (split-K, stream-K) and add up.

`data/DEVICE.json` holds constants and curves for each operation. A curve is a grid of positive factors over the
logarithms of a shape; it multiplies the formula. benchmarks/kernel_times.py writes the files. A device without a file
uses the constants and curves of a stand-in of its generation, with its own peaks, bandwidths, processors and cache. Its
latencies last as many cycles.

Device presets hold peaks and bandwidths. Processors, clocks and caches stand here. They are from NVIDIA's and AMD's
data sheets (hardware.csv of stas00/ml-engineering for most; clocks are the highest boost clocks, recalled).
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from math import exp, log
from typing import Any, NamedTuple

from meshwright.planner.kernels.kernel_operations import (
    AttentionCore,
    Decode,
    FusedExperts,
    Operation,
    Prefill,
    Product,
)
from meshwright.spec.layout.cluster import Device

Axis = tuple[float, ...]
REACHED, LOW_REACHED = 0.8, 0.72
"""Best measured product over the data sheet's peak, bf16 and fp8, for devices without a measurement.
Measured: 0.73 (GB200) to 0.87 (A100); 0.71 (H100) to 0.76 (B200).
"""
STAND_INS = ("H100-SXM-80", "GB200", "H200-SXM", "B200-SXM", "A100-SXM-80")
"""Measured devices in the order in which they serve for one whose file lacks an operation."""
Figures = Mapping[str, float]
"""Constants of an operation on a device, as benchmarks/kernel_fit.py fits them. Microseconds end in _us.

Of a product:
rate: share of the best product. wave: 1 = a started wave costs a whole one, 0 = tiles are spread without a rest.
feed: 1e3 bytes per microsecond into a processor. step_us: shortest step.
split_us, split_bytes: of adding up the parts, and bytes of an element and part. shortest: least inner dim of a part.
cached: share of the last-level cache in which operands stay from call to call.
cache_rate, memory: bandwidth there and in memory, as shares of the memory's.
blend: exponent of the sum of computing and moving; infinite = the longer of them.
quantize_us, quantize_memory: of fp8 in vLLM, where a kernel scales and casts the activations first; its bandwidth.

Of causal prefill:
rate: share of the data sheet's peak at heads of 128. dimN: share of that rate at heads of N.
padding: keys that a tile computes beyond those it needs. tile_us: time of a tile in addition to its products.
tail: share of the longest tile that the other processors wait for.
memory: share of the bandwidth for queries, keys, values, outputs. row_us: of a thousand sequences x heads.

Of one new token over a cache:
cached, cache_rate, memory: as of a product, of keys and values.
rate: share of the peak, as the queries of a step fill at least 16 rows. step_us: of KEY_STEP keys.
split_us: of merging the parts that processors made of a long context.
pair_us, row_us: of a thousand sequences x key heads, and of a thousand sequences.

Of a layer of experts:
launch_us: of all kernels of the layer. expert_us: of a hundred experts. memory: share of the bandwidth for weights.
passes: how often activations of all tokens x top_k are moved. rate: share of the best product.
step_us, tile_us: of EXPERT_STEP of the inner dim, and of a tile. wave: as of a product.
uneven: share of the tokens that skewed routing concentrates on experts that are busy anyhow.
hot: more tokens of the busiest rank for each doubling of ep. skewed: time that skew adds.
row_us: of a thousand tokens x top_k.

Of a collective, whose bytes are those of the whole tensor, as nccl-tests count them:
hop: of a step to another rank, of launch_us. link: share of the data sheet's bandwidth in one direction.
small: bytes a rank sends at which half of that is reached.
"""
TILES = (
    (16, 64), (16, 128), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256),
    (256, 64), (128, 256), (256, 128), (256, 256),
)  # fmt: skip
"""(rows, columns) that cuBLAS and CUTLASS choose from."""
SPLITS = (1, 2, 4, 8, 16)
PRODUCT_STEP = 64
"""Inner dim of a step of the pipeline."""
NARROW_HEAD_SHARE = 0.86
"""Factor on attention's rate with heads of 64, over those of 128."""
NEVER_US = 1e12
"""Longer than any kernel: the start of a search for the fastest tile."""
QUERY_ROWS = 128
"""Queries of a tile. Short sequences pack the queries that share a key head into one tile."""
KEY_STEP = 128
"""Keys of a step of decoding."""
EXPERT_COLUMNS = 128
"""Columns of a tile. Its rows are the tokens of an expert, 16 to 128."""
EXPERT_STEP = 64
ROUNDS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}
"""Number of times that each byte of the tensor travels."""
COLLECTIVES = tuple(ROUNDS)
LONGEST = 32768.0
"""Rows beyond which an attention core is no faster."""
LONG = AttentionCore(2 * 256 * LONGEST**2 * 128, sequence=LONGEST)
"""A core that keeps any device busy."""


@dataclass(frozen=True, slots=True, eq=False)
class RateGrid:
    """Positive values at every combination of points on one or more increasing axes. The last axis runs fastest."""

    axes: tuple[Axis, ...]
    values: tuple[float, ...]

    def at(self, *where: float) -> float:
        """Interpolate linearly in the logarithms of coordinates and values. Outside, take the nearest edge."""
        sides = [_between(axis, x) for axis, x in zip(self.axes, where, strict=True)]
        logarithm = 0.0
        for corner in product(*sides):
            index, weight = 0, 1.0
            for axis, (point, share) in zip(self.axes, corner, strict=True):
                index, weight = index * len(axis) + point, weight * share
            logarithm += weight * log(self.values[index])
        return exp(logarithm)


def _between(axis: Axis, x: float) -> tuple[tuple[int, float], ...]:
    """Return the neighbouring points of a coordinate, each with its share."""
    if x <= axis[0]:
        return ((0, 1.0),)
    if x >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_right(axis, x)
    low, high = axis[above - 1], axis[above]
    share = log(x / low) / log(high / low)
    return (above - 1, 1 - share), (above, share)


class Chip(NamedTuple):
    """One device. Rates are per microsecond, as kernels are short."""

    processors: int
    """Streaming multiprocessors."""
    clock_ghz: float
    cache_bytes: float
    """Bytes of the last cache level."""
    peak: float
    """bf16 FLOP per microsecond of the data sheet."""
    best: float
    """FLOP per microsecond of the best measured bf16 product."""
    low_best: float
    """FLOP per microsecond of the best measured fp8 product. Without fp8: `best`."""
    memory: float
    """Bytes per microsecond."""
    link: float
    """Bytes per microsecond to the neighbours in a node, one direction."""


class Silicon(NamedTuple):
    """Figures of a chip that no preset holds."""

    processors: int
    clock_ghz: float
    cache_mb: float
    stand_in: str
    """Measured device whose curves and constants serve a device without its own."""


KNOWN: dict[str, Silicon] = {
    "A100": Silicon(108, 1.41, 40, "A100-SXM-80"),
    "H100-PCIe": Silicon(114, 1.755, 50, "H100-SXM-80"),
    "H100": Silicon(132, 1.98, 50, "H100-SXM-80"),
    "H200": Silicon(132, 1.98, 50, "H200-SXM"),
    "H800": Silicon(132, 1.98, 50, "H100-SXM-80"),
    "H20": Silicon(78, 1.98, 60, "H200-SXM"),
    "GH200": Silicon(132, 1.98, 50, "H200-SXM"),
    "B200": Silicon(148, 1.965, 126, "B200-SXM"),
    "B300": Silicon(148, 1.92, 126, "B200-SXM"),
    "GB200": Silicon(152, 2.062, 126, "GB200"),
    "GB300": Silicon(152, 1.92, 126, "GB200"),
    "L40S": Silicon(142, 2.52, 96, "A100-SXM-80"),
    "L40": Silicon(142, 2.49, 96, "A100-SXM-80"),
    "L4": Silicon(58, 2.04, 48, "A100-SXM-80"),
    "V100": Silicon(80, 1.53, 6, "A100-SXM-80"),
    "T4": Silicon(40, 1.59, 4, "A100-SXM-80"),
    "A10": Silicon(72, 1.695, 6, "A100-SXM-80"),
    "A10G": Silicon(80, 1.71, 6, "A100-SXM-80"),
    "RTX-3090": Silicon(82, 1.695, 6, "A100-SXM-80"),
    "RTX-A6000": Silicon(84, 1.8, 6, "A100-SXM-80"),
    "RTX-6000-Ada": Silicon(142, 2.505, 96, "A100-SXM-80"),
    "RTX-4090": Silicon(128, 2.52, 72, "A100-SXM-80"),
    "RTX-5090": Silicon(170, 2.41, 96, "A100-SXM-80"),
    "MI250X": Silicon(110, 1.7, 8, "A100-SXM-80"),
    "MI355X": Silicon(256, 2.4, 256, "H200-SXM"),
    "MI": Silicon(304, 2.1, 256, "H200-SXM"),
}
"""Beginning of a device's name -> its silicon. The longest match counts."""
UNKNOWN = Silicon(132, 1.98, 50, "H100-SXM-80")
"""Silicon of a device that no line above names."""


def silicon_of(device: Device) -> Silicon:
    """Return the silicon of a device by the beginning of its name."""
    name = device.name.upper()
    fits = [known for known in KNOWN if name.startswith(known.upper())]
    return KNOWN[max(fits, key=len)] if fits else UNKNOWN


def chip_of(device: Device) -> Chip:
    """Return a chip from a preset's figures. Unknown ones are guessed from the others."""
    silicon = silicon_of(device)
    peak = device.half_flop_per_s or 1e12
    best = device.half_matmul_flop_per_s or REACHED * peak
    memory = device.memory_bytes_per_s or 1e11
    return Chip(
        processors=silicon.processors,
        clock_ghz=silicon.clock_ghz,
        cache_bytes=silicon.cache_mb * 1e6,
        peak=peak / 1e6,
        best=best / 1e6,
        low_best=(device.fp8_matmul_flop_per_s or LOW_REACHED * device.fp8_flop_per_s or best) / 1e6,
        memory=memory / 1e6,
        link=(device.link_bytes_per_s or memory / 10) / 1e6,
    )


FLAT = RateGrid((), (1.0,))
"""A curve that changes nothing."""


class Kernel(NamedTuple):
    """One operation on one device."""

    chip: Chip
    figures: Mapping[str, float]
    curve: RateGrid = FLAT


def kernel_of(device: Device, operation: str) -> Kernel:
    """Return a kernel. `operation`: product.bf16, product.fp8, prefill, decode, experts, collective."""
    return _kernel(device, operation)


@cache
def _kernel(device: Device, operation: str) -> Kernel:
    chip, name = chip_of(device), device.name if _known(device.name) else silicon_of(device).stand_in
    fit = _file(name).get(operation) or _file(_nearest(name, operation))[operation]
    slower = silicon_of(Device(name=fit["device"])).clock_ghz / chip.clock_ghz
    values = tuple(exp(number / 1000) for row in fit["per_mille"] for number in row)
    curve = RateGrid(tuple(tuple(map(float, axis)) for axis in fit["axes"]), values)
    return Kernel(chip, adapted(fit["figures"], slower), curve)


def adapted(figures: Mapping[str, float], slower: float) -> dict[str, float]:
    """Adapt the constants of one chip to another whose cycle is longer: times count cycles, `feed` bytes per cycle."""
    return {
        name: figure * slower if name.endswith("_us") else figure / slower if name == "feed" else figure
        for name, figure in figures.items()
    }


def _nearest(name: str, operation: str) -> str:
    """Return the device to use when a device's file lacks an operation: the next of its generation, then any."""
    near = {"H200-SXM": "H100-SXM-80", "B200-SXM": "GB200", "GB200": "B200-SXM"}.get(name, "")
    return next(device for device in (near, *STAND_INS) if device and operation in _file(device))


def _known(name: str) -> bool:
    return files(__package__).joinpath("data", f"{name}.json").is_file()


@cache
def _file(name: str) -> dict[str, Any]:
    text = files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    operations: dict[str, Any] = json.loads(text)["operations"]
    return {operation: {"device": name, **fit} for operation, fit in operations.items()}


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
    """Return the microseconds with this tile. `best`: FLOP per microsecond of the best product, if not bf16's."""
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch * tile.parts
    waves = tiles / chip.processors
    below = (waves < 1) * (1 - waves)
    waves = figures["wave"] * -(-waves // 1) + (1 - figures["wave"]) * (waves + below)
    flop = 2.0 * tile.rows * tile.columns * chip.processors / ((best or chip.best) * figures["rate"])
    feed = (tile.rows + tile.columns) * width / (1e3 * figures["feed"])
    latency = figures["step_us"] / PRODUCT_STEP
    each = (flop**4 + feed**4 + latency**4) ** 0.25
    inner = -(-k // (tile.parts * PRODUCT_STEP)) * PRODUCT_STEP
    added = figures["split_us"] + figures["split_bytes"] * tile.parts * m * n * batch / chip.memory
    total: float = waves * (inner + figures["inner_half"]) * each + (added if tile.parts > 1 else 0.0)
    return total


def moved_us(
    figures: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Return the microseconds of moving operands and output. Bytes that fit into the cache come from there."""
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
    """Return the microseconds of scaling and casting (m, k) bf16 activations to fp8."""
    return figures["quantize_us"] + 3.0 * m * k / (chip.memory * figures["quantize_memory"])


def fastest_tile_us(
    figures: Figures, chip: Chip, m: float, n: float, k: float,
    width: float = 2.0, batch: float = 1.0, best: float = 0.0, moved: float = 2.0,
) -> float:  # fmt: skip
    """Return the microseconds of one kernel with the fastest tile, (m, k) x (k, n), `batch` times."""
    computing = NEVER_US
    for tiles in zip(*[iter(CHOICES)] * len(SPLITS), strict=True):
        for tile in tiles:
            if tile.parts > 1 and not allowed(figures, chip, tile, m, n, k, batch):
                break
            computing = min(computing, tiled_us(figures, chip, tile, m, n, k, width, batch, best))
    return blended_us(figures, computing, moved_us(figures, chip, m, n, k, width, batch, moved))


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
    """Return the microseconds of a causal forward pass: tiles of QUERY_ROWS queries, as long as the keys they see."""
    short = sequence < QUERY_ROWS
    packed = -(-sequence * heads / kv_heads // QUERY_ROWS) * kv_heads
    tiles = batch * (short * packed + (1 - short) * -(-sequence // QUERY_ROWS) * heads)
    flop = 4.0 * QUERY_ROWS * most(dim, 64.0) * chip.processors / (chip.peak * figures["rate"] * _of_dim(figures, dim))
    mean = flop * ((sequence + least(sequence, float(QUERY_ROWS))) / 2 + figures["padding"]) + figures["tile_us"]
    longest = flop * (sequence + figures["padding"]) + figures["tile_us"]
    computing = most(tiles * mean / chip.processors + figures["tail"] * longest, longest)
    moving = 4.0 * batch * sequence * dim * (heads + kv_heads) / (chip.memory * figures["memory"])
    total: float = figures["launch_us"] + (computing**4 + moving**4) ** 0.25 + figures["row_us"] * batch * heads / 1000
    return total


def decode_us(
    figures: Figures, chip: Chip, batch: float, context: float, heads: float, kv_heads: float, dim: float
) -> float:
    """Return the microseconds of one new token a sequence over `context` cached ones.

    It is bound by the bytes of keys and values, or by the steps of the processor with the most.
    """
    pairs, keys = batch * kv_heads, context + 1
    size = 4.0 * pairs * keys * dim
    held = least(figures["cached"] * chip.cache_bytes / size, 1.0)
    moving = size * (held / figures["cache_rate"] + (1 - held) / figures["memory"]) / chip.memory
    rows = -(-heads / kv_heads // 16) * 16
    computing = 4.0 * pairs * -(-keys // KEY_STEP) * KEY_STEP * rows * dim / (chip.peak * figures["rate"])
    parts = least(most(chip.processors / pairs, 1.0), keys / KEY_STEP + 1)
    steps = figures["step_us"] * -(-keys // (KEY_STEP * parts)) * most(pairs / chip.processors, 1.0)
    ends = 4.0 * batch * heads * dim / (chip.memory * figures["memory"]) + figures["split_us"] * (parts > 1.5)
    counted = (figures["pair_us"] * pairs + figures["row_us"] * batch) / 1000
    total: float = figures["launch_us"] + (moving**3 + computing**3 + steps**3) ** (1 / 3) + ends + counted
    return total


def busy_experts(
    figures: Figures, tokens: float, top_k: float, experts: float, ep: float, skew: float
) -> tuple[float, float]:
    """Return (pairs of token and expert on the rank, experts of the rank that have any)."""
    pairs = tokens * top_k / ep * (1 + figures["hot"] * _doublings(ep) * skew)
    chosen = tokens * top_k / experts
    held = experts / ep
    even = held * (1 - 2.718281828 ** (-chosen * (1 - least(figures["uneven"] * skew, 0.95))))
    spread = least(held, most(pairs, 1.0))
    active = least(even * (skew > 0) + spread * (skew <= 0), most(pairs, 1e-6))
    return pairs, most(active, least(pairs, 1.0))


def _doublings(ep: float) -> float:
    """Return log2 of 1 to 256, without a library, for arrays."""
    doublings: float = sum((ep >= 2**power) * 1.0 for power in range(1, 9))
    return doublings


def grouped_us(figures: Figures, chip: Chip, active: float, rows: float, n: float, k: float) -> float:
    """Return the microseconds of one grouped product: `active` times (rows, k) x (k, n)."""
    tile = 16.0 + 16.0 * (rows > 16) + 32.0 * (rows > 32) + 64.0 * (rows > 64)
    tiles = active * -(-rows // tile) * -(-n // EXPERT_COLUMNS)
    waves = tiles / chip.processors
    waves = figures["wave"] * -(-waves // 1) + (1 - figures["wave"]) * most(waves, 1.0)
    flop = 2.0 * tile * EXPERT_COLUMNS * chip.processors / (chip.best * figures["rate"])
    each = (flop**2 + (figures["step_us"] / EXPERT_STEP) ** 2) ** 0.5
    total: float = waves * (k * each + figures["tile_us"])
    return total


def experts_us(
    figures: Figures, chip: Chip, tokens: float, hidden: float, ffn: float, top_k: float, experts: float,
    tp: float = 1, ep: float = 1, skew: float = 0.0,
) -> float:  # fmt: skip
    """Return the microseconds of the whole layer. `skew`: exponent of the power law that routing follows; 0 = even."""
    inner = ffn / tp
    pairs, active = busy_experts(figures, tokens, top_k, experts, ep, skew)
    rows = pairs / active
    computing = grouped_us(figures, chip, active, rows, 2 * inner, hidden) + grouped_us(
        figures, chip, active, rows, hidden, inner
    )
    weights = 6.0 * active * hidden * inner / (chip.memory * figures["memory"])
    passes = 2.0 * figures["passes"] * tokens * top_k * (2 * hidden + 3 * inner) / (chip.memory * figures["memory"])
    power = figures["blend"]
    layer = (computing**power + weights**power) ** (1 / power) + passes
    counted = figures["expert_us"] * experts / 100 + figures["row_us"] * tokens * top_k / 1000
    total: float = figures["launch_us"] + counted + layer * (1 + figures["skewed"] * skew)
    return total


def collective_us(figures: Figures, chip: Chip, rounds: float, size_bytes: float, ranks: float) -> float:
    """Return the microseconds of a call over `ranks` ranks of a node. `rounds`: see ROUNDS."""
    sent = rounds * size_bytes * (ranks - 1) / ranks
    latency = figures["launch_us"] * (1 + figures["hop"] * rounds * (ranks - 1))
    moving = (sent + figures["small"] * (sent / (sent + figures["small"]))) / (chip.link * figures["link"])
    power = figures["blend"]
    total: float = (latency**power + moving**power) ** (1 / power)
    return total


def kernel_seconds(device: Device, work: Operation) -> float:
    """Return the seconds of one call. A product of width 1 is fp8, with the kernel that quantizes activations."""
    if isinstance(work, Product):
        return _product(device, work)
    if isinstance(work, Prefill):
        kernel = kernel_of(device, "prefill")
        factor = kernel.curve.at(*prefill_place(*work))
        return factor * prefill_us(kernel.figures, kernel.chip, *work) / 1e6
    if isinstance(work, Decode):
        kernel = kernel_of(device, "decode")
        factor = kernel.curve.at(*decode_place(*work))
        return factor * decode_us(kernel.figures, kernel.chip, *work) / 1e6
    if isinstance(work, FusedExperts):
        kernel = kernel_of(device, "experts")
        factor = kernel.curve.at(*experts_place(*work))
        return factor * experts_us(kernel.figures, kernel.chip, *work) / 1e6
    kernel, kind = kernel_of(device, "collective"), COLLECTIVES.index(work.name)
    rounds, size = ROUNDS[work.name], (work.size_bytes, work.ranks)
    factor = kernel.curve.at(*collective_place(kind, *size))
    return factor * collective_us(kernel.figures, kernel.chip, rounds, *size) / 1e6


def _product(device: Device, work: Product) -> float:
    if work.width >= 2:
        return product_us(kernel_of(device, "product.bf16"), work) / 1e6
    kernel = kernel_of(device, "product.fp8")
    return product_us(kernel, work, kernel.chip.low_best, quantize=True) / 1e6


def product_us(kernel: Kernel, work: Product, best: float = 0.0, *, quantize: bool = False) -> float:
    """Return microseconds of a product. `best`: FLOP per microsecond of the best one, if not bf16's."""
    m, k, n, batch, width, moved, *_ = work
    first = quantizing_us(kernel.figures, kernel.chip, m, k) if quantize else 0.0
    alone = fastest_tile_us(kernel.figures, kernel.chip, m, n, k, width, batch, best, moved)
    return kernel.curve.at(m, n, k) * (first + alone)


def core_us(kernel: Kernel, work: AttentionCore) -> float:
    """Return microseconds of a causal forward core of so many FLOP, without the launch."""
    sequence = min(work.sequence, LONGEST)
    pairs = work.flop / (2 * sequence * sequence * work.dim)
    shape = pairs, sequence, 1.0, 1.0, 128.0
    alone = prefill_us(kernel.figures, kernel.chip, *shape) - kernel.figures["launch_us"]
    return (
        kernel.curve.at(*prefill_place(*shape)) * alone * work.dim / 128 / (NARROW_HEAD_SHARE if work.dim < 96 else 1)
    )


def prefill_place(
    batch: float, sequence: float, heads: float, kv_heads: float, dim: float
) -> tuple[float, float, float, float]:
    """Return the coordinates of a shape on the axes of the curve: sequences x heads, length, group, dim."""
    return batch * heads, sequence, heads / kv_heads, dim


def decode_place(
    batch: float, context: float, heads: float, kv_heads: float, dim: float
) -> tuple[float, float, float, float]:
    """Return sequences x key heads, context, group, dim."""
    return batch * kv_heads, context, heads / kv_heads, dim


def experts_place(
    tokens: float, hidden: float, ffn: float, top_k: float, experts: float, tp: float, ep: float, skew: float
) -> tuple[float, float, float, float, float]:
    """Return tokens, experts of a rank, their width, ranks, 1 + skew."""
    return tokens, experts / ep, ffn / tp, ep, 1 + skew


def collective_place(kind: float, size_bytes: float, ranks: float) -> tuple[float, float, float]:
    """Return collective (1, 2, 4, 8), ranks, bytes."""
    return 2.0**kind, ranks, size_bytes
