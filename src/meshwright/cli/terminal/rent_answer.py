"""What `rent` prints: which cluster meets the deadline or the budget, then the front of money and time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import log
from typing import TypeVar

from meshwright.api.renting import RentAnswer
from meshwright.api.renting_serving import ServeRentAnswer
from meshwright.cli.terminal.screen_text import continued, dot, width, wrapped
from meshwright.planner.caveats import rate_caveats
from meshwright.planner.explain import probability
from meshwright.planner.rent.clusters import Offer
from meshwright.planner.rent.failures import LLAMA_3
from meshwright.planner.rent.run_on import RunOn
from meshwright.planner.rent.served_on import ServedOn
from meshwright.planner.rent.sweep import LONGEST_S
from meshwright.planner.rent.uncertainty import days, digits, dollars, plain, three
from meshwright.spec.units import count, duration, many, short_gib, step_time

Row = TypeVar("Row", RunOn, ServedOn)

FEW = 0.01
"""Failures, and a probability, below which no figure is given."""
LIMITS = 2
"""What stops going further, named in a row."""
TWO = 0.1
"""An error of which two digits are worth printing: of what is not printed to its own."""
ROWS = 8
"""Rows of a front, unless all are asked for."""


def rent_answer(answer: RentAnswer, *, every: bool = False) -> Iterator[str]:
    """All lines; `every` row of the front."""
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
    """The cheapest that meets the deadline, the fastest within the budget; or that there is none."""
    limit_s, budget = answer.deadline_s, answer.budget_usd
    asked = f" that ends within {days(limit_s)}" if limit_s < float("inf") else ""
    best = answer.cheapest
    if best is None:
        first = min(answer.front, key=lambda one: one.wall_s)
        yield f"NONE{asked}: the fastest takes {first.days} ({first.title})."
    else:
        chance = f", in time with {probability(best.ends_within(limit_s), FEW)}" if asked else ""
        yield f"CHEAPEST{asked}: {_run(best)}{chance}."
    asked = f" within ${budget:,.0f}" if budget < float("inf") else ""
    best = answer.fastest
    if best is None:
        first = answer.front[0]
        yield f"NONE{asked}: the cheapest costs {first.dollars} ({first.title})."
    else:
        chance = f", in budget with {probability(best.costs_at_most(budget), FEW)}" if asked else ""
        yield f"FASTEST{asked}: {_run(best)}{chance}."


def _run(one: RunOn) -> str:
    low, high = (dollars(usd, one.error) for usd in one.range_usd)
    return f"{one.title}, {one.days}, {one.dollars} (90% range {low} to {high}), goodput {one.weeks.goodput:.1%}"


def _front(answer: RentAnswer, *, every: bool) -> Iterator[str]:
    heads = ("bill", "time", "nodes x devices", "goodput", "energy", "fits", "stopped by")
    named = (answer.cheapest, answer.fastest)
    rows = answer.front if every else shown(answer.front, named, lambda one: (log(one.usd), log(one.wall_s)))
    yield from _table((heads, *map(_cells, rows)), ">><>>><")
    yield from _left_out(len(answer.front) - len(rows))


def shown(
    front: Sequence[Row], named: Sequence[Row | None], place: Callable[[Row], tuple[float, float]], most: int = ROWS
) -> list[Row]:
    """Of a front at most so many rows, in its order: the ends, those that are named, and those farthest from others."""
    places = [place(one) for one in front]
    kept = {0, len(front) - 1, *(front.index(one) for one in named if one is not None)}

    def alone(n: int) -> float:
        return min(abs(places[n][0] - places[k][0]) + abs(places[n][1] - places[k][1]) for k in kept)

    while len(kept) < min(most, len(front)):
        kept.add(max(set(range(len(front))) - kept, key=alone))
    return [front[n] for n in sorted(kept)]


def _left_out(number: int) -> Iterator[str]:
    if number:
        yield f"  {many(number, 'row')} between these: --all"


def _table(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Columns as wide as their widest cell, each to its side. Those that the terminal has no room for go below each
    row, by name."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    fits = sum(end <= width() for end in accumulate(size + 2 for size in wide))
    for row in rows:
        cells = (f"{cell:{side}{size}}" for cell, side, size in zip(row, sides, wide[:fits], strict=False))
        yield ("  " + "  ".join(cells)).rstrip()
        below = [f"{name} {cell}" for name, cell in zip(rows[0][fits:], row[fits:], strict=True) if cell]
        if below and row is not rows[0]:
            yield from wrapped(", ".join(below), width(), "    ")


def _cells(one: RunOn) -> tuple[str, ...]:
    spares = f"+{one.weeks.spares}" if one.weeks.spares else ""
    return (
        one.dollars, one.days, _joined(one.offer, spares),
        f"{one.weeks.goodput:.1%}", _energy(one), f"{one.fits:.0%}",
        ", ".join(limit.partition(":")[0] for limit in one.limits[:LIMITS]),
    )  # fmt: skip


def _joined(offer: Offer, spares: str = "") -> str:
    """Nodes, and what is in each, in a column."""
    return f"{offer.nodes}{spares} x {offer.devices_per_node} {offer.price.device}"


def _energy(one: RunOn) -> str:
    if one.kwh is None:
        return "unknown"
    mwh = one.kwh >= 1e3
    return f"{plain(one.kwh / (1e3 if mwh else 1), one.error)} {'MWh' if mwh else 'kWh'}"


def footnotes(answer: RentAnswer, *, every: bool = False) -> Iterator[str]:
    """What was tried, what was assumed."""
    swept, given, longest_s = answer.swept, answer.asked.given, answer.asked.longest_s
    longest = "a year" if longest_s == LONGEST_S else days(longest_s)
    whose = " (Llama 3)" if given.mtbf_device_hours == LLAMA_3.mtbf_device_hours else ""
    yield (
        f"{swept.clusters} clusters tried: {len(swept.runs)} searched to the end, {swept.dominated} cannot beat these, "
        f"{swept.too_long} take over {longest}, {len(swept.unfit)} do not fit."
    )
    yield (
        "Stopped by: shares of a step that more nodes do not shrink; batch: each data-parallel rank has one "
        "sequence; memory: layers recompute to fit."
    )
    named = (run.found for run in (answer.cheapest, answer.fastest) if run is not None)
    yield from dict.fromkeys(sentence for prediction in named for sentence in rate_caveats(prediction))
    yield from _unpriced(answer.unpriced, every=every)
    yield from _left_out_devices(answer.left_out)
    yield (
        f"Counted: a failure every {given.mtbf_device_hours:,.0f} hours of a device{whose}, {given.evaluation:.0%} "
        f"for evaluation, {duration(given.restart_s)} for a restart, {duration(given.repair_s)} until a node is back, "
        f"checkpoints at {given.storage_bytes_per_s / 1e9:g} GB/s per node."
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
        named = ", ".join(f"{device} (no {figures})" for device, figures in missing.items())
        yield f"Priced and not tried, since a figure is not known: {named}."


def reproduced(answer: RentAnswer) -> str:
    """The layout of the recommended run, and how it is saved."""
    best = answer.recommended
    weeks = best.weeks
    size = digits(best.error)
    few = plain(weeks.failures, best.error) if weeks.failures >= FEW else f"fewer than {FEW:g}"
    return (
        f"Layout of {best.title}: {step_time(best.found.step_s)} per step, {short_gib(best.found.peak_bytes)}; save "
        f"every {duration(float(f'{weeks.interval_s:.{size}g}'))} ({short_gib(best.saves.total_bytes)}), "
        f"{few} failures expected."
    )


def serve_rent_answer(answer: ServeRentAnswer, *, every: bool = False) -> Iterator[str]:
    """All lines of `rent --serve`."""
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
        first = min(answer.front, key=lambda one: one.per_token_s)
        yield f"  NONE{limit}: the fastest takes {first.per_token_s * 1e3:.3g} ms ({first.offer.title})."
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
    rows = answer.front if every else shown(answer.front, [best], _served_place)
    yield from _table((heads, *map(_served, rows)), ">><<>>>")
    yield from _left_out(len(answer.front) - len(rows))
    yield ""
    for line in (*_unpriced(answer.prices.unpriced(), every=every), *_left_out_devices(answer.left_out)):
        yield from wrapped(line, width(), "  ", "    ")
    yield from _again(answer.command(answer.recommended))


def _served_place(one: ServedOn) -> tuple[float, float]:
    return log(one.usd_per_hour), log(one.per_token_s)


def _served(one: ServedOn) -> tuple[str, ...]:
    return (
        three(one.usd_per_hour), plain(one.usd_per_million, TWO), _joined(one.offer),
        one.layout.words, f"{one.per_token_s * 1e3:.3g} ms", f"{one.first_token_s * 1e3:,.0f} ms",
        f"{one.layout.tokens_per_s:,.0f}",
    )  # fmt: skip
