"""Effects of single changes of a layout: why each degree is there, which change makes a plan fit.

Also a longer sequence, and half the machine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from meshwright.planner.search.ranking import Ranking, fullest_rank, search
from meshwright.planner.search.recommend import fewest_layers
from meshwright.planner.search.regions import Fixed, batches
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.plan.plan import Plan, differences

AXES = ("tp", "cp", "pp", "ep")
DOUBLINGS = 5
"""Doublings of the number of nodes to try when no layout of a cluster fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """Prediction of a layout with one thing changed."""

    what: str
    prediction: Prediction
    fits: bool


def predict_change(estimator: Estimator, plan: Plan, layout: Layout, what: str) -> LayoutChange | None:
    """Predict the plan with another layout. Returns None if the layout is illegal."""
    try:
        changed = replace(plan, layout=layout)
        if changed.violations():
            return None
        prediction = estimator.predict(changed)
    except (IllegalLayout, PlanError):
        return None
    return LayoutChange(what=what, prediction=prediction, fits=prediction.peak_bytes <= usable_bytes(plan))


def without_techniques(estimator: Estimator, plan: Plan) -> Iterator[LayoutChange]:
    """Yield the layout without each of its techniques in turn.

    The freed ranks go to data parallelism, sharded as the others are.
    """
    layout = plan.layout
    candidates = [
        (_with_batch(_without_axis(layout, axis), plan), f"{axis}=1") for axis in AXES if getattr(layout, axis) > 1
    ]
    if layout.zero:
        alone = replace(layout, zero=0, dp_replicate=layout.dp, dp_shard=1)
        candidates.append((alone if layout.cp == 1 else replace(layout, zero=0), "zero=0"))
    if layout.recompute != "none":
        candidates.append((replace(layout, recompute="none", recompute_layers=0), "recompute=none"))
    yield from _predict_legal(estimator, plan, candidates)


def _predict_legal(
    estimator: Estimator, plan: Plan, candidates: Iterable[tuple[Layout, str]]
) -> Iterator[LayoutChange]:
    for layout, what in candidates:
        change = predict_change(estimator, plan, layout, what)
        if change:
            yield change


def _without_axis(layout: Layout, axis: str) -> Layout:
    degree = getattr(layout, axis)
    if axis == "ep":
        return replace(layout, ep=1, ep_chunks=0)
    share = {"dp_shard": layout.dp_shard * degree} if layout.zero else {"dp_replicate": layout.dp_replicate * degree}
    changes: dict[str, Any] = {axis: 1, **share}
    if axis == "tp":
        changes["sp"] = False
    if axis == "pp":
        changes |= {"vp": 1, "schedule": "1f1b"}
    return replace(layout, **changes)


def _with_batch(layout: Layout, plan: Plan) -> Layout:
    """Return the layout with the largest micro-batch up to its own that divides each rank's share of the batch."""
    per_rank = gcd(*batches(plan.recipe)) // layout.dp
    micro = min(layout.micro_batch or per_rank, max(1, per_rank))
    while micro > 1 and per_rank % micro:
        micro -= 1
    return replace(layout, micro_batch=micro)


def cheapest_fixes(
    estimator: Estimator, plan: Plan, most: int = 3, offered: Callable[[Layout], bool] = lambda layout: True
) -> list[LayoutChange]:
    """Return the `most` fastest single changes that make the layout fit, among those that `offered` accepts."""
    changes = [
        change for change in _single_changes(estimator, plan) if change.fits and offered(change.prediction.plan.layout)
    ]
    return sorted(changes, key=lambda change: change.prediction.step_s)[:most]


def _single_changes(estimator: Estimator, plan: Plan) -> Iterator[LayoutChange]:
    """Yield the layout with one change each.

    Each names what comes with it: a smaller micro-batch, or sequence parallelism with tensor parallelism.
    """
    layout = plan.layout
    candidates: list[Layout] = []
    none_bytes = fullest_rank(estimator, replace(layout, recompute="none", recompute_layers=0)).total_bytes
    # only policies that recompute more than the present one, each on as few layers as fit
    for recompute in layout.policies[max(1, layout.policies.index(layout.recompute)) :]:
        partial = fewest_layers(estimator, replace(layout, recompute=recompute), usable_bytes(plan), none_bytes)
        if partial is not None and partial != layout:
            candidates.append(partial)
    half = layout.micro_batch_of(plan.recipe.global_batch) // 2
    while half:
        candidates.append(replace(layout, micro_batch=half))
        half //= 2
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    for zero in stages:
        if zero > layout.zero and layout.dp * layout.cp > 1 and (layout.pp == 1 or zero == 1):
            candidates.append(replace(layout, zero=zero, dp_shard=layout.dp, dp_replicate=1))
    for axis in ("tp", "cp", "pp"):
        for factor in (2, 4, 8):
            more = _with_axis(layout, axis, factor)
            if more:
                candidates.append(_with_batch(more, plan))
    yield from _predict_legal(estimator, plan, ((changed, differences(layout, changed)) for changed in candidates))


def _with_axis(layout: Layout, axis: str, factor: int) -> Layout | None:
    name = "dp_shard" if layout.zero else "dp_replicate"
    if getattr(layout, name) % factor:
        return None
    changes: dict[str, Any] = {axis: getattr(layout, axis) * factor, name: getattr(layout, name) // factor}
    if axis == "tp":
        changes["sp"] = True
    if axis == "pp" and layout.zero > 1:
        changes["zero"] = 1
    return replace(layout, **changes)


def longest_sequence(estimator: Estimator, plan: Plan) -> tuple[int, LayoutChange | None]:
    """Double the sequence until it no longer fits, everything else unchanged.

    Returns the longest sequence that fits and the first that does not. The latter is None if it is not legal.
    """
    sequence, fits = plan.recipe.sequence, plan.recipe.sequence
    while sequence < 2**24:
        sequence *= 2
        longer = replace(plan, recipe=replace(plan.recipe, sequence=sequence))
        if longer.violations():
            return fits, None
        prediction = _with_same_software(estimator, longer).predict(longer)
        if prediction.peak_bytes > usable_bytes(plan):
            return fits, LayoutChange(what=f"recipe.sequence={sequence}", prediction=prediction, fits=False)
        fits = sequence
    return fits, None


def has_no_half(plan: Plan) -> bool:
    """Return True if the devices cannot be halved into whole nodes or devices."""
    cluster = plan.cluster
    return cluster.devices == 1 or bool((cluster.nodes if cluster.nodes > 1 else cluster.devices_per_node) % 2)


def on_half(estimator: Estimator, plan: Plan) -> Ranking | None:
    """Search the best layout on half the nodes, or half the devices of one node.

    Returns None if there is no whole half.
    """
    cluster = plan.cluster
    if has_no_half(plan):
        return None
    if cluster.nodes > 1:
        smaller = replace(cluster, nodes=cluster.nodes // 2)
    else:
        smaller = replace(cluster, devices_per_node=cluster.devices_per_node // 2)
    half = replace(plan, cluster=smaller)
    return search(_with_same_software(estimator, half), half, listed=1)


def _with_same_software(estimator: Estimator, plan: Plan) -> Estimator:
    return build_estimator(plan, estimator.stack, estimator.speeds, estimator.links, estimator.costs.document_tokens)


def enough_nodes(estimator: Estimator, plan: Plan, fixed: Fixed | None = None) -> int:
    """Double the nodes until some layout with the `fixed` values fits, and return their number.

    Returns 0 if DOUBLINGS are not enough or the batch has no share for each rank.
    """
    cluster = plan.cluster
    for doubling in range(1, DOUBLINGS + 1):
        larger = replace(plan, layout=Layout(), cluster=replace(cluster, nodes=cluster.nodes * 2**doubling))
        if search(build_estimator(larger, estimator.stack, estimator.speeds), larger, fixed=fixed, listed=1).best:
            return larger.cluster.nodes
    return 0
