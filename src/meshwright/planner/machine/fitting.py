"""Scalars of a machine and its software, fitted to measured step times.

Least squares on the logarithms of the times, with a prior: every scalar is pulled to where it starts, so that what the
times say nothing about stays as it was. Found by damped Gauss-Newton steps on finite differences, which needs no
derivative and a tenth of the evaluations that a simplex search takes; nothing is random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any, NamedTuple

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import Stack

NOISE = 0.04
"""Standard deviation, as a share, that a measured step time and the counting are expected to differ by."""
TRUSTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Scales of all priors that are tried; 0 = stay zero-shot."""
ROUNDS = 8
"""Newton steps at most."""
SECONDS = "_s"


class Scalar(NamedTuple):
    """A scalar that a cluster may have of its own."""

    name: str
    """part.field"""
    kind: str
    """times: multiplied; plus: added, a share staying within 0 and 1, seconds above 0."""
    spread: float
    """Standard deviation of the prior: of the factor's logarithm, or of the addend."""


Adjustment = tuple[str, float]
"""(times or plus, by how much)"""


def changes_at(scalars: Sequence[Scalar], x: Sequence[float]) -> dict[str, Adjustment]:
    """What `x`, in standard deviations of the priors, does to each scalar."""
    return {
        p.name: (p.kind, exp(p.spread * at) if p.kind == "times" else p.spread * at)
        for p, at in zip(scalars, x, strict=True)
    }


def changed(
    stack: Stack, speeds: Speeds, links: Links, changes: Mapping[str, Adjustment]
) -> tuple[Stack, Speeds, Links]:
    """The three with scalars changed."""
    parts: dict[str, Any] = {"stack": stack, "speeds": speeds, "links": links}
    for part, owner in parts.items():
        fields = {}
        for name, (kind, value) in changes.items():
            place, _, key = name.partition(".")
            if place == part and hasattr(owner, key):
                fields[key] = _changed(key, getattr(owner, key), kind, value)
        parts[part] = replace(owner, **fields) if fields else owner
    return parts["stack"], parts["speeds"], parts["links"]


def _changed(key: str, base: float, kind: str, value: float) -> float:
    if kind == "times":
        return base * value
    return max(0.0, base + value) if key.endswith(SECONDS) else min(1.0, max(0.0, base + value))


def minimum(
    residuals: Callable[[Sequence[float]], list[float]],
    count: int,
    shares: Sequence[float],
    trust: float | None = None,
) -> list[float]:
    """x that minimises sum(share huber(r / NOISE)) + sum(x^2) / trust^2: damped Gauss-Newton, finite differences.

    `trust` is how far the priors are believed to reach; None = of TRUSTS what predicts left-out rows best.
    """
    x = [0.0] * count
    found = residuals(x)
    columns = slopes(residuals, x, found)
    if trust is None:
        trust = min(TRUSTS, key=lambda one: left_out(found, columns, shares, one))
    if not trust:
        return x
    pull, damping = 1 / trust**2, 0.1
    for _ in range(ROUNDS):
        before = _cost(found, shares, x, pull)
        for _ in range(5):
            step = newton(found, columns, shares, x, pull, damping)
            tried = [min(3.0, max(-3.0, a - b)) for a, b in zip(x, step, strict=True)]
            there = residuals(tried)
            if _cost(there, shares, tried, pull) < before:
                x, found, damping = tried, there, damping / 5
                break
            damping *= 5
        if before - _cost(found, shares, x, pull) < 1e-2 * before:
            break
        columns = slopes(residuals, x, found)
    return x


def slopes(
    residuals: Callable[[Sequence[float]], list[float]], x: Sequence[float], found: Sequence[float]
) -> list[list[float]]:
    """d residual / d x, a list of rows for each x; the step is large enough to look past the corners of max()."""
    columns = []
    for i, at in enumerate(x):
        step = 0.2 if at <= 0 else -0.2
        moved = residuals([*x[:i], at + step, *x[i + 1 :]])
        columns.append([(b - a) / step for a, b in zip(found, moved, strict=True)])
    return columns


def newton(
    found: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], x: Sequence[float],
    pull: float, damping: float,
) -> list[float]:  # fmt: skip
    """The step to subtract from x."""
    weights = [share * _weight(r) / NOISE**2 for r, share in zip(found, shares, strict=True)]
    system = [[sum(w * p * q for w, p, q in zip(weights, a, b, strict=True)) for b in columns] for a in columns]
    slope = [sum(w * p * r for w, p, r in zip(weights, a, found, strict=True)) + pull * at
             for a, at in zip(columns, x, strict=True)]  # fmt: skip
    for i, row in enumerate(system):
        row[i] += pull + damping * (pull + row[i])
    return solve(system, slope)


def left_out(
    found: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], trust: float
) -> float:
    """Mean absolute residual of each row by a fit to the others, the slopes taken as constant."""
    if not trust:
        return sum(share * abs(r) for r, share in zip(found, shares, strict=True))
    total = 0.0
    for gone in range(len(found)):
        others = [r for i, r in enumerate(found) if i != gone]
        weights = [share for i, share in enumerate(shares) if i != gone]
        rest = [[value for i, value in enumerate(column) if i != gone] for column in columns]
        x = [0.0] * len(columns)
        at = others
        for _ in range(3):  # the weights settle
            step = newton(at, rest, weights, x, 1 / trust**2, 0.0)
            x = [a - b for a, b in zip(x, step, strict=True)]
            at = [r + sum(c[i] * v for c, v in zip(rest, x, strict=True)) for i, r in enumerate(others)]
        total += shares[gone] * abs(found[gone] + sum(c[gone] * v for c, v in zip(columns, x, strict=True)))
    return total


def _weight(residual: float) -> float:
    """Huber's: a far-off row pulls no harder than one 2 NOISE away."""
    return 1.0 if abs(residual) <= 2 * NOISE else 2 * NOISE / abs(residual)


def _cost(residuals: Sequence[float], shares: Sequence[float], x: Sequence[float], pull: float) -> float:
    huber = 0.0
    for residual, share in zip(residuals, shares, strict=True):
        size = abs(residual) / NOISE
        huber += share * (size**2 if size <= 2 else 4 * size - 4)
    return huber + pull * sum(value**2 for value in x)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix x = right (positive definite), by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
