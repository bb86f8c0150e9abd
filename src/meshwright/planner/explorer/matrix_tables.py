"""What the explorer's page needs to count Muon by itself: seconds and elements of a layer's matrices."""

from collections.abc import Iterator
from typing import Any

from meshwright.planner.explorer.coefficients import Degrees
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.matrix_costs import UPDATED_AT_ONCE_BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.legal import divisors
from meshwright.spec.matrix_exchange import ROUND_ELEMENTS

SMALL, LARGE = 2**20, 2**30
"""Bytes between which the line of an all-to-all is taken."""


def matrix_tables(of: Estimator, degrees: list[Degrees]) -> dict[str, Any] | None:
    """All that matrices.js reads; None where the recipe has AdamW."""
    costs = of.matrices
    if costs is None:
        return None
    layers, devices = costs.layers, of.cluster.devices
    return {
        "width": costs.width,
        "products": [layers.dense_s, layers.routed_s, layers.longest_s],
        "largest": layers.largest,
        "widest": layers.widest,
        "sizes": layers.sizes,
        "round": ROUND_ELEMENTS,
        "at_once_bytes": UPDATED_AT_ONCE_BYTES,
        "copied_s": of.speeds.update_seconds(1e9) / 1e9,
        "links": {ranks: _line(of, ranks) for ranks in divisors(devices) if ranks > 1},
        "moved": {
            key: [costs.moved(layout, dense=1, routed=0), costs.moved(layout, dense=0, routed=1)]
            for key, layout in _layouts(sorted({(one.tp, one.ep) for one in degrees}), devices)
        },
    }


def _line(of: Estimator, ranks: int) -> list[float]:
    """Seconds of an all-to-all of nothing, and of a byte that a rank sends."""
    small_s, large_s = (of.links.seconds("all-to-all", size, ranks) for size in (SMALL, LARGE))
    slope = (large_s - small_s) / (LARGE - SMALL)
    return [small_s - slope * SMALL, slope * ranks / (ranks - 1)]


def _layouts(cuts: list[tuple[int, int]], devices: int) -> Iterator[tuple[str, Layout]]:
    """`tp,ep,sharers,ranks of a stage` -> a layout with these; sharers 1 = no ZeRO."""
    for tp, ep in cuts:
        for ranks in divisors(devices):
            for sharers in divisors(ranks // tp) if ranks % tp == 0 else ():
                spread = sharers if sharers > 1 else ranks // tp
                if spread * tp % ep == 0:
                    replicas = ranks // tp // spread
                    layout = Layout(
                        dp_replicate=replicas, dp_shard=spread, tp=tp, sp=ep > 1 and tp > 1, ep=ep,
                        zero=int(sharers > 1),  # type: ignore[arg-type]  # 0 or 1
                    )  # fmt: skip
                    yield f"{tp},{ep},{sharers},{ranks}", layout
