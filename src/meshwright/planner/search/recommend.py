"""Recommendation among the layouts that fit: the fastest that fits with a probability of at least 95 %.

Predictions err by several percent, and fragmentation takes some memory. A run that ends out of memory after an hour
costs more than a few percent of speed. Bolder layouts stay listed. A layout that recomputes does so on the fewest
layers that suffice, unless the policy is fixed.
"""

from dataclasses import replace

from meshwright.planner.search.fewest_layers import refine
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.error_ranges import likely_share
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan.plan import Plan


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
