"""Serving of a load on rented devices: price per hour, and speed of the answers. Spare nodes are not counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.rent.clusters import Offer, offers_of
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.sweep import WORTH
from meshwright.planner.serving.serving_plan import ServingLayout, ServingRequest, Timed, curve, layouts
from meshwright.planner.serving.step_times import StepTimes

MOST_NODES = 64
"""Most nodes that are tried. Engines share no requests, so more nodes only multiply them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedServing:
    """One way to serve all requests on one cluster."""

    offer: Offer
    layout: ServingLayout

    @property
    def usd_per_hour(self) -> float:
        """Price of all devices."""
        return self.offer.usd_per_s() * 3600

    @property
    def usd_per_million(self) -> float:
        """Price of a million tokens of answers, at this load."""
        return self.usd_per_hour / (self.layout.tokens_per_s * 3600) * 1e6

    @property
    def per_token_s(self) -> float:
        """Mean time of the tokens after the first."""
        assert self.layout.served is not None
        return self.layout.served.per_token_s

    @property
    def first_token_s(self) -> float:
        """Mean time of the first token."""
        assert self.layout.served is not None
        return self.layout.served.first_token_s

    @property
    def kilowatts(self) -> float | None:
        """Datasheet watts of all devices. None = not published."""
        watts = self.offer.cluster.device.watts
        return watts * self.offer.devices / 1e3 if watts else None

    def users_within(self, per_token_s: float) -> int:
        """Return the most requests in flight whose tokens come that fast, of powers of two for each engine."""
        points = curve(self.layout, StepTimes)
        return max((point.concurrency for point in points if point.per_token_s <= per_token_s), default=0)


@dataclass(slots=True, kw_only=True)
class SweptServing:
    """Outcome for all clusters."""

    runs: list[RentedServing] = field(default_factory=list)
    clusters: int = 0
    unfit: list[str] = field(default_factory=list)
    """Clusters that do not hold all requests at once."""

    @property
    def front(self) -> list[RentedServing]:
        """Runs that no other beats in both money and time per token, the cheapest first."""
        best: list[RentedServing] = []
        for run in sorted(self.runs, key=lambda run: (run.usd_per_hour, run.per_token_s)):
            if not best or run.per_token_s < (1 - WORTH) * best[-1].per_token_s:
                best.append(run)
        return best


def sweep_serving(
    request: ServingRequest, prices: Prices, devices: Sequence[str], nodes: Sequence[int], timed: Timed = StepTimes
) -> SweptServing:
    """Try all clusters of these devices that hold the load. Nodes need no network: engines lie inside them.

    A cluster twice as large as one that holds the load, and no faster per token, adds nothing. It ends a device's
    clusters.
    """
    swept = SweptServing()
    for name in devices:
        fastest_s = float("inf")
        for offer in _alone(name, prices, nodes):
            swept.clusters += 1
            # Layouts that hold all requests at once.
            every = layouts(replace(request, cluster=offer.cluster), timed)
            runs = [RentedServing(offer=offer, layout=layout) for layout in every if layout.fits and not layout.waits]
            if not runs:
                swept.unfit.append(f"{offer.name} x {offer.nodes}")
                continue
            swept.runs += runs
            best_s = min(run.per_token_s for run in runs)
            if best_s > (1 - WORTH) * fastest_s:
                break
            fastest_s = best_s
    return swept


def _alone(name: str, prices: Prices, nodes: Sequence[int]) -> Iterator[Offer]:
    """Yield clusters at the price of single nodes."""
    single = list(offers_of(name, prices, [1]))
    if 1 in nodes:
        yield from single
    if single:
        for number in sorted(n for n in set(nodes) - {1} if n <= MOST_NODES):
            yield replace(single[-1], nodes=number)
