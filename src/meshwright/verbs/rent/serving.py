"""`rent --serve`: devices for a served load, cost per hour against speed."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.plan_request import asked_plan
from meshwright.planner.rent.clusters import left_out
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.run_on import three
from meshwright.planner.rent.served_on import RentedServing, SweptServing, sweep_serving
from meshwright.planner.serving.serving_plan import ServingRequest
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, argument
from meshwright.verbs.plan_serve.answer import asked_load
from meshwright.verbs.rent.answer import asked_devices, asked_nodes, asked_prices


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeRentAnswer(Answer):
    """The deployments that no other beats in both cost and time per token, the cheapest first."""

    asked: ServingRequest
    swept: SweptServing
    prices: Prices
    words: tuple[str, ...]
    quantization: str
    latency_s: float = float("inf")
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Priced devices that were not tried -> their missing figure. Empty = devices were named."""

    @property
    def front(self) -> tuple[RentedServing, ...]:
        """The Pareto front of dollars per hour and time per token."""
        return tuple(self.swept.front)

    @property
    def cheapest(self) -> RentedServing | None:
        """The cheapest deployment within the latency. None = none is."""
        return next((deployment for deployment in self.front if deployment.per_token_s <= self.latency_s), None)

    @property
    def recommended(self) -> RentedServing:
        """The cheapest deployment within the latency, or else the fastest of all."""
        return self.cheapest or self.front[-1]

    @property
    def meets(self) -> bool:
        """Is there a deployment within the latency?"""
        return self.cheapest is not None

    def check(self) -> None:
        """Raise DoesNotFit, with what is possible, if none is within the latency."""
        if not self.meets:
            first = self.front[-1]
            raise DoesNotFit(
                f"{argument('latency', self.latency_s * 1e3)} cannot be met: the fastest possible takes "
                f"{first.per_token_s * 1e3:.3g} ms per token "
                f"({first.offer.title}): allow more, or take narrower weights ({argument('quantization', 'fp8')})"
            )

    def command(self, deployment: RentedServing) -> str:
        """Return the `plan --serve` command that repeats the figures of a row."""
        words = [*self.words, "--cluster", deployment.offer.name, "--nodes", str(deployment.offer.nodes)]
        return shlex.join([*words, "--layout", f"tp={deployment.layout.degrees.tp}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright rent --serve --json` prints."""
        asked, best = self.asked, self.cheapest
        return {
            "kind": "rent serving", "model": asked.model.shape.name, "input_length": asked.input_tokens,
            "output_length": asked.output_tokens, "concurrency": asked.concurrency,
            "quantization": self.quantization, "framework": asked.framework.name,
            "latency_seconds": None if self.latency_s == float("inf") else self.latency_s,
            "cheapest": None if best is None else self._row(best),
            "front": self.rows(),
            "clusters": {"tried": self.swept.clusters, "unfit": self.swept.unfit},
            "unpriced": list(self.prices.unpriced()), "left_out": dict(self.left_out),
            "prices": self.prices.file,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each deployment of the front."""
        return [self._row(deployment) for deployment in self.front]

    def _row(self, deployment: RentedServing) -> dict[str, Any]:
        layout, offer = deployment.layout, deployment.offer
        users = None if self.latency_s == float("inf") else deployment.users_within(self.latency_s)
        return {
            "cluster": offer.name, "device": offer.price.device, "nodes": offer.nodes, "devices": offer.devices,
            "layout": layout.words, **asdict(layout.degrees), "engines": layout.engines,
            "usd_per_hour": deployment.usd_per_hour, "usd_per_million_tokens": deployment.usd_per_million,
            "per_token_seconds": deployment.per_token_s, "first_token_seconds": deployment.first_token_s,
            "tokens_per_second": layout.tokens_per_s, "users_within_latency": users, "kilowatts": deployment.kilowatts,
            "price_source": offer.price.words, "command": self.command(deployment),
        }  # fmt: skip

    def __repr__(self) -> str:
        best = self.recommended
        return (
            f"{self.asked.model.shape.name} served on {best.offer.title}: ${three(best.usd_per_hour)} "
            f"per hour, {best.per_token_s * 1e3:.3g} ms per token ({len(self.front)} on the front)"
        )

    def _repr_html_(self) -> str:
        cells = [
            (deployment.offer.title, deployment.layout.words, f"${three(deployment.usd_per_hour)}",
             f"{deployment.per_token_s * 1e3:.3g} ms")
            for deployment in self.front
        ]  # fmt: skip
        return whole(line(repr(self)), table(("cluster", "layout", "per hour", "per token"), cells))


@checked
def rent_serving(
    model: str | Path | Plan | HasPlan,
    *,
    input_length: int = 1024,
    output_length: int = 1024,
    concurrency: int = 64,
    latency: float | None = None,
    quantization: str = "bf16",
    kv_dtype: str = "bf16",
    framework: str = "",
    prices: str | Path | None = None,
    devices: str | Sequence[str] | None = None,
    nodes: int | Sequence[int] | None = None,
) -> ServeRentAnswer:
    """Weigh dollars per hour against time per token of a served load, over all devices with a price.

    Args:
        latency: Longest time per token after the first, in ms.

    `prices`, `devices` and `nodes` are those of `rent`; all other arguments are those of `plan_serving`.

    Raises:
        DoesNotFit: No cluster holds all requests at once.
        PlanError: An argument makes no sense.
    """
    if latency is not None and not 0 < latency < 1e9:
        raise ArgumentError("latency", latency, "must be a number of milliseconds above 0")
    offers = asked_prices(prices)
    plan = asked_plan(model, "h100", 1, ())
    asked, timed = asked_load(
        plan, None, input_length=input_length, output_length=output_length, concurrency=concurrency,
        quantization=quantization, kv_dtype=kv_dtype, framework=framework,
    )  # fmt: skip
    swept = sweep_serving(asked, offers, asked_devices(devices, offers), asked_nodes(nodes), timed)
    if not swept.runs:
        raise DoesNotFit(
            f"{plan.model.name} with {concurrency} requests of {asked.length:,} tokens at once fits on none of "
            f"{swept.clusters} clusters: take fewer at once, or narrower weights ({argument('quantization', 'fp8')})"
        )
    words = ["meshwright", "plan", str(model) if isinstance(model, str | Path) else plan.model.name, "--serve"]
    words += ["--input-length", str(input_length), "--output-length", str(output_length)]
    words += ["--concurrency", str(concurrency), "--quantization", quantization, "--kv-dtype", kv_dtype]
    words += ["--framework", framework] if framework else []
    return ServeRentAnswer(
        asked=asked, swept=swept, prices=offers, words=tuple(words), quantization=quantization,
        latency_s=float("inf") if latency is None else latency / 1e3, left_out={} if devices else left_out(offers),
    )  # fmt: skip
