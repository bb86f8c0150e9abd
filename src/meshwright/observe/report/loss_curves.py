"""A run's metrics as curves for a page: few enough points to draw, none that hides a spike."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from meshwright.training.smooth import Smoothed

POINTS = 600
"""Of a curve; more are no longer told apart on a screen."""
SERIES = ("loss", "cross_entropy", "grad_norm", "tokens_per_second", "mfu_causal", "lr", "step_seconds")
PLACES = ("step", "tokens", "seconds")


def curves(steps: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Series by name. Of several steps in one point there is the mean; of loss and gradient norm also the lowest and
    the highest, as `loss_low` and `loss_high`. None: no number, or not known."""
    smooth = Smoothed()
    smoothed = [smooth.add(float(step["loss"])) for step in steps]
    groups = _groups(len(steps))
    found: dict[str, list[float | None]] = {
        name: [_number(steps[group[-1]].get(name)) for group in groups] for name in PLACES
    }
    found["smooth"] = [_number(smoothed[group[-1]]) for group in groups]
    for name in SERIES:
        values = [[_number(steps[index].get(name)) for index in group] for group in groups]
        if any(value is not None for group in values for value in group):
            found[name] = [_mean(group) for group in values]
            if len(groups) < len(steps) and name in ("loss", "grad_norm"):
                found[f"{name}_low"] = [_end(min, group) for group in values]
                found[f"{name}_high"] = [_end(max, group) for group in values]
    return found


def evaluations(records: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """The held-out loss and bits per byte, with the step."""
    return {name: [_number(one.get(name)) for one in records] for name in ("step", "loss", "bits_per_byte")}


def _groups(count: int) -> list[range]:
    """Neighbouring steps that become one point."""
    number = min(count, POINTS)
    edges = [round(index * count / number) for index in range(number + 1)] if number else [0]
    return [range(a, b) for a, b in pairwise(edges)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known else None


def _end(choose: Any, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None
