"""What one change of a layout buys and costs: why each degree is there, what would make a plan fit, what a longer
sequence or half the machine would do."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from meshwright.planner.search.fewest_layers import fewest_layers
from meshwright.planner.search.ranking import Ranking, fullest_rank, search
from meshwright.planner.search.regions import Fixed, batches
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.worlds import differences

AXES = ("tp", "cp", "pp", "ep")
DOUBLINGS = 5
"""Of nodes, where none of the layouts of a cluster fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """A layout with one thing changed."""

    what: str
    prediction: Prediction
    fits: bool


def predict_change(of: Estimator, plan: Plan, layout: Layout, what: str) -> LayoutChange | None:
    """The change's prediction; None where it is illegal."""
    try:
        changed = replace(plan, layout=layout)
        if changed.violations():
            return None
        prediction = of.predict(changed)
    except (IllegalLayout, PlanError):
        return None
    return LayoutChange(what=what, prediction=prediction, fits=prediction.peak_bytes <= usable_bytes(plan))


def without_techniques(of: Estimator, plan: Plan) -> Iterator[LayoutChange]:
    """The layout with one technique less; its ranks go to data parallelism, sharded as the others are."""
    layout = plan.layout
    tries = [(_with_batch(_less(layout, axis), plan), f"{axis}=1") for axis in AXES if getattr(layout, axis) > 1]
    if layout.zero:
        alone = replace(layout, zero=0, dp_replicate=layout.dp, dp_shard=1)
        tries.append((alone if layout.cp == 1 else replace(layout, zero=0), "zero=0"))
    if layout.recompute != "none":
        tries.append((replace(layout, recompute="none", recompute_layers=0), "recompute=none"))
    yield from _legal(of, plan, tries)


def _legal(of: Estimator, plan: Plan, tries: Iterable[tuple[Layout, str]]) -> Iterator[LayoutChange]:
    """The predictions of those that are."""
    for layout, what in tries:
        found = predict_change(of, plan, layout, what)
        if found:
            yield found


def _less(layout: Layout, axis: str) -> Layout:
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
    """A micro-batch that the ranks' share still divides into."""
    per_rank = gcd(*batches(plan.recipe)) // layout.dp
    micro = min(layout.micro_batch or per_rank, max(1, per_rank))
    while micro > 1 and per_rank % micro:
        micro -= 1
    return replace(layout, micro_batch=micro)


def cheapest_fixes(
    of: Estimator, plan: Plan, most: int = 3, offered: Callable[[Layout], bool] = lambda layout: True
) -> list[LayoutChange]:
    """What would make a layout that does not fit fit, the cheapest first, of those that are `offered`."""
    found = [change for change in _tries(of, plan) if change.fits and offered(change.prediction.plan.layout)]
    return sorted(found, key=lambda change: change.prediction.step_s)[:most]


def _tries(of: Estimator, plan: Plan) -> Iterator[LayoutChange]:
    """One change each; what it takes along (a smaller micro-batch, sp with tp) is said with it."""
    layout = plan.layout
    tries: list[Layout] = []
    none_bytes = fullest_rank(of, replace(layout, recompute="none", recompute_layers=0)).total_bytes
    for recompute in layout.policies[max(1, layout.policies.index(layout.recompute)) :]:
        some = fewest_layers(of, replace(layout, recompute=recompute), usable_bytes(plan), none_bytes)
        if some is not None and some != layout:
            tries.append(some)
    half = layout.micro_batch_of(plan.recipe.global_batch) // 2
    while half:
        tries.append(replace(layout, micro_batch=half))
        half //= 2
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    for zero in stages:
        if zero > layout.zero and layout.dp * layout.cp > 1 and (layout.pp == 1 or zero == 1):
            tries.append(replace(layout, zero=zero, dp_shard=layout.dp, dp_replicate=1))
    for axis in ("tp", "cp", "pp"):
        for factor in (2, 4, 8):
            more = _more(layout, axis, factor)
            if more:
                tries.append(_with_batch(more, plan))
    yield from _legal(of, plan, ((changed, differences(layout, changed)) for changed in tries))


def _more(layout: Layout, axis: str, factor: int) -> Layout | None:
    name = "dp_shard" if layout.zero else "dp_replicate"
    if getattr(layout, name) % factor:
        return None
    changes: dict[str, Any] = {axis: getattr(layout, axis) * factor, name: getattr(layout, name) // factor}
    if axis == "tp":
        changes["sp"] = True
    if axis == "pp" and layout.zero > 1:
        changes["zero"] = 1
    return replace(layout, **changes)


def longest_sequence(of: Estimator, plan: Plan) -> tuple[int, LayoutChange | None]:
    """(the longest sequence that fits by doubling, the first that does not) with everything else as it is."""
    sequence, fits = plan.recipe.sequence, plan.recipe.sequence
    while sequence < 2**24:
        sequence *= 2
        longer = replace(plan, recipe=replace(plan.recipe, sequence=sequence))
        if longer.violations():
            return fits, None
        prediction = build_estimator(longer, of.stack, of.speeds, of.links, of.document_tokens).predict(longer)
        if prediction.peak_bytes > usable_bytes(plan):
            return fits, LayoutChange(what=f"recipe.sequence={sequence}", prediction=prediction, fits=False)
        fits = sequence
    return fits, None


def has_no_half(plan: Plan) -> bool:
    """Whether there is no half of the devices to look at."""
    cluster = plan.cluster
    return cluster.devices == 1 or bool((cluster.nodes if cluster.nodes > 1 else cluster.devices_per_node) % 2)


def on_half(of: Estimator, plan: Plan) -> Ranking | None:
    """The best layouts, freely chosen, with half the nodes (or half the devices of one); None where that is no whole
    number."""
    cluster = plan.cluster
    if has_no_half(plan):
        return None
    if cluster.nodes > 1:
        smaller = replace(cluster, nodes=cluster.nodes // 2)
    else:
        smaller = replace(cluster, devices_per_node=cluster.devices_per_node // 2)
    half = replace(plan, cluster=smaller)
    return search(build_estimator(half, of.stack, of.speeds, of.links, of.document_tokens), half, listed=1)


def enough_nodes(of: Estimator, plan: Plan, fixed: Fixed | None = None) -> int:
    """Nodes by doubling on which some layout fits, of those with what is `fixed`; 0 where none of few
    doublings is enough, or the batch has no share for each."""
    cluster = plan.cluster
    for doubling in range(1, DOUBLINGS + 1):
        larger = replace(plan, layout=Layout(), cluster=replace(cluster, nodes=cluster.nodes * 2**doubling))
        if search(build_estimator(larger, of.stack, of.speeds), larger, fixed=fixed, listed=1).best:
            return larger.cluster.nodes
    return 0
