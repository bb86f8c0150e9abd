"""A run on a rented cluster: its layout, timing, bill and energy with their uncertainty, and what limits more devices.

The planner's ranges (planner/step/prediction.py) become one deviation of the bill, which also decides the printed
digits. Errors are standard deviations of the logarithm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import erf, log, sqrt

from meshwright.planner.rent.clusters import Offer
from meshwright.planner.rent.goodput import (
    DAY_S,
    Conditions,
    RunTiming,
    Saves,
    SimulatedRuns,
    saves_of,
    simulate,
    time_run,
)
from meshwright.planner.step.prediction import Prediction, critical, fit_probability, relative_range
from meshwright.spec.memory.held import written_bytes
from meshwright.spec.plan.plan import Plan
from meshwright.spec.units import count, many

WIDTH = 2 * 1.6449
"""Deviations of a normal distribution between the ends of a 90 % range."""


def time_error(prediction: Prediction) -> float:
    """Return the error of a predicted step time."""
    low, high, _ = relative_range(prediction.plan, prediction.stack)
    return log(high / low) / WIDTH


def middle_ratio(prediction: Prediction) -> float:
    """Return measured over predicted in the middle of the range: printed ranges are the planner's."""
    low, high, _ = relative_range(prediction.plan, prediction.stack)
    return sqrt(low * high)


def below(value: float, limit: float, error: float) -> float:
    """Return the probability that a quantity predicted as `value` is at most `limit`."""
    if value <= 0 or limit <= 0:
        return 1.0 if value <= limit else 0.0
    return normal(log(limit / value) / error) if error else float(value <= limit)


def normal(deviations: float) -> float:
    """Return the cumulative distribution of a standard normal variable."""
    return 0.5 * (1 + erf(deviations / sqrt(2)))


def digits(error: float) -> int:
    """Return the significant digits worth printing: three below 1 %, two below 30 %, else one."""
    return 3 if error < 0.01 else 2 if error < 0.3 else 1


def rounded(value: float, error: float) -> float:
    """Round a number to its significant digits."""
    return float(f"{value:.{digits(error)}g}")


def plain(value: float, error: float) -> str:
    """Format a number with its significant digits."""
    value = rounded(value, error)
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def three(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def days(seconds: float, error: float = 0.0) -> str:
    """Format a time with its significant digits: 16 d, 7.2 h, 12 min."""
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{plain(seconds / size, error)} {unit}"
    return f"{plain(seconds, error)} s"


def dollars(usd: float, error: float) -> str:
    """Format a bill with its significant digits."""
    value = rounded(usd, error)
    return f"${plain(value / 1e6, error)}M" if value >= 1e6 else f"${plain(value, error)}"


SHOWN = 0.05
"""Share of a step from which a limit is named."""
KWH = 3.6e6
"""Joules of a kilowatt hour."""


@dataclass(frozen=True, kw_only=True)
class RentedRun:
    """A run on one cluster. Money is US dollars, without storage, traffic, tax and discounts."""

    offer: Offer
    prediction: Prediction
    tokens: float
    timing: RunTiming
    saves: Saves

    @property
    def title(self) -> str:
        """Its cluster, with the spare nodes."""
        return self.offer.title + (f" and {many(self.timing.spares, 'spare node')}" if self.timing.spares else "")

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return steps_of(self.tokens, self.prediction.tokens_per_step)

    @property
    def wall_s(self) -> float:
        """Mean time from start to end."""
        return self.timing.wall_s

    @property
    def usd(self) -> float:
        """Mean bill. Spare nodes are paid like the others."""
        return self.wall_s * self.offer.usd_per_s(self.timing.spares)

    @property
    def days(self) -> str:
        """Its mean time with its significant digits, in print."""
        return days(self.wall_s, self.error)

    @property
    def dollars(self) -> str:
        """Its mean bill with its significant digits, in print."""
        return dollars(self.usd, self.error)

    @property
    def kwh(self) -> float | None:
        """Energy at the datasheet watts of all devices, not of hosts, network and cooling. None = not published."""
        watts = self.offer.cluster.device.watts
        devices = self.offer.devices_per_node * (self.offer.nodes + self.timing.spares)
        return watts * devices * self.wall_s / KWH if watts else None

    @cached_property
    def simulated(self) -> SimulatedRuns:
        """The run, simulated failure by failure."""
        return simulate(self.timing)

    @property
    def error(self) -> float:
        """Error of its step time, as a standard deviation of the logarithm."""
        return time_error(self.prediction)

    @cached_property
    def range_s(self) -> tuple[float, float]:
        """90 % range of its time, from chance and the planner's error."""
        return self._quantile_s(0.05), self._quantile_s(0.95)

    @property
    def range_usd(self) -> tuple[float, float]:
        """90 % range of its bill."""
        low_s, high_s = self.range_s
        each = self.offer.usd_per_s(self.timing.spares)
        return low_s * each, high_s * each

    def _quantile_s(self, share: float) -> float:
        """Find a quantile by bisection, to a thousandth."""
        low_s, high_s = self.wall_s / 1e3, max(self.wall_s, self.simulated.wall_s[-1]) * 1e3
        while high_s > 1.001 * low_s:
            middle_s = (low_s * high_s) ** 0.5
            low_s, high_s = (low_s, middle_s) if self.ends_within(middle_s) >= share else (middle_s, high_s)
        return low_s

    def ends_within(self, limit_s: float) -> float:
        """Return the probability to end in time, from all simulated runs and the planner's error."""
        runs, middle, error = self.simulated.wall_s, middle_ratio(self.prediction), self.error
        return sum(below(wall_s * middle, limit_s, error) for wall_s in runs) / len(runs)

    def costs_at_most(self, usd: float) -> float:
        """Return the probability of a bill of at most `usd`."""
        return self.ends_within(usd / self.offer.usd_per_s(self.timing.spares))

    @property
    def fits(self) -> float:
        """Probability that its layout fits."""
        return fit_probability(self.prediction)

    @property
    def limits(self) -> tuple[str, ...]:
        """Limits on the gain from more nodes, the largest first."""
        return tuple(limits(self.prediction, self.tokens))


def steps_of(tokens: float, per_step: int) -> int:
    """Return the optimizer steps that read so many tokens."""
    return -(-int(tokens) // per_step)


def rent_run(offer: Offer, prediction: Prediction, tokens: float, conditions: Conditions) -> RentedRun:
    """Return a run of so many tokens."""
    saves = checkpoint_of(prediction.plan, conditions)
    steps_s = steps_of(tokens, prediction.tokens_per_step) * prediction.step_s
    timing = time_run(steps_s, prediction.step_s, offer.devices, offer.nodes, saves, conditions)
    return RentedRun(offer=offer, prediction=prediction, tokens=tokens, timing=timing, saves=saves)


def checkpoint_of(plan: Plan, conditions: Conditions) -> Saves:
    """Return the size of a checkpoint, as the engine writes it, and the time that it takes."""
    layout, cluster = plan.layout, plan.cluster
    stage = layout.world // layout.pp
    each = [
        written_bytes(plan.model, layout, plan.recipe.precision, rank * stage, storage=plan.recipe.storage)
        for rank in range(layout.pp)
    ]
    host = cluster.device.host_bytes_per_s
    return saves_of(max(each), sum(each) * stage, cluster.nodes, host, conditions)


def limits(prediction: Prediction, tokens: float) -> Iterator[str]:
    """Yield shares of a step that do not shrink with more devices, as `network 31%`; then memory and batch."""
    time, plan = prediction.time, prediction.plan
    shares = {
        "network": time.exchange_s + time.weights_s + time.gradients_s,
        "bubble": max(0.0, time.bubble_s),
        "host": time.other_s,
    }
    for name, seconds in sorted(shares.items(), key=lambda entry: -entry[1]):
        if seconds >= SHOWN * prediction.step_s:
            yield f"{name} {seconds / prediction.step_s:.0%}"
    if plan.layout.recompute != "none":
        yield f"memory: recomputes ({plan.layout.recompute})"
    if plan.recipe.global_batch <= plan.layout.dp:
        yield "batch: one sequence per data-parallel rank"
    known = critical(plan.model, tokens).batch_tokens
    if prediction.tokens_per_step > known:
        yield f"critical batch: about {count(known)} tokens"
