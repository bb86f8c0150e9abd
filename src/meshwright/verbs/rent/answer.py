"""`rent` and `rent --serve`: devices, their number and layout; cost against time, over all devices with a price."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.plan_reading import Section, seconds_of, section_words, tokens_of, tokens_word
from meshwright.interface.planning.plan_request import requested_plan
from meshwright.planner.explain import words_of
from meshwright.planner.rent import prices as price_tables
from meshwright.planner.rent.clusters import NODES, lacks, left_out
from meshwright.planner.rent.goodput import MOST_NODES, asked_conditions
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.run_on import RentedRun, days, plain, three
from meshwright.planner.rent.served_on import RentedServing, SweptServing, sweep_serving
from meshwright.planner.rent.sweep import LONGEST_S, RentRequest, Swept, sweep
from meshwright.planner.serving.serving_plan import ServingRequest
from meshwright.spec import Plan, presets
from meshwright.spec.errors import ArgumentError, DoesNotFit, argument
from meshwright.spec.units import count, many
from meshwright.verbs.plan_serve.answer import asked_load

DAY_S = 86_400.0
LIKELY = 0.9
"""Probability of what is likely."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RentAnswer(Answer):
    """The runs that no other beats in both time and cost, the cheapest first."""

    asked: RentRequest
    swept: Swept
    prices: Prices
    words: tuple[str, ...]
    """Words of the `meshwright plan` command for the same run."""
    deadline_s: float = float("inf")
    budget_usd: float = float("inf")
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Priced devices that were not tried -> their missing figure. Empty = devices were named."""

    @property
    def front(self) -> tuple[RentedRun, ...]:
        """The Pareto front of cost and time."""
        return tuple(self.swept.front)

    @property
    def cheapest(self) -> RentedRun | None:
        """The cheapest run that ends before the deadline, on average. None = none does."""
        return next((run for run in self.front if run.wall_s <= self.deadline_s), None)

    @property
    def fastest(self) -> RentedRun | None:
        """The fastest run within the budget, on average. None = none is."""
        return next((run for run in reversed(self.front) if run.usd <= self.budget_usd), None)

    @property
    def likely_in_time(self) -> RentedRun | None:
        """The cheapest run that likely ends before the deadline, and on average is within the budget.

        None = none does, or there is no deadline.
        """
        runs = [run for run in self.front if run.usd <= self.budget_usd] if self.deadline_s < float("inf") else []
        return next((run for run in runs if run.ends_within(self.deadline_s) >= LIKELY), None)

    @property
    def likely_in_budget(self) -> RentedRun | None:
        """The fastest run that likely is within the budget, and on average ends before the deadline.

        None = none is, or there is no budget.
        """
        runs = [run for run in self.front if run.wall_s <= self.deadline_s] if self.budget_usd < float("inf") else []
        return next((run for run in reversed(runs) if run.costs_at_most(self.budget_usd) >= LIKELY), None)

    @property
    def named(self) -> tuple[RentedRun, ...]:
        """The runs of the verdicts."""
        runs = (self.cheapest, self.likely_in_time, self.fastest, self.likely_in_budget)
        return tuple(run for run in runs if run is not None)

    @property
    def meets(self) -> bool:
        """Does one run meet both the deadline and the budget, on average?"""
        return any(run.wall_s <= self.deadline_s and run.usd <= self.budget_usd for run in self.front)

    @property
    def recommended(self) -> RentedRun:
        """The cheapest run before the deadline, or else the fastest of all."""
        return self.cheapest or self.front[-1]

    def check(self) -> None:
        """Raise DoesNotFit, with what is possible, if no run meets both the deadline and the budget."""
        if self.meets:
            return
        fast, cheap, timely, paid = self.front[-1], self.front[0], self.cheapest, self.fastest
        if timely is None:
            raise DoesNotFit(
                f"{argument('deadline', days(self.deadline_s))} cannot be met: the fastest takes {fast.days} "
                f"({fast.title}, {fast.dollars}). Allow more time, or give fewer {argument('tokens')}"
            )
        if paid is None:
            raise DoesNotFit(
                f"{argument('budget', self.budget_usd)} cannot be met: the cheapest possible costs {cheap.dollars} "
                f"({cheap.title}, {cheap.days}): raise it, or take fewer {argument('tokens')}"
            )
        raise DoesNotFit(
            f"no cluster meets both {argument('deadline')} and {argument('budget')}: in time it costs "
            f"{timely.dollars} or more, and within the budget it takes {paid.days} or longer. Raise one of "
            "them"
        )

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Known devices without a price."""
        return self.prices.unpriced()

    def command(self, run: RentedRun) -> str:
        """Return the `plan` command that repeats layout, step time, memory and device-hours of a run."""
        words = [*self.words, "--cluster", run.offer.name, "--nodes", str(run.offer.nodes)]
        words += ["--layout", words_of(run.prediction.plan), "--price", f"{run.offer.price.usd_per_hour:g}"]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright rent --json` prints."""
        plan, swept = self.asked.plan, self.swept
        return {
            "kind": "rent",
            "model": plan.model.name,
            "tokens": self.asked.tokens,
            "tokens_per_step": plan.recipe.global_batch * plan.recipe.sequence,
            "sequence": plan.recipe.sequence,
            "global_batch": plan.recipe.global_batch,
            "deadline_seconds": _finite(self.deadline_s),
            "budget_usd": _finite(self.budget_usd),
            "cheapest": self._row(self.cheapest),
            "fastest": self._row(self.fastest),
            "likely_in_time": self._row(self.likely_in_time),
            "likely_in_budget": self._row(self.likely_in_budget),
            "front": self.rows(),
            "dominated": [self._row(run) for run in swept.runs if run not in swept.front],
            "clusters": {
                "tried": swept.clusters, "searched": len(swept.runs), "dominated": swept.dominated,
                "too_long": swept.too_long, "unfit": swept.unfit,
            },
            "longest_seconds": self.asked.longest_s,
            "unpriced": list(self.unpriced),
            "left_out": dict(self.left_out),
            "conditions": asdict(self.asked.conditions),
            "prices": self.prices.file,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each run of the front."""
        return [fields for run in self.front if (fields := self._row(run))]

    def _row(self, run: RentedRun | None) -> dict[str, Any] | None:
        return None if run is None else {**row_of(run, self.deadline_s, self.budget_usd), "command": self.command(run)}

    def __repr__(self) -> str:
        best = self.recommended
        return (
            f"{self.asked.plan.model.name}, {count(self.asked.tokens)} tokens: {best.offer.title}, "
            f"{plain(best.wall_s / DAY_S, best.error)} days, {best.dollars} ({len(self.front)} on the front)"
        )

    def _repr_html_(self) -> str:
        cells = [
            (run.offer.title, run.days, run.dollars, f"{run.timing.goodput:.1%}", words_of(run.prediction.plan))
            for run in self.front
        ]  # fmt: skip
        return whole(line(repr(self)), table(("cluster", "time", "bill", "goodput", "layout"), cells))


def row_of(run: RentedRun, deadline_s: float = float("inf"), budget_usd: float = float("inf")) -> dict[str, Any]:
    """Return the figures of a run in plain units."""
    prediction, timing, simulated, offer = run.prediction, run.timing, run.simulated, run.offer
    return {
        "cluster": offer.name, "device": offer.price.device, "nodes": offer.nodes,
        "devices": offer.devices, "layout": words_of(prediction.plan), "step_seconds": prediction.step_s,
        "steps": run.steps,
        "tokens_per_second": prediction.tokens_per_step / prediction.step_s, "mfu_full": prediction.mfu(causal=False),
        "peak_bytes": round(prediction.peak_bytes), "fits_probability": run.fits,
        "wall_seconds_90": list(run.range_s), **timing.document(prediction.step_s),
        "goodput_simulated": simulated.goodput,
        "goodput_90": [timing.steps_s / simulated.quantile_s(0.95), timing.steps_s / simulated.quantile_s(0.05)],
        "checkpoint_bytes": round(run.saves.total_bytes),
        "usd": run.usd, "usd_90": list(run.range_usd), "usd_per_gpu_hour": offer.price.usd_per_hour,
        "price_source": offer.price.words, "kwh": run.kwh, "limits": list(run.limits),
        "deadline_probability": None if deadline_s == float("inf") else run.ends_within(deadline_s),
        "budget_probability": None if budget_usd == float("inf") else run.costs_at_most(budget_usd),
    }  # fmt: skip


@checked
def rent(
    model: str | Path | Plan | HasPlan,
    *,
    tokens: str | float | None = None,
    dataset_size: str | float | None = None,
    epochs: float = 1.0,
    deadline: str | float | None = None,
    budget: float | None = None,
    prices: str | Path | None = None,
    devices: str | Sequence[str] | None = None,
    nodes: int | Sequence[int] | None = None,
    tune: str = "",
    recipe: Section = None,
    quick: bool = False,
    mtbf: float | None = None,
    restart: float | None = None,
    repair: float | None = None,
    storage: float | None = None,
    evaluation: float | None = None,
    spares: int | None = None,
) -> RentAnswer:
    """Weigh cost against time of a run, over all devices with a price and 1 to 256 nodes.

    Args:
        tokens: Tokens of the run, as "1T".
        dataset_size: Tokens of the data, in place of `tokens`.
        epochs: Passes over `dataset_size`.
        deadline: "30d", "12h", or days.
        budget: Dollars.
        prices: A CSV file in place of the shipped list prices.
        devices: Try only these, as "h100,h200" or a list.
        nodes: Try only these numbers of nodes.
        quick: Skip the second search over layouts of the front.
        mtbf: Hours of a device between failures.
        restart: Seconds from a failure to the next step.
        repair: Hours until a failed node is back.
        storage: GB/s of a node, for checkpoints.
        evaluation: Evaluation time over step time.
        spares: Spare nodes.

    `model`, `recipe` and `tune` are those of `plan`.

    Raises:
        DoesNotFit: No cluster holds the run.
        PlanError: An argument makes no sense.
    """
    total = _total(tokens, dataset_size, epochs)
    offers = asked_prices(prices)
    names = asked_devices(devices, offers)
    numbers = asked_nodes(nodes)
    conditions = asked_conditions(mtbf, restart, repair, storage, evaluation, spares)
    if budget is not None and not 0 < budget < float("inf"):
        raise ArgumentError("budget", budget, "must be a number of dollars above 0")
    # The run on one device: every cluster takes its batch, so all train alike.
    plan = requested_plan(model, "h100", 1, section_words(recipe), tune)
    deadline_s = seconds_of(deadline)
    # Runs beyond the limit are not searched, so a later deadline has to raise it.
    longest_s = LONGEST_S if deadline_s == float("inf") else max(LONGEST_S, deadline_s)
    asked = RentRequest(plan=plan, tokens=total, conditions=conditions, longest_s=longest_s, thorough=not quick)
    swept = sweep(asked, offers, names, numbers)
    if not swept.runs:
        raise _no_run(asked, swept)
    return RentAnswer(
        asked=asked, swept=swept, prices=offers, words=_words(model, plan, section_words(recipe), tune, total),
        deadline_s=deadline_s, budget_usd=float("inf") if budget is None else budget,
        # Named devices without a figure are an error instead, raised by asked_devices.
        left_out={} if devices else left_out(offers),
    )  # fmt: skip


def _words(model: Any, plan: Plan, recipe: Sequence[str], tune: str, tokens: float) -> tuple[str, ...]:
    words = ["meshwright", "plan", str(model) if isinstance(model, str | Path) else plan.model.name]
    words += ["--tune", tune] if tune else []
    # `plan` would choose another batch for the cluster, and the figures would differ from this row.
    batch = [] if any("batch" in word for word in recipe) else [f"global_batch={plan.recipe.global_batch}"]
    for word in (*recipe, *batch):
        words += ["--recipe", word]
    return (*words, "--tokens", tokens_word(tokens))


def _total(tokens: str | float | None, size: str | float | None, epochs: float) -> float:
    # Exactly one of both: two lengths could contradict each other, and none leaves the run open.
    if (tokens is None) == (size is None):
        raise ArgumentError(
            "tokens",
            sentence=(
                f"give the length of the run: {argument('tokens', '1T')}, or {argument('dataset_size', '200M')} "
                f"and {argument('epochs', 3)}, not both"
            ),
        )
    if not 0 < epochs < 1e6:
        raise ArgumentError("epochs", epochs, "must be above 0 and below a million")
    if tokens is not None and epochs != 1:
        raise ArgumentError(
            "epochs",
            rule=f"is for {argument('dataset_size')}; {argument('tokens')} is the whole run",
            remedy="leave one out",
        )
    return tokens_of(tokens) if tokens is not None else epochs * tokens_of(size, "dataset_size")


def asked_prices(file: str | Path | None) -> Prices:
    """Return the user's table, or the shipped one. Raises PlanError for an unreadable file."""
    return price_tables.shipped() if file is None else price_tables.read(Path(file))


def asked_devices(names: str | Sequence[str] | None, table: Prices) -> tuple[str, ...]:
    """Return names of priced devices. Raises ArgumentError for a named device without a price or a figure."""
    names = names.split(",") if isinstance(names, str) else names
    priced = tuple(dict.fromkeys(offer.device for offer in table.offers))
    if names is None:
        return priced
    devices = price_tables.keys_of(names)
    # Errors name the device as typed, which may be another spelling than that of its preset.
    for name, device in zip(names, devices, strict=True):
        if device not in priced:
            raise ArgumentError(
                "devices", name, f"has no price in {table.file}", f"give one with {argument('prices', 'FILE.csv')}"
            )
        if missing := lacks(presets.device(name)):
            raise ArgumentError("devices", name, f"has no {missing}, which a prediction needs", "leave it out")
    return tuple(dict.fromkeys(devices))


def asked_nodes(numbers: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of nodes to try. Raises ArgumentError out of range."""
    numbers = [numbers] if isinstance(numbers, int) else numbers
    for number in numbers or ():
        if not 1 <= number <= MOST_NODES:
            raise ArgumentError("nodes", number, f"must be at least 1 and at most {MOST_NODES:,}")
    return tuple(sorted(set(numbers))) if numbers else NODES


def _no_run(asked: RentRequest, swept: Swept) -> DoesNotFit:
    name, years = asked.plan.model.name, many(round(asked.longest_s / LONGEST_S), "year")
    # With no run at all, each cluster either lacks memory or takes too long.
    slow, unfit = swept.clusters - len(swept.unfit), len(swept.unfit)
    if swept.endless:
        rate = f"a failure every {asked.conditions.mtbf_device_hours:,g} h of a device"
        return DoesNotFit(
            f"{name} on {count(asked.tokens)} tokens makes no progress on {many(swept.endless, 'cluster')} with "
            f"{rate}: give {argument('mtbf')} of one device, not of the cluster, less {argument('repair')}, or more "
            f"{argument('spares')}"
        )
    if slow and not unfit:
        return DoesNotFit(
            f"{name} on {count(asked.tokens)} tokens takes longer than {years} on each of {slow} clusters: take fewer "
            "tokens, more nodes, or a later deadline"
        )
    also = f", and takes longer than {years} on the other {slow}" if slow else ""
    return DoesNotFit(
        f"{name} fits on none of {unfit} clusters with memory to spare{also}: name larger devices or more nodes, or "
        f"train adapters alone ({argument('tune', 'qlora')})"
    )


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


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
    plan = requested_plan(model, "h100", 1, ())
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
