"""Recommendation among the layouts that fit, and effects of single changes of a layout.

The fastest layout that fits with a probability of at least 95 % is taken. Predictions err by several percent, and
fragmentation takes some memory. A run that ends out of memory after an hour costs more than a few percent of speed.
Bolder layouts stay listed. A layout that recomputes does so on the fewest layers that suffice, unless the policy is
fixed.

The search knows only all layers or none. `fewest_layers` refines the layouts that it lists: with each layer that
recomputes, the peak falls and the time grows.

Requested degrees that the search does not list get the layouts outside it that have them, or the rule that the nearest
breaks.

Changes say why each degree is there, and which change makes a plan fit. A longer sequence and half the machine are
changes too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice, product
from math import ceil, gcd, inf
from typing import Any, Literal

from meshwright.planner.search.ranking import Ranking, fullest_rank, ranking_key, search
from meshwright.planner.search.regions import Fixed, batches
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, likely_share, usable_bytes
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.plan.plan import Plan, differences
from meshwright.spec.rules.legal import divisors

WORTH = 0.005
"""Least share of a step to gain from partial recomputation. Below it all layers recompute, which leaves memory free."""
ALIKE = 0.001
"""Largest relative difference of step times at which layouts that differ only in virtual stages are one choice."""
MOST = 20_000
"""Most layouts examined."""
TECHNIQUE_AXES = ("tp", "cp", "pp", "ep")
DOUBLINGS = 5
"""Doublings of the number of nodes to try when no layout of a cluster fits."""


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
        # All layers are written as 0 (% most), so that equal layouts compare equal.
        return replace(layout, recompute_layers=1 % most)
    # Each peak costs a played schedule; the first guess is mostly right or next to it.
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
    # A plan with a number of layers is fragile: it must gain something over recomputing all.
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


def is_bold(prediction: Prediction) -> bool:
    """Return True if the layout fits with a probability below 95 %."""
    plan = prediction.plan
    share = likely_share(prediction.stack, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
    return prediction.peak_bytes > share * usable_bytes(plan)


def recommend(estimator: Estimator, plan: Plan, ranking: Ranking, fixed: Fixed | None = None) -> Ranking:
    """Move the fastest layout that is not bold to the front of `ranking.best`, and return the ranking.

    If all listed layouts are bold, a search for safer ones is added. The ranking is unchanged if every layout is bold
    or there was nothing to choose from.
    """
    if ranking.legal < 2 or not ranking.best:
        return ranking
    share = estimator.largest_share
    # The listed ones are the fastest: a safe layout may be slower than all of them.
    if all(map(is_bold, ranking.best)):
        ranking.best += search(estimator, plan, fixed=fixed, listed=1, share=share).best
    # The user's own choice of recomputation is not refined.
    if not {"recompute", "recompute_layers"} & (fixed or {}).keys():
        ranking.best = refine(estimator, ranking.best, share * usable_bytes(plan))
    safest = next((prediction for prediction in ranking.best if not is_bold(prediction)), ranking.best[0])
    ranking.best = [safest, *(prediction for prediction in ranking.best if prediction is not safest)]
    return ranking


def merge_alike(best: list[Prediction]) -> list[tuple[Prediction, list[int]]]:
    """Merge rows that differ only in virtual stages and by less than ALIKE of the time.

    Returns each remaining layout with the merged numbers of virtual stages, in the same order.
    """
    rows: list[tuple[Prediction, list[int]]] = []
    for prediction in best:
        virtual_stages = next((stages for listed, stages in rows if _alike(listed, prediction)), None)
        if virtual_stages is None:
            rows.append((prediction, []))
        else:
            virtual_stages.append(prediction.plan.layout.vp)
    return rows


def _alike(first: Prediction, other: Prediction) -> bool:
    return (
        replace(first.plan.layout, vp=other.plan.layout.vp) == other.plan.layout
        and is_bold(first) == is_bold(other)
        and abs(other.step_s / first.step_s - 1) < ALIKE
    )


def rank_candidates(estimator: Estimator, plan: Plan, fixed: Fixed) -> Ranking:
    """Rank the legal layouts with these values that the search leaves out.

    Raises IllegalLayout with the rule if none is.
    """
    fewest_broken: list[str] | None = None
    ranking = Ranking()
    for layout in candidates(plan, fixed):
        candidate = replace(plan, layout=layout)
        broken = candidate.violations()
        if broken:
            # Of several illegal layouts the one that breaks fewest rules says best what is wrong.
            if fewest_broken is None or len(broken) < len(fewest_broken):
                fewest_broken = broken
            continue
        ranking.legal += 1
        prediction = estimator.predict(candidate)
        if prediction.peak_bytes <= usable_bytes(plan):
            ranking.best.append(prediction)
        elif ranking.nearest is None or prediction.peak_bytes < ranking.nearest.peak_bytes:
            ranking.nearest = prediction
    if not ranking.legal:
        none = f"no layout of {plan.cluster.devices} devices has all of these degrees: leave some of them open"
        raise IllegalLayout((fewest_broken or [none])[0])
    ranking.too_large = ranking.legal - len(ranking.best)
    # The search's order: fastest first.
    ranking.best.sort(key=lambda prediction: prediction.step_s)
    del ranking.best[20:]
    return ranking


def candidates(plan: Plan, fixed: Fixed) -> Iterator[Layout]:
    """Yield layouts of all devices with the fixed values.

    Degrees are free where they are not fixed, and a micro-batch is one sequence.
    """
    names = {field.name for field in fields(Layout)}
    fixed_values = {name: values[0] for name, values in fixed.items() if name in names - set(AXES)}
    free: dict[str, Any] = {"micro_batch": 1, **fixed_values}
    for pp, replicate, shard, cp, tp in islice(_degrees(plan.cluster.devices, fixed), MOST):
        schedule = free.get("schedule", "interleaved" if free.get("vp", 1) > 1 and pp > 1 else "1f1b")
        changes: dict[str, Any] = {
            "sp": False,
            "ep": 1,
            "recompute": "none",
            "recompute_layers": 0,
            "pp": pp,
            "dp_replicate": replicate,
            "dp_shard": shard,
            "cp": cp,
            "tp": tp,
            "vp": 2 if schedule in V_PLACED and pp > 1 else 1,
            "zero": 1 if shard * cp > 1 else 0,
            "stages": plan.layout.stages if pp > 1 else (),
            **free,
        }
        yield replace(plan.layout, schedule=schedule, **{k: v for k, v in changes.items() if k != "schedule"})


def _degrees(devices: int, fixed: Fixed) -> Iterator[tuple[int, ...]]:
    """Yield (pp, dp_replicate, dp_shard, cp, tp) whose product is the number of devices."""
    for tp, cp, pp in product(*(fixed.get(axis, divisors(devices)) for axis in ("tp", "cp", "pp"))):
        if devices % (tp * cp * pp):
            continue
        dp = devices // (tp * cp * pp)
        if dp not in fixed.get("dp", (dp,)):
            continue
        for shard in fixed.get("dp_shard", divisors(dp)):
            if dp % shard == 0 and dp // shard in fixed.get("dp_replicate", (dp // shard,)):
                yield pp, dp // shard, shard, cp, tp


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
        (_with_batch(_without_axis(layout, axis), plan), f"{axis}=1")
        for axis in TECHNIQUE_AXES
        if getattr(layout, axis) > 1
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
    # A ramp has several batches, and a micro-batch must divide the share of each.
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
    # Only policies that recompute more than the present one, each on as few layers as fit.
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
    # An end for layouts whose memory hardly grows with the sequence.
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
