"""Error ranges of a prediction: intervals that hold nine runs of ten, and the probability that a plan fits.

The quantiles are of measured over predicted on published rows (docs/accuracy.md), grouped by software, dense or mixture
of experts, and nodes. `evaluation/error_table.py` computes them, and `python -m evaluation.leaderboard --write`
writes the file. Software without rows, such as Meshwright's engine, uses the rows of all others together.
"""

import json
from bisect import bisect_right
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any, NamedTuple

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan.plan import Plan

FILE = "data/error_quantiles.json"
"""Path beside this module."""
LEVEL = 0.9
"""Share of the runs that a range is meant to hold."""
LIKELY = 0.95
"""Probability of fitting, among measured runs, that a recommended layout has."""
POOL = "any"
"""Group for software without rows."""
FEW = 8
"""Most nodes of the group between one node and many."""


class Range(NamedTuple):
    """Measured over predicted: factors of a prediction between which nine runs of ten lie."""

    low: float
    high: float
    pooled: bool
    """None of the rows behind it is of this software."""

    def scale(self, value: float) -> tuple[float, float]:
        """Return (low, high) of a figure that grows with the prediction."""
        return value * self.low, value * self.high

    def scale_inverse(self, value: float) -> tuple[float, float]:
        """Return (low, high) of a figure that shrinks as the prediction grows, such as a rate."""
        return value / self.high, value / self.low


Pair = tuple[float, float]


class Ranges(NamedTuple):
    """(low, high) of each figure of a prediction, and the probability that it fits."""

    step_seconds: Pair
    tokens_per_second_per_device: Pair
    mfu_causal: Pair
    mfu_full: Pair
    peak_bytes: Pair
    fit_probability: float
    pooled: bool
    """The rows are of other software."""

    def document(self) -> dict[str, Any]:
        """Return the entry in the document of `plan`."""
        pairs = {name: list(pair) for name, pair in zip(self._fields[:5], self[:5], strict=True)}
        pairs["peak_bytes"] = [round(size) for size in self.peak_bytes]
        return {"level": LEVEL, "rows_of": "other software" if self.pooled else "this software", **pairs}


def ranges(prediction: Prediction) -> Ranges:
    """Return the ranges of a prediction."""
    time, memory = relative_range(prediction.plan, prediction.stack), memory_range(prediction.plan, prediction.stack)
    return Ranges(
        step_seconds=time.scale(prediction.step_s),
        tokens_per_second_per_device=time.scale_inverse(prediction.tokens_per_s_per_device),
        mfu_causal=time.scale_inverse(prediction.mfu(causal=True)),
        mfu_full=time.scale_inverse(prediction.mfu(causal=False)),
        peak_bytes=memory.scale(prediction.peak_bytes),
        fit_probability=fit_probability(prediction),
        pooled=time.pooled or memory.pooled,
    )


def row_groups(stack: str, *, routed: bool, nodes: int) -> tuple[str, ...]:
    """Return the groups of rows that a run belongs to, narrowest first."""
    kind = "experts" if routed else "dense"
    size = "one node" if nodes == 1 else f"to {FEW} nodes" if nodes <= FEW else "more nodes"
    narrow = () if stack == POOL else (f"{stack}, {kind}, {size}", f"{stack}, {kind}")
    return *narrow, f"{POOL}, {kind}, {size}", f"{POOL}, {kind}", POOL


def relative_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """Return the range of the step time of a plan under `stack`, and of everything proportional to it."""
    return _range("time", plan, stack)


def memory_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """Return the range of the peak memory."""
    return _range("memory", plan, stack)


def fit_probability(prediction: Prediction) -> float:
    """Return the probability that the fullest rank fits into the usable memory of its device."""
    room = usable_bytes(prediction.plan)
    if room == float("inf"):
        return 1.0
    if room <= 0:
        return 0.0
    _, quantiles = _quantiles("memory", prediction.plan, prediction.stack)
    return share_below(quantiles, log(room / prediction.peak_bytes))


def likely_share(stack: Stack, *, routed: bool, nodes: int, probability: float = LIKELY) -> float:
    """Return the largest predicted peak that fits with this probability, as a share of the usable memory."""
    groups = _table()["memory"]
    quantiles = groups[next(name for name in row_groups(stack.name, routed=routed, nodes=nodes) if name in groups)]
    last = len(quantiles) - 1
    position = min(probability * last, last - 1e-9)
    low, high = quantiles[int(position)], quantiles[int(position) + 1]
    return min(exp(-low - (high - low) * (position - int(position))), 1.0)


def share_below(quantiles: tuple[float, ...], error: float) -> float:
    """Return the share of a distribution below `error`, given its quantiles evenly spaced from 0 to 1.

    It is linear between them. The outermost are the worst that were seen, so the share stays half a step short of 0 and
    1.
    """
    last, index = len(quantiles) - 1, bisect_right(quantiles, error)
    if index == 0 or index > last:
        return 0.5 / last if index == 0 else 1 - 0.5 / last
    low, high = quantiles[index - 1], quantiles[index]
    share = (index - 1 + ((error - low) / (high - low) if high > low else 0.0)) / last
    return min(max(share, 0.5 / last), 1 - 0.5 / last)


def _range(what: str, plan: Plan, stack: Stack) -> Range:
    group, quantiles = _quantiles(what, plan, stack)
    steps = len(quantiles) - 1
    edge = round((1 - LEVEL) / 2 * steps)
    return Range(exp(quantiles[edge]), exp(quantiles[steps - edge]), group.startswith(POOL))


def _quantiles(what: str, plan: Plan, stack: Stack) -> tuple[str, tuple[float, ...]]:
    known = _table()[what]
    groups = row_groups(stack.name, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
    group = next(name for name in groups if name in known)
    return group, known[group]


@cache
def _table() -> dict[str, dict[str, tuple[float, ...]]]:
    document = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return {
        what: {group: tuple(row["quantiles"]) for group, row in document[what].items()} for what in ("time", "memory")
    }
