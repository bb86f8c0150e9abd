"""How few layers must recompute for a layout to fit. The search knows all layers or none; this is asked afterwards, of
the layouts that it lists: a layout's peak falls and its time grows with each layer that recomputes."""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.planner.search.ranking import rank, worst
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.layout import RECOMPUTE, Layout


def fewest(of: Estimator, layout: Layout, room: float) -> Layout | None:
    """The same policy on as few layers as fit into `room` bytes, by bisection; None where all are not enough."""
    most = max(map(len, of.split(layout)))

    def fits(layers: int) -> bool:
        return _peak_bytes(of, replace(layout, recompute_layers=layers % most), room) <= room

    if layout.recompute == "none" or not fits(most):
        return None
    too_few, enough = 0, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return replace(layout, recompute_layers=enough % most)


def cheapest(of: Estimator, layout: Layout, room: float) -> Layout | None:
    """The fastest of the policies, each on the fewest layers; None where the layout fits without, or with none."""
    if _peak_bytes(of, layout, room) <= room:
        return None
    found = (fewest(of, replace(layout, recompute=policy), room) for policy in RECOMPUTE[1:])
    return min(filter(None, found), key=lambda one: of.time(one).total_s, default=None)


def refined(of: Estimator, best: Iterable[Prediction], room: float) -> list[Prediction]:
    """These layouts, ranked; those that recompute to fit into `room` do so on the fewest layers. So do, beside those
    that need more, the same with recomputation."""
    found: dict[Layout, Prediction] = {}
    known: dict[Layout, Layout | None] = {}
    for one in best:
        without = replace(one.plan.layout, recompute="none")
        if without not in known:
            known[without] = cheapest(of, without, room)
        layout = known[without]
        if layout is None or one.peak_bytes > room:
            found[one.plan.layout] = one
        if layout is not None and layout not in found:
            found[layout] = of.predict(replace(one.plan, layout=layout))
    return sorted(found.values(), key=rank)


def _peak_bytes(of: Estimator, layout: Layout, room: float) -> float:
    return worst(of, layout, room).total_bytes
