"""Fewest layers that must recompute for a layout to fit.

The search knows only all layers or none. This refines the layouts that it lists: with each layer that recomputes, the
peak falls and the time grows.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from meshwright.planner.search.ranking import fullest_rank, ranking_key
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.layout.layout import Layout

WORTH = 0.005
"""Least share of a step to gain from partial recomputation. Below it all layers recompute, which leaves memory free."""


def fewest_layers(estimator: Estimator, layout: Layout, room: float, none_bytes: float) -> Layout | None:
    """Return the layout with its policy on as few layers as fit into `room` bytes, or None if all do not suffice.

    `none_bytes` is the peak without recomputation. All layers save nearly the same, so the first guess is proportional
    and the search continues from there by bisection.
    """
    most = max(map(len, estimator.costs.split(layout)))

    def peak_bytes(layers: int) -> float:
        return fullest_rank(estimator, replace(layout, recompute_layers=layers % most), room).total_bytes

    least_bytes = peak_bytes(most)
    if least_bytes > room:
        return None
    if none_bytes <= room:
        # all layers are written as 0 (% most), so that equal layouts compare equal
        return replace(layout, recompute_layers=1 % most)
    # each peak costs a played schedule; the first guess is mostly right or next to it
    guess = ceil(most * (none_bytes - room) / (none_bytes - least_bytes))
    too_few, enough = 0, most
    while enough - too_few > 1:
        layers = min(max(guess, too_few + 1), enough - 1)
        too_few, enough = (too_few, layers) if peak_bytes(layers) <= room else (layers, enough)
    return replace(layout, recompute_layers=enough % most)


def cheapest_recompute(estimator: Estimator, layout: Layout, room: float) -> Layout | None:
    """Return the fastest recompute policy that fits, on the fewest layers, or on all if that takes hardly longer.

    Returns None if the layout fits without recomputation, or with no policy.
    """
    none_bytes = fullest_rank(estimator, layout).total_bytes
    if none_bytes <= room:
        return None
    policies = (replace(layout, recompute=policy) for policy in layout.policies[1:])
    refined = [fewest for layout in policies if (fewest := fewest_layers(estimator, layout, room, none_bytes))]
    if not refined:
        return None
    best_s, best = _fastest(estimator, refined)
    # a plan with a number of layers is fragile: it must gain something over recomputing all
    whole_s, whole = _fastest(estimator, (replace(layout, recompute_layers=0) for layout in refined))
    return best if whole_s > (1 + WORTH) * best_s else whole


def _fastest(estimator: Estimator, layouts: Iterable[Layout]) -> tuple[float, Layout]:
    return min(((estimator.time(layout).total_s, layout) for layout in layouts), key=lambda timed: timed[0])


def refine(estimator: Estimator, best: Iterable[Prediction], room: float) -> list[Prediction]:
    """Return the layouts ranked, with those that recompute reduced to the fewest layers that fit into `room`.

    A layout that does not fit is joined by itself with recomputation.
    """
    predictions: dict[Layout, Prediction] = {}
    recomputed: dict[Layout, Layout | None] = {}
    best = list(best)
    quickest_s = min((prediction.step_s for prediction in best if prediction.peak_bytes <= room), default=inf)
    for prediction in best:
        if prediction.peak_bytes > room and prediction.step_s >= quickest_s:  # it only gets slower by recomputation
            predictions[prediction.plan.layout] = prediction
            continue
        without = replace(prediction.plan.layout, recompute="none")
        if without not in recomputed:
            recomputed[without] = cheapest_recompute(estimator, without, room)
        layout = recomputed[without]
        if layout is None or prediction.peak_bytes > room:
            predictions[prediction.plan.layout] = prediction
        if layout is not None and layout not in predictions:
            predictions[layout] = estimator.predict(replace(prediction.plan, layout=layout))
    return sorted(predictions.values(), key=ranking_key)
