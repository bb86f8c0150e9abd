"""Microseconds of a fused mixture-of-experts layer of one rank, forward: route, sort, two grouped products, sum.

The rank holds experts / ep experts, each cut tp ways. Formulas are arithmetic only, as in product_times.py.
"""

from meshwright.planner.kernels.fitted_kernel import Chip
from meshwright.planner.kernels.product_times import Figures, least, most

COLUMNS = 128
"""Columns of a tile. Its rows are the tokens of an expert, 16 to 128."""
STEP = 64
START: dict[str, float] = {
    "launch_us": 30.0, "expert_us": 3.0, "memory": 0.85, "passes": 1.0, "rate": 0.5, "step_us": 0.05, "tile_us": 0.3,
    "wave": 0.8, "uneven": 0.3, "hot": 0.1, "skewed": 0.05, "row_us": 1.0, "blend": 2.0,
}  # fmt: skip
"""Constants before a fit.
launch_us: of all kernels of the layer. expert_us: of a hundred experts. memory: share of the bandwidth for weights.
passes: how often activations of all tokens x top_k are moved. rate: share of the best product.
step_us, tile_us: of STEP of the inner dim, and of a tile. wave: as in product_times.py.
uneven: share of the tokens that skewed routing concentrates on experts that are busy anyhow.
hot: more tokens of the busiest rank for each doubling of ep. skewed: time that skew adds.
row_us: of a thousand tokens x top_k.
"""


def busy(figures: Figures, tokens: float, top_k: float, experts: float, ep: float, skew: float) -> tuple[float, float]:
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
    """Return the time of one grouped product: `active` times (rows, k) x (k, n)."""
    tile = 16.0 + 16.0 * (rows > 16) + 32.0 * (rows > 32) + 64.0 * (rows > 64)
    tiles = active * -(-rows // tile) * -(-n // COLUMNS)
    waves = tiles / chip.processors
    waves = figures["wave"] * -(-waves // 1) + (1 - figures["wave"]) * most(waves, 1.0)
    flop = 2.0 * tile * COLUMNS * chip.processors / (chip.best * figures["rate"])
    each = (flop**2 + (figures["step_us"] / STEP) ** 2) ** 0.5
    total: float = waves * (k * each + figures["tile_us"])
    return total


def experts_us(
    figures: Figures, chip: Chip, tokens: float, hidden: float, ffn: float, top_k: float, experts: float,
    tp: float = 1, ep: float = 1, skew: float = 0.0,
) -> float:  # fmt: skip
    """Return the time of the whole layer. `skew`: exponent of the power law that routing follows; 0 = even."""
    inner = ffn / tp
    pairs, active = busy(figures, tokens, top_k, experts, ep, skew)
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
