"""Search over all devices with a price and all numbers of nodes for runs that nothing beats in both time and money.

A cluster is searched only if it could be among them. No layout takes fewer device-seconds per step than its blocks on
one device at the best micro-batch (`least_device_s`; a test compares it with searches). So every cluster has a least
time and a least bill. If a known run already beats both, the cluster is skipped. On the others the search looks only
for layouts that would not be beaten (`below_s`).

The space of layouts is a part of that of `plan`: no context parallelism below LONG tokens, tensor parallelism inside a
node, at most MOST_STAGES pipeline stages. If `thorough`, the runs of the front are then searched in all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.rent.clusters import Offer, offers_of
from meshwright.planner.rent.goodput import DAY_S, Conditions
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.run_on import RentedRun, rent_run, steps_of
from meshwright.planner.search.bounds import CellBounds, CellTerms
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import refine
from meshwright.planner.search.regions import Cell, Fixed, RegionFamily
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.legal import divisors

LONG = 32_768
"""Tokens of a sequence from which context parallelism is searched."""
MOST_STAGES = 16
LONGEST_S = 366 * DAY_S
"""Runs that take longer are left out, unless the deadline is later."""
SLACK, SLACK_MOE = 0.99, 0.8
"""Factors on the least device-seconds: those of experts fall if ranks share them."""
LARGEST_MICRO = 64
WORTH = 0.03
"""Share of the time that a dearer run must save to be listed: the planner cannot resolve less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """The training to run, and its conditions. Only the cluster of `plan` is left open."""

    plan: Plan
    tokens: float
    conditions: Conditions = field(default_factory=Conditions)
    longest_s: float = LONGEST_S
    thorough: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        recipe = self.plan.recipe
        return steps_of(self.tokens, recipe.global_batch * recipe.sequence)


@dataclass(slots=True, kw_only=True)
class Swept:
    """Outcome for all clusters."""

    runs: list[RentedRun] = field(default_factory=list)
    """Every run with a layout, on the front or not."""
    clusters: int = 0
    """Number of clusters that were tried."""
    dominated: int = 0
    """Clusters that cannot be on the front: not searched, or no layout was good enough."""
    too_long: int = 0
    """Clusters on which the run takes longer than the limit, failures included."""
    endless: int = 0
    """Those of them on which failures leave the run no progress."""
    unfit: list[str] = field(default_factory=list)
    """Clusters on which nothing fits with memory to spare, as `h100x8 x 1`."""

    @property
    def front(self) -> list[RentedRun]:
        """Runs that no other beats in both time and money, the cheapest first."""
        return front(self.runs)


def front(runs: Sequence[RentedRun]) -> list[RentedRun]:
    """Return the Pareto front of money and time, the cheapest first, each faster by WORTH or more."""
    best: list[RentedRun] = []
    for run in sorted(runs, key=lambda run: (run.usd, run.wall_s)):
        if not best or run.wall_s < (1 - WORTH) * best[-1].wall_s:
            best.append(run)
    return best


def sweep(request: RentRequest, prices: Prices, devices: Sequence[str], nodes: Sequence[int]) -> Swept:
    """Search all clusters of these devices."""
    sweeping = _Sweep(request)
    bounds = []
    for name in devices:
        offers = list(offers_of(name, prices, nodes))
        if offers:
            least_s = least_device_s(_estimator(request.plan, offers[0]))
            bounds.append((least_s * offers[-1].price.usd_per_hour, least_s, offers))
    for _, least_s, offers in sorted(bounds, key=lambda bound: bound[0]):  # the cheapest first: it dominates most
        sweeping.device(offers, least_s)
    if request.thorough:
        sweeping.look_again()
    return sweeping.swept


def least_device_s(estimator: Estimator) -> float:
    """Return device-seconds of a step that no layout goes below: all blocks on one device, at the best size."""
    cell = Cell(1, False, 1, 1, 1, 1)
    plan = Plan(model=estimator.shape, recipe=estimator.recipe, cluster=estimator.cluster)
    least = CellBounds(estimator, plan, cell, [(1, 1, 0)], CellTerms())
    sizes = [size for size in divisors(estimator.recipe.global_batch) if size <= LARGEST_MICRO]
    least_s = min(least.family_s(RegionFamily(cell, size, "none", (("1f1b", 1),))) for size in sizes)
    return least_s * (SLACK_MOE if estimator.shape.moe else SLACK)


def _estimator(plan: Plan, offer: Offer) -> Estimator:
    return build_estimator(replace(plan, cluster=offer.cluster))


class _Sweep:
    def __init__(self, request: RentRequest) -> None:
        self.request, self.swept = request, Swept()
        self.estimators: dict[str, Estimator] = {}

    def estimator(self, offer: Offer) -> Estimator:
        """Return the estimator of an offer's cluster. Counts for one number of nodes serve all."""
        if offer.name not in self.estimators:
            self.estimators[offer.name] = _estimator(self.request.plan, offer)
        return self.estimators[offer.name].on_nodes(offer.nodes)

    def device(self, offers: Sequence[Offer], least_s: float) -> None:
        """Try all clusters of one device, the smallest first."""
        for offer in offers:
            self.swept.clusters += 1
            bound_s, below_s = least_s / offer.devices, self.below_s(offer)
            if bound_s * self.request.steps > self.request.longest_s:
                self.swept.too_long += 1
                continue
            if bound_s >= below_s:
                self.swept.dominated += 1
                continue
            self.keep(offer, below_s)

    def below_s(self, offer: Offer) -> float:
        """Return the time of a step at which a run takes too long, or a known run beats it in time and money."""
        usd, start_s = offer.usd_per_s(), self.request.conditions.restart_s
        limits = (max((1 - WORTH) * run.wall_s, run.usd / usd) for run in self.swept.front)
        return max(0.0, min([self.request.longest_s, *limits]) - start_s) / self.request.steps

    def keep(self, offer: Offer, below_s: float) -> None:
        """Find the fastest run on one cluster."""
        plan, estimator = replace(self.request.plan, cluster=offer.cluster), self.estimator(offer)
        best, too_large = fastest(estimator, plan, _space(plan), below_s)
        if too_large:
            best, too_large = fastest(estimator, plan, {}, below_s)
        if best is not None:
            run = rent_run(offer, best, self.request.tokens, self.request.conditions)
            # The search bounds the steps alone. Failures may stretch them beyond the limit, or leave no progress.
            if run.wall_s > self.request.longest_s:
                self.swept.too_long += 1
                self.swept.endless += run.timing.is_endless
            else:
                self.swept.runs.append(run)
        elif too_large:
            self.swept.unfit.append(f"{offer.name} x {offer.nodes}")
        else:
            self.swept.dominated += 1

    def look_again(self) -> None:
        """Search the runs of the front again with all of `plan`'s layouts."""
        for run in self.swept.front:
            plan = run.prediction.plan
            best, _ = fastest(self.estimator(run.offer), plan, {}, run.prediction.step_s)
            if best is not None:
                again = rent_run(run.offer, best, run.tokens, self.request.conditions)
                self.swept.runs[self.swept.runs.index(run)] = again


def fastest(estimator: Estimator, plan: Plan, fixed: Fixed, below_s: float) -> tuple[Prediction | None, bool]:
    """Return the layout that `plan` recommends: the fastest that fits with 95 %, with the least recomputation.

    None = none takes less than `below_s`. Then the flag is True if all need too much memory, or none is legal.
    """
    share = estimator.largest_share
    ranking = search(estimator, plan, fixed=fixed, listed=1, share=share, below_s=below_s)
    if not ranking.best:
        return None, not ranking.slower
    return refine(estimator, ranking.best, share * usable_bytes(plan))[0], False


def _space(plan: Plan) -> Fixed:
    """Return the part of `plan`'s layouts that is searched on every cluster."""
    fixed: Fixed = {
        "tp": tuple(divisors(plan.cluster.devices_per_node)),
        "pp": tuple(range(1, MOST_STAGES + 1)),
    }
    return fixed if plan.recipe.sequence > LONG else {**fixed, "cp": (1,)}
