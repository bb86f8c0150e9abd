"""Serving a load on rented devices: what it costs an hour, and how fast it answers. Spare nodes are not counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.rent.clusters import Offer, offers_of
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.sweep import WORTH
from meshwright.planner.serving.serving_plan import ServingAsked, ServingLayout, Timed, curve, layouts
from meshwright.planner.serving.step_times import StepTimes

MOST_NODES = 64
"""Engines do not share requests: more nodes are more of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOn:
    """One way to serve all requests on one cluster."""

    offer: Offer
    layout: ServingLayout

    @property
    def usd_per_hour(self) -> float:
        """Of all devices."""
        return self.offer.usd_per_s() * 3600

    @property
    def usd_per_million(self) -> float:
        """Of a million tokens of answers, at this load."""
        return self.usd_per_hour / (self.layout.tokens_per_s * 3600) * 1e6

    @property
    def per_token_s(self) -> float:
        """Mean, of the tokens after the first."""
        assert self.layout.served is not None
        return self.layout.served.per_token_s

    @property
    def first_token_s(self) -> float:
        """Mean."""
        assert self.layout.served is not None
        return self.layout.served.first_token_s

    @property
    def kilowatts(self) -> float | None:
        """Datasheet watts of all devices; None where nobody gives them."""
        watts = self.offer.cluster.device.watts
        return watts * self.offer.devices / 1e3 if watts else None

    def users_within(self, per_token_s: float) -> int:
        """The most requests in flight, of powers of two for each engine, whose tokens come at least that fast."""
        points = curve(self.layout, StepTimes)
        return max((one.concurrency for one in points if one.per_token_s <= per_token_s), default=0)


@dataclass(slots=True, kw_only=True)
class SweptServing:
    """What became of all clusters."""

    runs: list[ServedOn] = field(default_factory=list)
    clusters: int = 0
    unfit: list[str] = field(default_factory=list)
    """Those that do not hold all requests at once."""

    @property
    def front(self) -> list[ServedOn]:
        """Those that no other beats in money and in time per token, the cheapest first."""
        found: list[ServedOn] = []
        for one in sorted(self.runs, key=lambda one: (one.usd_per_hour, one.per_token_s)):
            if not found or one.per_token_s < (1 - WORTH) * found[-1].per_token_s:
                found.append(one)
        return found


def sweep_serving(
    asked: ServingAsked, prices: Prices, devices: Sequence[str], nodes: Sequence[int], timed: Timed = StepTimes
) -> SweptServing:
    """All clusters of these devices that hold the load. Nodes need no network: engines lie inside them. A cluster twice
    as large as one that holds the load and is as fast per token adds nothing, and ends a device's clusters."""
    found = SweptServing()
    for name in devices:
        fastest_s = float("inf")
        for offer in _alone(name, prices, nodes):
            found.clusters += 1
            runs = [ServedOn(offer=offer, layout=one) for one in _holding(asked, offer, timed)]
            if not runs:
                found.unfit.append(f"{offer.name} x {offer.nodes}")
                continue
            found.runs += runs
            best_s = min(one.per_token_s for one in runs)
            if best_s > (1 - WORTH) * fastest_s:
                break
            fastest_s = best_s
    return found


def _alone(name: str, prices: Prices, nodes: Sequence[int]) -> Iterator[Offer]:
    """Clusters at the price of nodes that stand alone."""
    one = list(offers_of(name, prices, [1]))
    if 1 in nodes:
        yield from one
    if one:
        for number in sorted(n for n in set(nodes) - {1} if n <= MOST_NODES):
            yield replace(one[-1], nodes=number)


def _holding(asked: ServingAsked, offer: Offer, timed: Timed) -> Iterator[ServingLayout]:
    """Layouts that hold all requests at once."""
    for one in layouts(replace(asked, cluster=offer.cluster), timed):
        if one.fits and not one.waits:
            yield one
