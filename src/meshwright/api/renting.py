"""`rent`: which devices, how many, which layout; money against time, over all devices that have a price."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.api.amounts import seconds_of, tokens_of, tokens_word
from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.markup import line, table, whole
from meshwright.api.plan_reading import Section, section_words
from meshwright.api.plan_request import asked_plan
from meshwright.planner.explain import words_of
from meshwright.planner.rent import prices as price_tables
from meshwright.planner.rent.clusters import NODES, lacks, left_out
from meshwright.planner.rent.failures import LLAMA_3, Conditions
from meshwright.planner.rent.prices import Prices
from meshwright.planner.rent.run_on import RunOn
from meshwright.planner.rent.sweep import LONGEST_S, RentAsked, Swept, sweep
from meshwright.planner.rent.uncertainty import days, plain
from meshwright.spec import Plan, presets
from meshwright.spec.errors import ArgumentError, DoesNotFit
from meshwright.spec.units import count, many

DAY_S, HOUR_S = 86_400.0, 3600.0
MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True, repr=False)
class RentAnswer(Answer):
    """The runs that no other beats in both time and money, the cheapest first."""

    asked: RentAsked
    swept: Swept
    prices: Prices
    words: tuple[str, ...]
    """Of `meshwright plan`, what asks about the same run on any cluster."""
    deadline_s: float = float("inf")
    budget_usd: float = float("inf")
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Devices with a price that were not tried, where none was named -> which figure of them is missing."""

    @property
    def front(self) -> tuple[RunOn, ...]:
        """The Pareto front of money and time."""
        return tuple(self.swept.front)

    @property
    def cheapest(self) -> RunOn | None:
        """The cheapest run that ends before the deadline, on average; None where none does."""
        return next((one for one in self.front if one.wall_s <= self.deadline_s), None)

    @property
    def fastest(self) -> RunOn | None:
        """The fastest run within the budget, on average; None where none is."""
        return next((one for one in reversed(self.front) if one.usd <= self.budget_usd), None)

    @property
    def meets(self) -> bool:
        """Whether one run meets both the deadline and the budget, on average."""
        return any(one.wall_s <= self.deadline_s and one.usd <= self.budget_usd for one in self.front)

    @property
    def recommended(self) -> RunOn:
        """The cheapest before the deadline; the fastest of all where none is."""
        return self.cheapest or self.front[-1]

    def check(self) -> None:
        """DoesNotFit where no run meets both the deadline and the budget: what is possible, and what to change."""
        if self.meets:
            return
        fast, cheap, timely, paid = self.front[-1], self.front[0], self.cheapest, self.fastest
        if timely is None:
            raise DoesNotFit(
                f'deadline="{days(self.deadline_s)}" cannot be met: the fastest takes {fast.days} '
                f"({fast.title}, {fast.dollars}). Allow more time, or give fewer tokens="
            )
        if paid is None:
            raise DoesNotFit(
                f'budget="{self.budget_usd:,.0f}" cannot be met: the cheapest possible costs {cheap.dollars} '
                f"({cheap.title}, {cheap.days}): raise it, or take fewer tokens="
            )
        raise DoesNotFit(
            f"no cluster meets both deadline= and budget=: in time it costs {timely.dollars} or more, and "
            f"within the budget it takes {paid.days} or longer. Raise one of them"
        )

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Devices that are known and have no price."""
        return self.prices.unpriced()

    def command(self, one: RunOn) -> str:
        """The `plan` that gives the layout, step time, memory and device-hours of a run again."""
        words = [*self.words, "--cluster", one.offer.name, "--nodes", str(one.offer.nodes)]
        words += ["--layout", words_of(one.found.plan), "--price", f"{one.offer.price.usd_per_hour:g}"]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright rent --json` prints."""
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
            "front": self.rows(),
            "dominated": [self._row(one) for one in swept.runs if one not in swept.front],
            "clusters": {
                "tried": swept.clusters, "searched": len(swept.runs), "dominated": swept.dominated,
                "too_long": swept.too_long, "unfit": swept.unfit,
            },
            "longest_seconds": self.asked.longest_s,
            "unpriced": list(self.unpriced),
            "left_out": dict(self.left_out),
            "conditions": asdict(self.asked.given),
            "prices": self.prices.file,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run of the front."""
        return [row for one in self.front if (row := self._row(one))]

    def _row(self, one: RunOn | None) -> dict[str, Any] | None:
        return None if one is None else {**row_of(one, self.deadline_s, self.budget_usd), "command": self.command(one)}

    def __repr__(self) -> str:
        best = self.recommended
        return (
            f"{self.asked.plan.model.name}, {count(self.asked.tokens)} tokens: {best.offer.title}, "
            f"{plain(best.wall_s / DAY_S, best.error)} days, {best.dollars} ({len(self.front)} on the front)"
        )

    def _repr_html_(self) -> str:
        cells = [
            (one.offer.title, one.days, one.dollars, f"{one.weeks.goodput:.1%}", words_of(one.found.plan))
            for one in self.front
        ]  # fmt: skip
        return whole(line(repr(self)), table(("cluster", "time", "bill", "goodput", "layout"), cells))


def row_of(one: RunOn, deadline_s: float = float("inf"), budget_usd: float = float("inf")) -> dict[str, Any]:
    """Of one run, in plain units."""
    found, weeks, played, offer = one.found, one.weeks, one.played, one.offer
    return {
        "cluster": offer.name, "device": offer.price.device, "nodes": offer.nodes, "spare_nodes": weeks.spares,
        "devices": offer.devices, "layout": words_of(found.plan), "step_seconds": found.step_s, "steps": one.steps,
        "tokens_per_second": found.tokens_per_step / found.step_s, "mfu_full": found.mfu(causal=False),
        "peak_bytes": round(found.peak_bytes), "fits_probability": one.fits,
        "wall_seconds": one.wall_s, "wall_seconds_90": list(one.range_s),
        "goodput": weeks.goodput, "goodput_simulated": played.goodput,
        "goodput_90": [weeks.steps_s / played.quantile_s(0.95), weeks.steps_s / played.quantile_s(0.05)],
        "failures": weeks.failures, "mtbf_seconds": weeks.mtbf_s, "save_every_seconds": weeks.interval_s,
        "save_stall_seconds": weeks.save_s, "save_write_seconds": weeks.write_s,
        "checkpoint_bytes": round(one.saves.total_bytes),
        "usd": one.usd, "usd_90": list(one.range_usd), "usd_per_gpu_hour": offer.price.usd_per_hour,
        "price_source": offer.price.words, "kwh": one.kwh, "limits": list(one.limits),
        "deadline_probability": None if deadline_s == float("inf") else one.ends_within(deadline_s),
        "budget_probability": None if budget_usd == float("inf") else one.costs_at_most(budget_usd),
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
    """Money against time of a run, over all devices with a price and 1 to 256 nodes.

    `model`, `recipe`, `tune`: as for `plan`. `tokens`: of the run, as "1T"; or `dataset_size` in tokens and `epochs`.
    `deadline`: "30d", "12h", days; `budget`: dollars. `prices`: a CSV file in place of the shipped list prices.
    `devices`: only these, as "h100,h200" or a list; `nodes`: only these numbers. `quick`: do not search the layouts of
    the front a second time.
    `mtbf`: hours of one device between failures; `restart`: seconds after one; `repair`: hours of a node; `storage`:
    GB/s of a node; `evaluation`: share of the steps' time; `spares`: nodes.

    DoesNotFit where no cluster holds the run. PlanError for what makes no sense.
    """
    total = _total(tokens, dataset_size, epochs)
    offers = asked_prices(prices)
    names = asked_devices(devices, offers)
    numbers = asked_nodes(nodes)
    given = _conditions(mtbf, restart, repair, storage, evaluation, spares)
    if budget is not None and not 0 < budget < float("inf"):
        raise ArgumentError(f"budget={budget} must be a number of dollars above 0")
    plan = _plan(model, section_words(recipe), tune)
    deadline_s = seconds_of(deadline)
    longest_s = LONGEST_S if deadline_s == float("inf") else max(LONGEST_S, deadline_s)
    asked = RentAsked(plan=plan, tokens=total, given=given, longest_s=longest_s, thorough=not quick)
    swept = sweep(asked, offers, names, numbers)
    if not swept.runs:
        raise _nothing(asked, swept)
    return RentAnswer(
        asked=asked, swept=swept, prices=offers, words=_words(model, plan, section_words(recipe), tune, total),
        deadline_s=deadline_s, budget_usd=float("inf") if budget is None else budget,
        left_out={} if devices else left_out(offers),
    )  # fmt: skip


def _plan(model: Any, words: Sequence[str], tune: str) -> Plan:
    """The run on one device: its batch is that of every cluster, so that all train alike."""
    return asked_plan(model, "h100", 1, words, tune)


def _words(model: Any, plan: Plan, recipe: Sequence[str], tune: str, tokens: float) -> tuple[str, ...]:
    words = ["meshwright", "plan", str(model) if isinstance(model, str | Path) else plan.model.name]
    words += ["--tune", tune] if tune else []
    batch = [] if any("batch" in word for word in recipe) else [f"global_batch={plan.recipe.global_batch}"]
    for word in (*recipe, *batch):
        words += ["--recipe", word]
    return (*words, "--tokens", tokens_word(tokens))


def _total(tokens: str | float | None, size: str | float | None, epochs: float) -> float:
    """Tokens of the run."""
    if (tokens is None) == (size is None):
        raise ArgumentError("say how long the run is: tokens=1T, or dataset_size=200M and epochs=3, not both")
    if not 0 < epochs < 1e6:
        raise ArgumentError(f"epochs={epochs:g} must be above 0 and below a million")
    if tokens is not None and epochs != 1:
        raise ArgumentError("epochs= is for dataset_size=; tokens= is the whole run: leave one out")
    return tokens_of(tokens) if tokens is not None else epochs * tokens_of(size, "dataset_size")


def asked_prices(file: str | Path | None) -> Prices:
    """A user's table, or the shipped one; PlanError for a file that cannot be read."""
    return price_tables.shipped() if file is None else price_tables.read(Path(file))


def asked_devices(given: str | Sequence[str] | None, table: Prices) -> tuple[str, ...]:
    """Names of devices with a price, of a list or as "h100,h200"; ArgumentError where one that was named has none."""
    given = given.split(",") if isinstance(given, str) else given
    priced = tuple(dict.fromkeys(one.device for one in table.offers))
    if given is None:
        return priced
    found = price_tables.keys_of(given)
    for name, device in zip(given, found, strict=True):
        if device not in priced:
            raise ArgumentError(f"devices={name} has no price in {table.file}: give one with prices=FILE.csv")
        if missing := lacks(presets.device(name)):
            raise ArgumentError(f"devices={name} has no {missing}, which a prediction needs: leave it out")
    return tuple(dict.fromkeys(found))


def asked_nodes(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of nodes that are tried; ArgumentError for one that makes no sense."""
    given = [given] if isinstance(given, int) else given
    for number in given or ():
        if not 1 <= number <= MOST_NODES:
            raise ArgumentError(f"nodes={number} must be at least 1 and at most {MOST_NODES:,}")
    return tuple(sorted(set(given))) if given else NODES


def _conditions(
    mtbf: float | None, restart: float | None, repair: float | None, storage: float | None, evaluation: float | None,
    spares: int | None,
) -> Conditions:  # fmt: skip
    """With the defaults of what is not given; ArgumentError outside of what makes sense."""
    _within("mtbf", mtbf, 1, 1e9)
    _within("restart", restart, 0, 1e6)
    _within("repair", repair, 0.01, 1e5)
    _within("storage", storage, 1e-3, 1e5)
    _within("evaluation", evaluation, 0, 10)
    _within("spares", spares, 0, MOST_NODES)
    plain = Conditions()
    return replace(
        plain,
        mtbf_device_hours=LLAMA_3.mtbf_device_hours if mtbf is None else float(mtbf),
        restart_s=plain.restart_s if restart is None else float(restart),
        repair_s=plain.repair_s if repair is None else repair * HOUR_S,
        storage_bytes_per_s=plain.storage_bytes_per_s if storage is None else storage * 1e9,
        evaluation=plain.evaluation if evaluation is None else float(evaluation),
        spares=spares,
    )


def _within(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise ArgumentError(f"{name}={value:g} must be at least {least:g} and at most {most:,.10g}")


def _nothing(asked: RentAsked, swept: Swept) -> DoesNotFit:
    """Why no run was found."""
    name, years = asked.plan.model.name, many(round(asked.longest_s / LONGEST_S), "year")
    slow, unfit = swept.clusters - len(swept.unfit), len(swept.unfit)
    if slow and not unfit:
        return DoesNotFit(
            f"{name} on {count(asked.tokens)} tokens takes longer than {years} on each of {slow} clusters: take fewer "
            "tokens, more nodes, or a later deadline"
        )
    also = f", and takes longer than {years} on the other {slow}" if slow else ""
    return DoesNotFit(
        f"{name} fits on none of {unfit} clusters with memory to spare{also}: name larger devices or more nodes, or "
        "train adapters alone (tune=qlora)"
    )


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value
