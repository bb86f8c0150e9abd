"""Which of the layouts that fit is recommended: the fastest that leaves some memory free.

The planner errs by several percent, and fragmentation takes some. A run that ends out of memory after an hour costs
more than a few percent of speed. The faster ones stay listed.
"""

from meshwright.planner.search.ranking import Found, search, usable_bytes
from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.plan import Plan

FREE = 0.05
"""Share of what a program can have that a recommended layout leaves free."""


def is_tight(found: Prediction) -> bool:
    """Whether less than that is free."""
    return found.peak_bytes > (1 - FREE) * usable_bytes(found.plan)


def recommended(of: Estimator, plan: Plan, found: Found, fixed: Fixed | None = None) -> Found:
    """The same with the fastest layout that is not tight as the first of `best`, also where all that were listed are;
    unchanged where every layout is tight, or none was to be chosen."""
    if found.legal < 2 or not found.best or not is_tight(found.best[0]):
        return found
    chosen = next((one for one in found.best if not is_tight(one)), None)
    if chosen is None:
        chosen = next(iter(search(of, plan, fixed=fixed, listed=1, share=1 - FREE).best), None)
    if chosen is not None:
        found.best = [chosen, *(one for one in found.best if one is not chosen)]
    return found
