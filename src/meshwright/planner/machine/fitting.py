"""Fit of the scalars of a machine and its software to measured step times.

Least squares on the logarithms of the times, with a prior: every scalar is pulled to where it starts. So scalars on
which the times have no influence stay unchanged. The minimum is found by damped Gauss-Newton steps on finite
differences, which need no derivative and a tenth of the evaluations of a simplex search. Nothing is random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any, NamedTuple

from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import Stack

NOISE = 0.04
"""Expected standard deviation between measured and counted step times, as a share."""
TRUSTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Scales of all priors that are tried. 0 = stay zero-shot."""
ROUNDS = 8
"""Most Newton steps."""
SECONDS = "_s"


class Scalar(NamedTuple):
    """A scalar that can be fitted for a cluster."""

    name: str
    """part.field"""
    kind: str
    """times: multiplied. plus: added; a share stays within 0 and 1, seconds above 0."""
    spread: float
    """Standard deviation of the prior: of the factor's logarithm, or of the addend."""


Adjustment = tuple[str, float]
"""(times or plus, by how much)"""


def changes_at(scalars: Sequence[Scalar], x: Sequence[float]) -> dict[str, Adjustment]:
    """Return the change of each scalar at `x`, in standard deviations of the priors."""
    return {
        p.name: (p.kind, exp(p.spread * at) if p.kind == "times" else p.spread * at)
        for p, at in zip(scalars, x, strict=True)
    }


def adjusted(
    stack: Stack, speeds: Speeds, links: Links, changes: Mapping[str, Adjustment]
) -> tuple[Stack, Speeds, Links]:
    """Return stack, speeds and links with changed scalars."""
    parts: dict[str, Any] = {"stack": stack, "speeds": speeds, "links": links}
    for part, owner in parts.items():
        fields = {}
        for name, (kind, amount) in changes.items():
            owner_name, _, key = name.partition(".")
            if owner_name == part and hasattr(owner, key):
                fields[key] = _changed(key, getattr(owner, key), kind, amount)
        parts[part] = replace(owner, **fields) if fields else owner
    return parts["stack"], parts["speeds"], parts["links"]


def _changed(key: str, base: float, kind: str, value: float) -> float:
    if kind == "times":
        return base * value
    return max(0.0, base + value) if key.endswith(SECONDS) else min(1.0, max(0.0, base + value))


def minimize(
    residuals: Callable[[Sequence[float]], list[float]],
    count: int,
    shares: Sequence[float],
    trust: float | None = None,
) -> list[float]:
    """Return the x that minimizes sum(share huber(r / NOISE)) + sum(x^2) / trust^2.

    `trust` is how far the priors are believed to reach. None = the one of TRUSTS that predicts left-out rows best.
    """
    x = [0.0] * count
    current = residuals(x)
    columns = slopes(residuals, x, current)
    if trust is None:
        trust = min(TRUSTS, key=lambda scale: left_out_error(current, columns, shares, scale))
    if not trust:
        return x
    pull, damping = 1 / trust**2, 0.1
    for _ in range(ROUNDS):
        before = _cost(current, shares, x, pull)
        # Damp until a step lowers the cost; then trust the next one more.
        for _ in range(5):
            step = newton_step(current, columns, shares, x, pull, damping)
            # No scalar leaves its prior by more than three standard deviations.
            tried = [min(3.0, max(-3.0, a - b)) for a, b in zip(x, step, strict=True)]
            there = residuals(tried)
            if _cost(there, shares, tried, pull) < before:
                x, current, damping = tried, there, damping / 5
                break
            damping *= 5
        if before - _cost(current, shares, x, pull) < 1e-2 * before:
            break
        columns = slopes(residuals, x, current)
    return x


def slopes(
    residuals: Callable[[Sequence[float]], list[float]], x: Sequence[float], current: Sequence[float]
) -> list[list[float]]:
    """Return d residual / d x by x. The step is large enough to look past the corners of max()."""
    columns = []
    for i, at in enumerate(x):
        # Towards the prior, where the model is known to behave.
        step = 0.2 if at <= 0 else -0.2
        moved = residuals([*x[:i], at + step, *x[i + 1 :]])
        columns.append([(b - a) / step for a, b in zip(current, moved, strict=True)])
    return columns


def newton_step(
    current: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], x: Sequence[float],
    pull: float, damping: float,
) -> list[float]:  # fmt: skip
    """Return the step to subtract from x."""
    weights = [share * _weight(r) / NOISE**2 for r, share in zip(current, shares, strict=True)]
    system = [[sum(w * p * q for w, p, q in zip(weights, a, b, strict=True)) for b in columns] for a in columns]
    slope = [sum(w * p * r for w, p, r in zip(weights, a, current, strict=True)) + pull * at
             for a, at in zip(columns, x, strict=True)]  # fmt: skip
    for i, row in enumerate(system):
        # The prior adds to the diagonal, and damping is relative to it (Levenberg-Marquardt).
        row[i] += pull + damping * (pull + row[i])
    return solve(system, slope)


def left_out_error(
    current: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], trust: float
) -> float:
    """Return the mean absolute residual of each row by a fit to the others, with constant slopes."""
    if not trust:
        return sum(share * abs(r) for r, share in zip(current, shares, strict=True))
    total = 0.0
    for gone in range(len(current)):
        others = [r for i, r in enumerate(current) if i != gone]
        weights = [share for i, share in enumerate(shares) if i != gone]
        rest = [[slope for i, slope in enumerate(column) if i != gone] for column in columns]
        x = [0.0] * len(columns)
        at = others
        for _ in range(3):  # until the weights have settled
            step = newton_step(at, rest, weights, x, 1 / trust**2, 0.0)
            x = [a - b for a, b in zip(x, step, strict=True)]
            at = [r + sum(c[i] * v for c, v in zip(rest, x, strict=True)) for i, r in enumerate(others)]
        total += shares[gone] * abs(current[gone] + sum(c[gone] * v for c, v in zip(columns, x, strict=True)))
    return total


def _weight(residual: float) -> float:
    """Return Huber's weight: a far-off row pulls no harder than one 2 NOISE away."""
    return 1.0 if abs(residual) <= 2 * NOISE else 2 * NOISE / abs(residual)


def _cost(residuals: Sequence[float], shares: Sequence[float], x: Sequence[float], pull: float) -> float:
    huber = 0.0
    for residual, share in zip(residuals, shares, strict=True):
        size = abs(residual) / NOISE
        huber += share * (size**2 if size <= 2 else 4 * size - 4)
    return huber + pull * sum(value**2 for value in x)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve matrix x = right (positive definite) by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            # No pivoting: the diagonal of a positive definite matrix stays positive.
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
