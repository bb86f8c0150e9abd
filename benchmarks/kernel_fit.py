"""Fits the constants and the curves of planner/kernels to measured kernels, by the package's own formulas.

Constants: a pattern search on the mean |log error|. Curves: factors at the points of a grid over the logarithms of a
shape, least squares on the logs of what the formula leaves, neighbours drawn together; a far-off row weighs little.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray
FAR = 0.08
"""Residual of a log from which on a row counts less."""
SAMPLE = 2500


def constants(
    formula: Callable[[Mapping[str, float], Array], Array], start: Mapping[str, float], rows: Array, rounds: int = 20,
    free: Sequence[str] = (),
) -> dict[str, float]:  # fmt: skip
    """The figures with which `formula` comes nearest to the times in the last column of `rows`. `free`: those that may
    differ from `start`; none = all."""
    chosen = np.random.default_rng(1).choice(len(rows), min(SAMPLE, len(rows)), replace=False)
    sample = rows[chosen]
    times = np.log(sample[:, -1])

    def miss(figures: Mapping[str, float]) -> float:
        return float(np.abs(np.log(formula(figures, sample)) - times).mean())

    best = dict(start)
    least, step = miss(best), dict.fromkeys(free or start, 0.3)
    for _ in range(rounds):
        for name in [name for name, size in step.items() if size > 0.005]:
            for sign in (1, -1):
                tried = dict(best) | {name: best[name] * float(np.exp(sign * step[name]))}
                if name in ("wave", "tail", "uneven"):
                    tried[name] = min(1.0, tried[name])
                if (error := miss(tried)) < least - 1e-6:
                    least, best = error, tried
                    break
            else:
                step[name] *= 0.5
    return best


def corners(places: Array, axes: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """For each row the points of the grid around it and their shares, as curves.RateGrid reads them."""
    count, sides = len(places), []
    for column, axis in enumerate(axes):
        points = np.log(np.asarray(axis, float))
        if len(points) == 1:
            sides.append((np.zeros(count, int), np.zeros(count)))
            continue
        at = np.log(places[:, column])
        low = np.clip(np.searchsorted(points, at, side="right") - 1, 0, len(points) - 2)
        sides.append((low, np.clip((at - points[low]) / (points[low + 1] - points[low]), 0, 1)))
    indices, shares = [], []
    for corner in itertools.product((0, 1), repeat=len(axes)):
        index, share = np.zeros(count, int), np.ones(count)
        for (low, part), above, axis in zip(sides, corner, axes, strict=True):
            index = index * len(axis) + np.minimum(low + above, len(axis) - 1)
            share = share * (part if above else 1 - part)
        indices.append(index)
        shares.append(share)
    return np.stack(indices, 1), np.stack(shares, 1)


def _neighbours(axes: Sequence[Sequence[float]], coupling: Sequence[float]) -> Array:
    """Weighted sum of squared differences between neighbours, as a matrix."""
    shape = tuple(len(axis) for axis in axes)
    total = int(np.prod(shape))
    matrix, index = np.zeros((total, total)), np.arange(total).reshape(shape)
    for axis in range(len(shape)):
        moved = np.moveaxis(index, axis, 0)
        for left, other in itertools.pairwise(moved):
            a, b = left.ravel(), other.ravel()
            matrix[a, a] += coupling[axis]
            matrix[b, b] += coupling[axis]
            matrix[a, b] -= coupling[axis]
            matrix[b, a] -= coupling[axis]
    return matrix


def _normal(index: Array, share: Array, weights: Array, total: int) -> Array:
    """Left side of the normal equations; some thousand rows at a time."""
    matrix = np.zeros(total * total)
    for start in range(0, len(index), 4000):
        chunk = slice(start, start + 4000)
        pairs = index[chunk, :, None] * total + index[chunk, None, :]
        values = share[chunk, :, None] * share[chunk, None, :] * weights[chunk, None, None]
        matrix += np.bincount(pairs.ravel(), values.ravel(), total * total)
    return matrix.reshape(total, total)


def curve(
    places: Array, residuals: Array, axes: Sequence[Sequence[float]], smooth: float, counts: Array | None = None,
    toward: Array | None = None, coupling: Sequence[float] = (),
) -> Array:  # fmt: skip
    """Logs of the factors at all points of the grid, the last axis running fastest. `counts`: weight of each row.
    `toward`: logs that the factors keep to where no row says otherwise; None = 0. `coupling`: how strongly
    neighbours along each axis are drawn together, for all 1."""
    if toward is not None:
        unexplained = residuals - read(places, axes, toward)
        logs: Array = toward + curve(places, unexplained, axes, smooth, counts, None, coupling)
        return logs
    counts = np.ones(len(places)) if counts is None else counts
    index, share = corners(places, axes)
    total = int(np.prod([len(axis) for axis in axes]))
    pull = smooth * _neighbours(axes, coupling or [1.0] * len(axes)) + 0.3 * smooth * np.eye(total)
    weights: Array = counts
    levels: Array = np.zeros(total)
    for _ in range(4):
        right = np.bincount(index.ravel(), (share * (weights * residuals)[:, None]).ravel(), total)
        matrix = _normal(index, share, weights, total)
        levels = np.linalg.solve(matrix + pull, right)
        weights = counts * FAR / np.maximum(np.abs(residuals - read(places, axes, levels)), FAR)
    return levels


def read(places: Array, axes: Sequence[Sequence[float]], logs: Array) -> Array:
    """Logs of the factors at `places`."""
    index, share = corners(places, axes)
    interpolated: Array = (logs[index] * share).sum(1)
    return interpolated


def fold(columns: Array, folds: int = 4) -> Array:
    """The split: equal rows of `columns` fall into the same of four parts, by a hash that knows no time."""
    hashes = np.full(len(columns), 17, np.int64)
    for column in columns.T:
        hashes = (hashes * 1000003 + column.astype(np.int64)) % 2147483647
    return (hashes // 7) % folds
