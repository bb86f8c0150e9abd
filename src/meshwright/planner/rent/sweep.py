"""All devices with a price on all numbers of nodes: the runs that nothing else beats in both time and money.

A cluster is searched only if it could be among them. No layout takes fewer device-seconds per step than its blocks on
one device at the best micro-batch (`least_device_s`; a test compares it with what searches found), so every cluster has
a least time and a least bill. What is dominated by a run that was found already stays unseen; of the others the search
looks only for layouts that would not be (`below_s`). The space of layouts is a part of `plan`'s: no context parallelism
below LONG tokens, tensor parallelism inside a node, at most MOST_STAGES pipeline stages. The runs of the front are then
searched once more in all of `plan`'s space, if `thorough`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.rent.clusters import Offer, offers_of
from meshwright.planner.rent.failures import DAY_S, Conditions
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.run_on import RunOn, run_on, steps_of
from meshwright.planner.search.bounds import CellBounds
from meshwright.planner.search.fewest_layers import refine
from meshwright.planner.search.memory_bounds import CellTerms
from meshwright.planner.search.ranking import search
from meshwright.planner.search.regions import Cell, Fixed, RegionFamily
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.legal import divisors
from meshwright.spec.plan import Plan

LONG = 32_768
"""Tokens of a sequence from which on context parallelism is searched."""
MOST_STAGES = 16
LONGEST_S = 366 * DAY_S
"""Runs that take longer are left out, unless the deadline is later."""
SLACK, SLACK_MOE = 0.99, 0.8
"""Of the least device-seconds: those of experts fall where ranks share them."""
LARGEST_MICRO = 64
WORTH = 0.03
"""Share of the time that a dearer run must save to be listed: the planner cannot tell less apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentAsked:
    """What is to be trained, and what the run will meet. Only the cluster of `plan` is left open."""

    plan: Plan
    tokens: float
    given: Conditions = field(default_factory=Conditions)
    longest_s: float = LONGEST_S
    thorough: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        recipe = self.plan.recipe
        return steps_of(self.tokens, recipe.global_batch * recipe.sequence)


@dataclass(slots=True, kw_only=True)
class Swept:
    """What became of all clusters."""

    runs: list[RunOn] = field(default_factory=list)
    """Every run that was found, on the front or not."""
    clusters: int = 0
    """All that were tried."""
    dominated: int = 0
    """Of them, those that cannot be on the front: not searched, or no layout was found that could be."""
    too_long: int = 0
    """Those that take longer than LONGEST_S at best."""
    unfit: list[str] = field(default_factory=list)
    """Those on which nothing fits with memory to spare, as `h100x8 x 1`."""

    @property
    def front(self) -> list[RunOn]:
        """Those that no other beats in time and money, the cheapest first."""
        return front(self.runs)


def front(runs: Sequence[RunOn]) -> list[RunOn]:
    """The Pareto front of money and time, the cheapest first; each is faster than the one before by WORTH or more."""
    found: list[RunOn] = []
    for one in sorted(runs, key=lambda one: (one.usd, one.wall_s)):
        if not found or one.wall_s < (1 - WORTH) * found[-1].wall_s:
            found.append(one)
    return found


def sweep(asked: RentAsked, prices: Prices, devices: Sequence[str], nodes: Sequence[int]) -> Swept:
    """Search all clusters of these devices."""
    found = _Sweep(asked)
    bounds = []
    for name in devices:
        offers = list(offers_of(name, prices, nodes))
        if offers:
            least_s = least_device_s(_estimator(asked.plan, offers[0]))
            bounds.append((least_s * offers[-1].price.usd_per_hour, least_s, offers))
    for _, least_s, offers in sorted(bounds, key=lambda one: one[0]):  # the cheapest first: it dominates most
        found.device(offers, least_s)
    if asked.thorough:
        found.look_again()
    return found.swept


def least_device_s(of: Estimator) -> float:
    """Device-seconds of a step that no layout of this device goes below: all blocks on one device, micro-batch by
    micro-batch, at the best size."""
    cell = Cell(1, False, 1, 1, 1, 1)
    plan = Plan(model=of.shape, recipe=of.recipe, cluster=of.cluster)
    least = CellBounds(of, plan, cell, [(1, 1, 0)], CellTerms())
    sizes = [size for size in divisors(of.recipe.global_batch) if size <= LARGEST_MICRO]
    found = min(least.family_s(RegionFamily(cell, size, "none", (("1f1b", 1),))) for size in sizes)
    return found * (SLACK_MOE if of.shape.moe else SLACK)


def _estimator(plan: Plan, offer: Offer) -> Estimator:
    return build_estimator(replace(plan, cluster=offer.cluster))


class _Sweep:
    def __init__(self, asked: RentAsked) -> None:
        self.asked, self.swept = asked, Swept()
        self.estimators: dict[str, Estimator] = {}

    def estimator(self, offer: Offer) -> Estimator:
        """Of an offer's cluster. What is counted for one number of nodes serves all."""
        if offer.name not in self.estimators:
            self.estimators[offer.name] = _estimator(self.asked.plan, offer)
        return self.estimators[offer.name].on_nodes(offer.nodes)

    def device(self, offers: Sequence[Offer], least_s: float) -> None:
        """All clusters of one device, the smallest first."""
        for offer in offers:
            self.swept.clusters += 1
            bound_s, below_s = least_s / offer.devices, self.below_s(offer)
            if bound_s * self.asked.steps > self.asked.longest_s:
                self.swept.too_long += 1
                continue
            if bound_s >= below_s:
                self.swept.dominated += 1
                continue
            self.keep(offer, below_s)

    def below_s(self, offer: Offer) -> float:
        """A step that takes as long or longer makes a run that one of those found beats in both time and money, or one
        that takes too long."""
        usd, start_s = offer.usd_per_s(), self.asked.given.restart_s
        limits = (max((1 - WORTH) * one.wall_s, one.usd / usd) for one in self.swept.front)
        return max(0.0, min([self.asked.longest_s, *limits]) - start_s) / self.asked.steps

    def keep(self, offer: Offer, below_s: float) -> None:
        """The fastest run on one cluster."""
        plan, of = replace(self.asked.plan, cluster=offer.cluster), self.estimator(offer)
        best, too_large = fastest(of, plan, _space(plan), below_s)
        if too_large:
            best, too_large = fastest(of, plan, {}, below_s)
        if best is not None:
            self.swept.runs.append(run_on(offer, best, self.asked.tokens, self.asked.given))
        elif too_large:
            self.swept.unfit.append(f"{offer.name} x {offer.nodes}")
        else:
            self.swept.dominated += 1

    def look_again(self) -> None:
        """The runs of the front with all of `plan`'s layouts."""
        for one in self.swept.front:
            plan = one.found.plan
            best, _ = fastest(self.estimator(one.offer), plan, {}, one.found.step_s)
            if best is not None:
                again = run_on(one.offer, best, one.tokens, self.asked.given)
                self.swept.runs[self.swept.runs.index(one)] = again


def fastest(of: Estimator, plan: Plan, fixed: Fixed, below_s: float) -> tuple[Prediction | None, bool]:
    """As `plan` recommends it: the fastest layout that fits with 95 %, recomputing no more than that takes.
    None where there is none below so many seconds; True then where all need too much memory, or none is legal."""
    share = of.largest_share
    found = search(of, plan, fixed=fixed, listed=1, share=share, below_s=below_s)
    if not found.best:
        return None, not found.slower
    return refine(of, found.best, share * usable_bytes(plan))[0], False


def _space(plan: Plan) -> Fixed:
    """The part of `plan`'s layouts that is searched on every cluster."""
    fixed: Fixed = {
        "tp": tuple(divisors(plan.cluster.devices_per_node)),
        "pp": tuple(range(1, MOST_STAGES + 1)),
    }
    return fixed if plan.recipe.sequence > LONG else {**fixed, "cp": (1,)}
