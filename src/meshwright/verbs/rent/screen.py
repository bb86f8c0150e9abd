"""Answer of `rent` on the terminal: the cluster that meets deadline or budget, then the front of cost and time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf, log
from typing import TypeVar

from meshwright.interface.terminal.screen_text import continued, dot, width, wrapped
from meshwright.planner.explain import probability, rate_caveats
from meshwright.planner.rent.clusters import Offer
from meshwright.planner.rent.goodput import LLAMA_3
from meshwright.planner.rent.run_on import RentedRun, days, dollars, plain, three
from meshwright.planner.rent.served_on import RentedServing
from meshwright.planner.rent.sweep import LONGEST_S
from meshwright.spec.units import count, duration, many, short_gib, step_time
from meshwright.verbs.rent.answer import RentAnswer, ServeRentAnswer

Row = TypeVar("Row", RentedRun, RentedServing)

FEW = 0.01
"""Failures, and a probability, below which no figure is printed."""
LIMITS = 2
"""Number of scaling limits named in a row."""
TWO = 0.1
"""Relative error worth two digits, for figures without an error of their own."""
ROWS = 8
"""Rows of a front, unless --all is given."""


def rent_answer(answer: RentAnswer, *, every: bool = False) -> Iterator[str]:
    """Yield all lines. `every`: all rows of the front."""
    plan, recipe = answer.asked.plan, answer.asked.plan.recipe
    parts = [
        plan.model.name, f"{count(answer.asked.tokens)} tokens", recipe.precision,
        f"{recipe.global_batch:,} x {recipe.sequence:,} tokens per step on every cluster",
    ]  # fmt: skip
    yield from wrapped(dot().join(parts), width(), "", "  ")
    yield ""
    for line in verdicts(answer):
        yield from wrapped(line, width(), "  ", "    ")
    yield ""
    yield from _front(answer, every=every)
    yield ""
    for line in (*footnotes(answer, every=every), reproduced(answer)):
        yield from wrapped(line, width(), "  ", "    ")
    yield from _again(answer.command(answer.recommended))


def _again(command: str) -> Iterator[str]:
    yield "  Again:"
    yield from continued(command, width(), "    ")


def verdicts(answer: RentAnswer) -> Iterator[str]:
    """Yield the cheapest run before the deadline and the fastest within the budget, or that there is none."""
    limit_s, budget = answer.deadline_s, answer.budget_usd
    asked = f" that ends within {days(limit_s)}" if limit_s < float("inf") else ""
    best = answer.cheapest
    if best is None:
        # Instead of a bare refusal, tell how far the best run is from the deadline.
        nearest = min(answer.front, key=lambda run: run.wall_s)
        yield f"NONE{asked}: the fastest takes {nearest.days} ({nearest.title})."
    else:
        yield from _verdict(
            "CHEAPEST", asked, best, answer.likely_in_time, "time", lambda run: run.ends_within(limit_s)
        )
    asked = f" within ${budget:,.0f}" if budget < float("inf") else ""
    best = answer.fastest
    if best is None:
        nearest = answer.front[0]
        yield f"NONE{asked}: the cheapest costs {nearest.dollars} ({nearest.title})."
    else:
        likely = answer.likely_in_budget
        yield from _verdict("FASTEST", asked, best, likely, "budget", lambda run: run.costs_at_most(budget))


def _verdict(
    head: str, asked: str, best: RentedRun, likely: RentedRun | None, limit: str, chance: Callable[[RentedRun], float]
) -> Iterator[str]:
    """Yield the best run on average, and another one that likely keeps the limit. `asked`: the limit. Empty = none."""
    if not asked:
        yield f"{head}: {_run(best)}."
        return
    yield f"{head}{asked}: {_run(best)}, in {limit} with {probability(chance(best), FEW)}."
    if likely not in (best, None):
        yield f"LIKELY IN {limit.upper()}: {_run(likely)}, in {limit} with {probability(chance(likely), FEW)}."


def _run(run: RentedRun) -> str:
    low, high = (dollars(usd, run.error) for usd in run.range_usd)
    return f"{run.title}, {run.days}, {run.dollars} (90% range {low} to {high}), goodput {run.timing.goodput:.1%}"


def _front(answer: RentAnswer, *, every: bool) -> Iterator[str]:
    heads = ("bill", "time", "nodes x devices", "goodput", "energy", "fits", "stopped by")
    rows = answer.front if every else shown(answer.front, answer.named, lambda run: (log(run.usd), log(run.wall_s)))
    yield from _table((heads, *map(_cells, rows)), ">><>>><")
    yield from _left_out(len(answer.front) - len(rows))


def shown(
    front: Sequence[Row],
    named: Sequence[Row | None],
    coordinates: Callable[[Row], tuple[float, float]],
    most: int = ROWS,
) -> list[Row]:
    """Return at most `most` rows of a front, in order: both ends, the named rows, then those farthest from others."""
    points = [coordinates(row) for row in front]
    shown_rows = {0, len(front) - 1, *(front.index(row) for row in named if row is not None)}

    def distance(n: int) -> float:
        return min(abs(points[n][0] - points[k][0]) + abs(points[n][1] - points[k][1]) for k in shown_rows)

    # Add the row farthest from all shown ones, until there are enough.
    while len(shown_rows) < min(most, len(front)):
        shown_rows.add(max(set(range(len(front))) - shown_rows, key=distance))
    return [front[n] for n in sorted(shown_rows)]


def _left_out(number: int) -> Iterator[str]:
    if number:
        yield f"  {many(number, 'row')} between these: --all"


def _table(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield aligned columns as wide as their widest cell. Those without room follow below each row, by name."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # A narrow terminal drops whole columns from the right: the first ones answer the question.
    fits = sum(end <= width() for end in accumulate(size + 2 for size in wide))
    for row in rows:
        cells = (f"{cell:{side}{size}}" for cell, side, size in zip(row, sides, wide[:fits], strict=False))
        yield ("  " + "  ".join(cells)).rstrip()
        below = [f"{name} {cell}" for name, cell in zip(rows[0][fits:], row[fits:], strict=True) if cell]
        if below and row is not rows[0]:
            yield from wrapped(", ".join(below), width(), "    ")


def _cells(run: RentedRun) -> tuple[str, ...]:
    spares = f"+{run.timing.spares}" if run.timing.spares else ""
    return (
        run.dollars, run.days, _joined(run.offer, spares),
        f"{run.timing.goodput:.1%}", _energy(run), f"{run.fits:.0%}",
        ", ".join(limit.partition(":")[0] for limit in run.limits[:LIMITS]),
    )  # fmt: skip


def _joined(offer: Offer, spares: str = "") -> str:
    return f"{offer.nodes}{spares} x {offer.devices_per_node} {offer.price.device}"


def _energy(run: RentedRun) -> str:
    if run.kwh is None:
        return "unknown"
    mwh = run.kwh >= 1e3
    return f"{plain(run.kwh / (1e3 if mwh else 1), run.error)} {'MWh' if mwh else 'kWh'}"


def footnotes(answer: RentAnswer, *, every: bool = False) -> Iterator[str]:
    """Yield what was tried and what was assumed."""
    swept, conditions, longest_s = answer.swept, answer.asked.conditions, answer.asked.longest_s
    # The limit grows with a later deadline, so the sentence has to name the limit that was used.
    longest = "a year" if longest_s == LONGEST_S else days(longest_s)
    whose = " (Llama 3)" if conditions.mtbf_device_hours == LLAMA_3.mtbf_device_hours else ""
    yield (
        f"{swept.clusters} clusters tried: {len(swept.runs)} searched to the end, {swept.dominated} cannot beat these, "
        f"{swept.too_long} take over {longest}, {len(swept.unfit)} do not fit."
    )
    yield (
        "Stopped by: shares of a step that more nodes do not shrink; batch: each data-parallel rank has one "
        "sequence; memory: layers recompute to fit."
    )
    yield from dict.fromkeys(sentence for run in answer.named for sentence in rate_caveats(run.prediction))
    yield from _unpriced(answer.unpriced, every=every)
    yield from _left_out_devices(answer.left_out)
    yield (
        f"Counted: a failure every {conditions.mtbf_device_hours:,.0f} hours of a device{whose}, "
        f"{conditions.evaluation:.0%} for evaluation, {duration(conditions.restart_s)} for a restart, "
        f"{duration(conditions.repair_s)} until a node is back, "
        f"checkpoints at {conditions.storage_bytes_per_s / 1e9:g} GB/s per node"
        + (f", {conditions.storage_limit / 1e12:g} TB/s in all." if conditions.storage_limit < inf else ".")
    )
    yield (
        "Energy: datasheet watts of all devices all the time, without hosts and cooling. Bills: "
        f"{answer.prices.file}, on demand, without storage, traffic and tax."
    )


def _unpriced(names: Sequence[str], *, every: bool) -> Iterator[str]:
    if names and every:
        yield f"No price, so not tried: {', '.join(names)}."
    elif names:
        yield f"{many(len(names), 'device')} without a price: not tried (--all names them)."


def _left_out_devices(missing: Mapping[str, str]) -> Iterator[str]:
    if missing:
        devices = ", ".join(f"{device} (no {figures})" for device, figures in missing.items())
        yield f"Priced and not tried, since a figure is not known: {devices}."


def reproduced(answer: RentAnswer) -> str:
    """Describe the recommended run: its layout and its checkpoints."""
    best = answer.recommended
    weeks = best.timing
    planned = best.prediction
    few = plain(weeks.failures, best.error) if weeks.failures >= FEW else f"fewer than {FEW:g}"
    return (
        f"Layout of {best.title}: {step_time(planned.step_s)} per step, {short_gib(planned.peak_bytes)}; "
        f"checkpoints of {short_gib(best.saves.total_bytes)}, {few} failures expected. "
        f"{weeks.advice(planned.step_s, answer.asked.conditions.rate)}"
    )


def serve_rent_answer(answer: ServeRentAnswer, *, every: bool = False) -> Iterator[str]:
    """Yield all lines of `rent --serve`."""
    asked = answer.asked
    parts = [
        f"{asked.model.shape.name}, served by {asked.framework.name}", f"{answer.quantization} weights",
        f"{asked.input_tokens:,} tokens in, {asked.output_tokens:,} out", f"{asked.concurrency:,} requests at once",
    ]  # fmt: skip
    yield from wrapped(dot().join(parts), width(), "", "  ")
    yield ""
    limit = f" within {answer.latency_s * 1e3:g} ms per token" if answer.latency_s < float("inf") else ""
    best = answer.cheapest
    if best is None:
        fastest = min(answer.front, key=lambda deployment: deployment.per_token_s)
        yield f"  NONE{limit}: the fastest takes {fastest.per_token_s * 1e3:.3g} ms ({fastest.offer.title})."
    else:
        users = f", {best.users_within(answer.latency_s):,} requests at once{limit}" if limit else ""
        line = (
            f"CHEAPEST{limit}: {best.offer.title}, {best.layout.words}, "
            f"${three(best.usd_per_hour)} per hour, ${plain(best.usd_per_million, TWO)} per million tokens of "
            f"answers{users}."
        )
        yield from wrapped(line, width(), "  ", "    ")
    yield ""
    heads = ("$ per hour", "$ per M", "nodes x devices", "layout", "per token", "first token", "tokens/s")
    rows = answer.front if every else shown(answer.front, [best], _cost_and_time)
    yield from _table((heads, *map(_served_cells, rows)), ">><<>>>")
    yield from _left_out(len(answer.front) - len(rows))
    yield ""
    for line in (*_unpriced(answer.prices.unpriced(), every=every), *_left_out_devices(answer.left_out)):
        yield from wrapped(line, width(), "  ", "    ")
    yield from _again(answer.command(answer.recommended))


def _cost_and_time(deployment: RentedServing) -> tuple[float, float]:
    return log(deployment.usd_per_hour), log(deployment.per_token_s)


def _served_cells(deployment: RentedServing) -> tuple[str, ...]:
    return (
        three(deployment.usd_per_hour), plain(deployment.usd_per_million, TWO), _joined(deployment.offer),
        deployment.layout.words, f"{deployment.per_token_s * 1e3:.3g} ms", f"{deployment.first_token_s * 1e3:,.0f} ms",
        f"{deployment.layout.tokens_per_s:,.0f}",
    )  # fmt: skip
