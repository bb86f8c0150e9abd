"""Layouts outside the search that have the requested degrees, or the rule that the nearest of them breaks."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.legal import divisors

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
