"""How far a prediction may be off: ranges that nine runs of ten lie in, and how likely a plan fits.

The quantiles are those of measured over predicted on published rows (docs/accuracy.md), by software, by dense or
mixture of experts, by nodes. `planner/accuracy/error_table.py` makes them; `python -m benchmarks.leaderboard --write`
writes the file. Software without rows of its own, as this package's engine, has those of all others together.
"""

import json
from bisect import bisect_right
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any, NamedTuple

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan import Plan

FILE = "data/error_quantiles.json"
"""Beside this module."""
LEVEL = 0.9
"""Share of the runs that a range is meant to hold."""
LIKELY = 0.95
"""Probability that a recommended layout fits, of runs that were measured."""
POOL = "any"
"""Software that has no rows of its own."""
FEW = 8
"""Nodes, at most, of a group between one node and many."""


class Range(NamedTuple):
    """Measured over predicted: factors of a prediction between which nine runs of ten lie."""

    low: float
    high: float
    pooled: bool
    """No row of this software is among those they come from."""

    def of(self, value: float) -> tuple[float, float]:
        """(low, high) of a figure that grows with the prediction."""
        return value * self.low, value * self.high

    def inverse(self, value: float) -> tuple[float, float]:
        """(low, high) of a figure that shrinks as the prediction grows: a rate, of a time."""
        return value / self.high, value / self.low


Pair = tuple[float, float]


class Ranges(NamedTuple):
    """Of the figures of a prediction, (low, high) each, and the probability that it fits."""

    step_seconds: Pair
    tokens_per_second_per_device: Pair
    mfu_causal: Pair
    mfu_full: Pair
    peak_bytes: Pair
    fit_probability: float
    pooled: bool
    """They come from rows of other software."""

    def document(self) -> dict[str, Any]:
        """As the document of `plan` has them."""
        pairs = {name: list(pair) for name, pair in zip(self._fields[:5], self[:5], strict=True)}
        pairs["peak_bytes"] = [round(one) for one in self.peak_bytes]
        return {"level": LEVEL, "rows_of": "other software" if self.pooled else "this software", **pairs}


def ranges(found: Prediction) -> Ranges:
    """Of one plan."""
    time, memory = relative_range(found.plan, found.stack), memory_range(found.plan, found.stack)
    return Ranges(
        step_seconds=time.of(found.step_s),
        tokens_per_second_per_device=time.inverse(found.tokens_per_s_per_device),
        mfu_causal=time.inverse(found.mfu(causal=True)),
        mfu_full=time.inverse(found.mfu(causal=False)),
        peak_bytes=memory.of(found.peak_bytes),
        fit_probability=fit_probability(found),
        pooled=time.pooled or memory.pooled,
    )


def groups_of(stack: str, *, routed: bool, nodes: int) -> tuple[str, ...]:
    """The groups of rows that a run belongs to, the narrowest first."""
    kind = "experts" if routed else "dense"
    size = "one node" if nodes == 1 else f"to {FEW} nodes" if nodes <= FEW else "more nodes"
    own = () if stack == POOL else (f"{stack}, {kind}, {size}", f"{stack}, {kind}")
    return *own, f"{POOL}, {kind}, {size}", f"{POOL}, {kind}", POOL


def relative_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """Of the step time of a plan that `stack` runs, and of all that is proportional to it."""
    return _range("time", plan, stack)


def memory_range(plan: Plan, stack: Stack = MESHWRIGHT) -> Range:
    """The same of the peak memory."""
    return _range("memory", plan, stack)


def fit_probability(found: Prediction) -> float:
    """That the fullest rank takes no more than a program can have of its device."""
    room = usable_bytes(found.plan)
    if room == float("inf"):
        return 1.0
    if room <= 0:
        return 0.0
    _, quantiles = _quantiles("memory", found.plan, found.stack)
    return share_below(quantiles, log(room / found.peak_bytes))


def likely_share(stack: Stack, *, routed: bool, nodes: int, probability: float = LIKELY) -> float:
    """Largest predicted peak that fits with this probability, as a share of the room: one over the error's quantile."""
    known = _table()["memory"]
    quantiles = known[next(one for one in groups_of(stack.name, routed=routed, nodes=nodes) if one in known)]
    last = len(quantiles) - 1
    place = min(probability * last, last - 1e-9)
    low, high = quantiles[int(place)], quantiles[int(place) + 1]
    return min(exp(-low - (high - low) * (place - int(place))), 1.0)


def share_below(quantiles: tuple[float, ...], value: float) -> float:
    """Of a distribution with these quantiles, evenly spaced from 0 to 1; linear between them. The outermost are the
    worst that was seen, so never wholly sure: half a step short of 0 and 1."""
    last, place = len(quantiles) - 1, bisect_right(quantiles, value)
    if place == 0 or place > last:
        return 0.5 / last if place == 0 else 1 - 0.5 / last
    low, high = quantiles[place - 1], quantiles[place]
    share = (place - 1 + ((value - low) / (high - low) if high > low else 0.0)) / last
    return min(max(share, 0.5 / last), 1 - 0.5 / last)


def _range(what: str, plan: Plan, stack: Stack) -> Range:
    group, quantiles = _quantiles(what, plan, stack)
    steps = len(quantiles) - 1
    edge = round((1 - LEVEL) / 2 * steps)
    return Range(exp(quantiles[edge]), exp(quantiles[steps - edge]), group.startswith(POOL))


def _quantiles(what: str, plan: Plan, stack: Stack) -> tuple[str, tuple[float, ...]]:
    known = _table()[what]
    groups = groups_of(stack.name, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
    group = next(one for one in groups if one in known)
    return group, known[group]


@cache
def _table() -> dict[str, dict[str, tuple[float, ...]]]:
    document = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return {
        what: {group: tuple(one["quantiles"]) for group, one in document[what].items()} for what in ("time", "memory")
    }
