"""A run on a cluster: its layout, its weeks, its bill, its energy, and what stops more devices from helping."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.rent import uncertainty
from meshwright.planner.rent.clusters import Offer
from meshwright.planner.rent.failures import Conditions, Saves, saves_of
from meshwright.planner.rent.goodput import Weeks, weeks
from meshwright.planner.rent.simulation import Played, play
from meshwright.planner.step.budget import critical
from meshwright.planner.step.error_ranges import fit_probability
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.held import written_bytes
from meshwright.spec.plan import Plan
from meshwright.spec.units import count, many

SHOWN = 0.05
"""Share of a step from which on a limit is named."""
KWH = 3.6e6
"""Joules."""


@dataclass(frozen=True, kw_only=True)
class RunOn:
    """All of a run on one cluster. Money is US dollars, without storage, traffic, tax and discounts."""

    offer: Offer
    found: Prediction
    tokens: float
    weeks: Weeks
    saves: Saves

    @property
    def title(self) -> str:
        """Its cluster, with the spare nodes."""
        return self.offer.title + (f" and {many(self.weeks.spares, 'spare node')}" if self.weeks.spares else "")

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return steps_of(self.tokens, self.found.tokens_per_step)

    @property
    def wall_s(self) -> float:
        """Mean, from start to end."""
        return self.weeks.wall_s

    @property
    def usd(self) -> float:
        """Mean bill, spare nodes paid like the others."""
        return self.wall_s * self.offer.usd_per_s(self.weeks.spares)

    @property
    def days(self) -> str:
        """Its mean time to what is known of it, in print."""
        return uncertainty.days(self.wall_s, self.error)

    @property
    def dollars(self) -> str:
        """Its mean bill, as well."""
        return uncertainty.dollars(self.usd, self.error)

    @property
    def kwh(self) -> float | None:
        """Datasheet watts of all devices, spare ones too, all the time: no hosts, no network, no cooling. None where
        nobody gives the watts of this device."""
        watts = self.offer.cluster.device.watts
        devices = self.offer.devices_per_node * (self.offer.nodes + self.weeks.spares)
        return watts * devices * self.wall_s / KWH if watts else None

    @cached_property
    def played(self) -> Played:
        """The same, failure by failure."""
        return play(self.weeks)

    @property
    def error(self) -> float:
        """Of its step time, as a standard deviation of the logarithm."""
        return uncertainty.time_error(self.found)

    @cached_property
    def range_s(self) -> tuple[float, float]:
        """The 90 % range of its time: chance, and the planner's error about it."""
        return self._quantile_s(0.05), self._quantile_s(0.95)

    @property
    def range_usd(self) -> tuple[float, float]:
        """The same of its bill."""
        low_s, high_s = self.range_s
        each = self.offer.usd_per_s(self.weeks.spares)
        return low_s * each, high_s * each

    def _quantile_s(self, share: float) -> float:
        """By bisection, to a thousandth."""
        low_s, high_s = self.wall_s / 1e3, max(self.wall_s, self.played.wall_s[-1]) * 1e3
        while high_s > 1.001 * low_s:
            middle_s = (low_s * high_s) ** 0.5
            low_s, high_s = (low_s, middle_s) if self.ends_within(middle_s) >= share else (middle_s, high_s)
        return low_s

    def ends_within(self, limit_s: float) -> float:
        """Probability: every simulated run with the planner's error about it."""
        runs, middle, error = self.played.wall_s, uncertainty.middle(self.found), self.error
        return sum(uncertainty.below(wall_s * middle, limit_s, error) for wall_s in runs) / len(runs)

    def costs_at_most(self, usd: float) -> float:
        """Probability of a bill of at most that."""
        return self.ends_within(usd / self.offer.usd_per_s(self.weeks.spares))

    @property
    def fits(self) -> float:
        """Probability that its layout fits."""
        return fit_probability(self.found)

    @property
    def limits(self) -> tuple[str, ...]:
        """What stops more nodes from helping as much, the largest first."""
        return tuple(limits(self.found, self.tokens))


def steps_of(tokens: float, per_step: int) -> int:
    """Optimizer steps that read so many tokens."""
    return -(-int(tokens) // per_step)


def run_on(offer: Offer, found: Prediction, tokens: float, given: Conditions) -> RunOn:
    """A run of so many tokens."""
    saves = checkpoint_of(found.plan, given)
    steps_s = steps_of(tokens, found.tokens_per_step) * found.step_s
    known = weeks(steps_s, found.step_s, offer.devices, offer.nodes, saves, given)
    return RunOn(offer=offer, found=found, tokens=tokens, weeks=known, saves=saves)


def checkpoint_of(plan: Plan, given: Conditions) -> Saves:
    """Size of a checkpoint, as the engine writes it, and how long that takes."""
    layout, cluster = plan.layout, plan.cluster
    stage = layout.world // layout.pp
    each = [
        written_bytes(plan.model, layout, plan.recipe.precision, rank * stage, storage=plan.recipe.storage)
        for rank in range(layout.pp)
    ]
    host = cluster.device.host_bytes_per_s
    return saves_of(max(each), sum(each) * stage, cluster.nodes, host, given.storage_bytes_per_s)


def limits(found: Prediction, tokens: float) -> Iterator[str]:
    """`network 31%`: shares of a step that do not shrink with more devices; then memory and batch, with a reason."""
    time, plan = found.time, found.plan
    shares = {
        "network": time.exchange_s + time.weights_s + time.gradients_s,
        "bubble": max(0.0, time.bubble_s),
        "host": time.other_s,
    }
    for name, seconds in sorted(shares.items(), key=lambda item: -item[1]):
        if seconds >= SHOWN * found.step_s:
            yield f"{name} {seconds / found.step_s:.0%}"
    if plan.layout.recompute != "none":
        yield f"memory: recomputes ({plan.layout.recompute})"
    if plan.recipe.global_batch <= plan.layout.dp:
        yield "batch: one sequence per data-parallel rank"
    known = critical(plan.model, tokens).batch_tokens
    if found.tokens_per_step > known:
        yield f"critical batch: about {count(known)} tokens"
