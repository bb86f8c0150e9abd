"""Microseconds of a collective inside a node. Bytes are those of the whole tensor, as nccl-tests count them.

Formulas are arithmetic only, as in product_times.py.
"""

from meshwright.planner.kernels.fitted_kernel import Chip
from meshwright.planner.kernels.product_times import Figures

ROUNDS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}
START: dict[str, float] = {"launch_us": 6.0, "hop": 0.12, "link": 0.8, "small": 2e5, "blend": 1.5}
"""Constants before a fit.
hop: of a step to another rank, of launch_us. link: share of the data sheet's bandwidth in one direction.
small: bytes a rank sends at which half of that is reached.
"""
OWN = ("launch_us", "link")
"""Constants of a device. The others are the same for all."""


def collective_us(figures: Figures, chip: Chip, rounds: float, size_bytes: float, ranks: float) -> float:
    """Return the time of one call over `ranks` ranks of a node. `rounds`: how often each byte travels (ROUNDS)."""
    sent = rounds * size_bytes * (ranks - 1) / ranks
    latency = figures["launch_us"] * (1 + figures["hop"] * rounds * (ranks - 1))
    moving = (sent + figures["small"] * (sent / (sent + figures["small"]))) / (chip.link * figures["link"])
    power = figures["blend"]
    total: float = (latency**power + moving**power) ** (1 / power)
    return total
