"""How few layers must recompute for a layout to fit. The search knows all layers or none; this is asked afterwards, of
the layouts that it lists: a layout's peak falls and its time grows with each layer that recomputes."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from meshwright.planner.search.ranking import fullest_rank, ranking_key
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.layout import Layout

WORTH = 0.005
"""Share of a step that must be gained by layers that keep everything: below, all recompute and leave memory free."""


def fewest_layers(of: Estimator, layout: Layout, room: float, none_bytes: float) -> Layout | None:
    """The same policy on as few layers as fit into `room` bytes; None where all are not enough. `none_bytes`: the peak
    without recomputation. Each layer saves almost as much as any other: the search begins where all would save as much,
    and goes on layer by layer."""
    most = max(map(len, of.split(layout)))

    def peak_bytes(layers: int) -> float:
        return fullest_rank(of, replace(layout, recompute_layers=layers % most), room).total_bytes

    least_bytes = peak_bytes(most)
    if least_bytes > room:
        return None
    if none_bytes <= room:
        return replace(layout, recompute_layers=1 % most)
    guess = ceil(most * (none_bytes - room) / (none_bytes - least_bytes))
    too_few, enough = 0, most
    while enough - too_few > 1:
        layers = min(max(guess, too_few + 1), enough - 1)
        too_few, enough = (too_few, layers) if peak_bytes(layers) <= room else (layers, enough)
    return replace(layout, recompute_layers=enough % most)


def cheapest_recompute(of: Estimator, layout: Layout, room: float) -> Layout | None:
    """The fastest of the policies, each on the fewest layers, or on all where that hardly takes longer; None where the
    layout fits without, or with none."""
    none_bytes = fullest_rank(of, layout).total_bytes
    if none_bytes <= room:
        return None
    policies = (replace(layout, recompute=policy) for policy in layout.policies[1:])
    some = [found for one in policies if (found := fewest_layers(of, one, room, none_bytes))]
    if not some:
        return None
    best_s, best = _fastest(of, some)
    whole_s, whole = _fastest(of, (replace(one, recompute_layers=0) for one in some))
    return best if whole_s > (1 + WORTH) * best_s else whole


def _fastest(of: Estimator, layouts: Iterable[Layout]) -> tuple[float, Layout]:
    return min(((of.time(one).total_s, one) for one in layouts), key=lambda timed: timed[0])


def refine(of: Estimator, best: Iterable[Prediction], room: float) -> list[Prediction]:
    """These layouts, ranked; those that recompute to fit into `room` do so on the fewest layers. So do, beside those
    that need more, the same with recomputation."""
    found: dict[Layout, Prediction] = {}
    known: dict[Layout, Layout | None] = {}
    best = list(best)
    quickest_s = min((one.step_s for one in best if one.peak_bytes <= room), default=inf)
    for one in best:
        if one.peak_bytes > room and one.step_s >= quickest_s:  # it only gets slower by recomputation
            found[one.plan.layout] = one
            continue
        without = replace(one.plan.layout, recompute="none")
        if without not in known:
            known[without] = cheapest_recompute(of, without, room)
        layout = known[without]
        if layout is None or one.peak_bytes > room:
            found[one.plan.layout] = one
        if layout is not None and layout not in found:
            found[layout] = of.predict(replace(one.plan, layout=layout))
    return sorted(found.values(), key=ranking_key)
