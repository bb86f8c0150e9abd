"""Which of the layouts that fit is recommended: the fastest that fits with a probability of 95 % or more.

The planner errs by several percent, and fragmentation takes some. A run that ends out of memory after an hour costs
more than a few percent of speed. The bolder ones stay listed. Layouts that recompute do so on no more layers than that
takes, unless the policy is given.
"""

from dataclasses import replace

from meshwright.planner.search.fewest_layers import refine
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.error_ranges import likely_share
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan import Plan


def is_bold(found: Prediction) -> bool:
    """Whether it fits with a smaller probability."""
    plan = found.plan
    share = likely_share(found.stack, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
    return found.peak_bytes > share * usable_bytes(plan)


def recommend(of: Estimator, plan: Plan, found: Ranking, fixed: Fixed | None = None) -> Ranking:
    """The same with the fastest layout that is not bold as the first of `best`, also where all that were listed are;
    unchanged where every layout is bold, or none was to be chosen."""
    if found.legal < 2 or not found.best:
        return found
    share = of.largest_share
    if all(map(is_bold, found.best)):
        found.best += search(of, plan, fixed=fixed, listed=1, share=share).best
    if not {"recompute", "recompute_layers"} & (fixed or {}).keys():
        found.best = refine(of, found.best, share * usable_bytes(plan))
    chosen = next((one for one in found.best if not is_bold(one)), found.best[0])
    found.best = [chosen, *(one for one in found.best if one is not chosen)]
    return found


ALIKE = 0.001
"""Layouts whose step times differ by less, and which differ in their virtual stages only, are one choice."""


def merge_alike(best: list[Prediction]) -> list[tuple[Prediction, list[int]]]:
    """Each layout with the numbers of virtual stages that do as well: those rows differ in nothing else, and by less
    than ALIKE of the time. The order stays."""
    rows: list[tuple[Prediction, list[int]]] = []
    for one in best:
        same = next((alike for first, alike in rows if _alike(first, one)), None)
        if same is None:
            rows.append((one, []))
        else:
            same.append(one.plan.layout.vp)
    return rows


def _alike(first: Prediction, other: Prediction) -> bool:
    return (
        replace(first.plan.layout, vp=other.plan.layout.vp) == other.plan.layout
        and is_bold(first) == is_bold(other)
        and abs(other.step_s / first.step_s - 1) < ALIKE
    )
