"""Why no layout has the degrees that were asked for: the layout nearest to legal, and the rule it breaks."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legal import divisors
from meshwright.spec.plan import Plan
from meshwright.spec.schedule_kinds import V_PLACED

MOST = 20_000
"""Layouts looked at."""


def rank_candidates(of: Estimator, plan: Plan, fixed: Fixed) -> Ranking:
    """The legal layouts with these values that the search leaves out; IllegalLayout with the rule where none is."""
    nearest: list[str] | None = None
    found = Ranking()
    for layout in candidates(plan, fixed):
        asked = replace(plan, layout=layout)
        broken = asked.violations()
        if broken:
            if nearest is None or len(broken) < len(nearest):
                nearest = broken
            continue
        found.legal += 1
        one = of.predict(asked)
        if one.peak_bytes <= usable_bytes(plan):
            found.best.append(one)
        elif found.nearest is None or one.peak_bytes < found.nearest.peak_bytes:
            found.nearest = one
    if not found.legal:
        none = f"no layout of {plan.cluster.devices} devices has all of these degrees: leave some of them open"
        raise IllegalLayout((nearest or [none])[0])
    found.too_large = found.legal - len(found.best)
    found.best.sort(key=lambda one: one.step_s)
    del found.best[20:]
    return found


def candidates(plan: Plan, fixed: Fixed) -> Iterator[Layout]:
    """Layouts of all devices with the fixed values; of what is free, the degrees, and a micro-batch of one sequence."""
    names = {field.name for field in fields(Layout)}
    given = {name: values[0] for name, values in fixed.items() if name in names - set(AXES)}
    free: dict[str, Any] = {"micro_batch": 1, **given}
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
    """(pp, dp_replicate, dp_shard, cp, tp) whose product is the number of devices."""
    for tp, cp, pp in product(*(fixed.get(axis, divisors(devices)) for axis in ("tp", "cp", "pp"))):
        if devices % (tp * cp * pp):
            continue
        dp = devices // (tp * cp * pp)
        if dp not in fixed.get("dp", (dp,)):
            continue
        for shard in fixed.get("dp_shard", divisors(dp)):
            if dp % shard == 0 and dp // shard in fixed.get("dp_replicate", (dp // shard,)):
                yield pp, dp // shard, shard, cp, tp
