"""Recommendation among the layouts that fit, refined by layers that recompute, and advice about layouts outside.

The fastest layout that fits with a probability of at least 95 % is taken. Predictions err by several percent, and
fragmentation takes some memory. A run that ends out of memory after an hour costs more than a few percent of speed.
Bolder layouts stay listed. A layout that recomputes does so on the fewest layers that suffice, unless the policy is
fixed.

The search knows only all layers or none. `fewest_layers` refines the layouts that it lists: with each layer that
recomputes, the peak falls and the time grows.

Requested degrees that the search does not list get the layouts outside it that have them, or the rule that the nearest
breaks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice, product
from math import ceil, inf
from typing import Any

from meshwright.planner.search.ranking import Ranking, fullest_rank, ranking_key, search
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.error_ranges import likely_share
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.legal import divisors

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
    # the listed ones are the fastest: a safe layout may be slower than all of them
    if all(map(is_bold, ranking.best)):
        ranking.best += search(estimator, plan, fixed=fixed, listed=1, share=share).best
    # the user's own choice of recomputation is not refined
    if not {"recompute", "recompute_layers"} & (fixed or {}).keys():
        ranking.best = refine(estimator, ranking.best, share * usable_bytes(plan))
    safest = next((prediction for prediction in ranking.best if not is_bold(prediction)), ranking.best[0])
    ranking.best = [safest, *(prediction for prediction in ranking.best if prediction is not safest)]
    return ranking


ALIKE = 0.001
"""Largest relative difference of step times at which layouts that differ only in virtual stages are one choice."""


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


MOST = 20_000
"""Most layouts examined."""


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
            # of several illegal layouts the one that breaks fewest rules says best what is wrong
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
    # the search's order: fastest first
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
