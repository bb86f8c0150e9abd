"""What `rent` prints: which cluster meets the deadline or the budget, then the front of money and time."""

from collections.abc import Iterator, Sequence

from meshwright.api.renting import RentAnswer
from meshwright.api.renting_serving import ServeRentAnswer
from meshwright.cli.terminal.screen_text import dot, width, wrapped
from meshwright.planner.rent.run_on import RunOn
from meshwright.planner.rent.served_on import ServedOn
from meshwright.planner.rent.uncertainty import digits, rounded
from meshwright.spec.units import count, duration, short_gib, step_time

DAY_S = 86_400.0
FEW = 0.01
LIMITS = 2
"""What stops going further, named in a row."""


def days(seconds: float, error: float) -> str:
    """A time to what is known of it: 16 days, 7.2 h, 12 min."""
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{_plain(rounded(seconds / size, error))} {unit}"
    return f"{_plain(rounded(seconds, error))} s"


def dollars(usd: float, error: float) -> str:
    """A bill to what is known of it."""
    value = rounded(usd, error)
    return f"${_plain(value / 1e6)}M" if value >= 1e6 else f"${_plain(value)}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def rent_answer(answer: RentAnswer) -> Iterator[str]:
    """All lines."""
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
    yield from _front(answer)
    yield ""
    for line in (*footnotes(answer), *reproduced(answer)):
        yield from wrapped(line, width(), "  ", "    ")


def verdicts(answer: RentAnswer) -> Iterator[str]:
    """The cheapest that meets the deadline, the fastest within the budget; or that there is none."""
    limit_s, budget = answer.deadline_s, answer.budget_usd
    asked = f" that ends within {days(limit_s, 0)}" if limit_s < float("inf") else ""
    best = answer.cheapest
    if best is None:
        first = min(answer.front, key=lambda one: one.wall_s)
        yield f"NONE{asked}: the fastest takes {days(first.wall_s, first.error)} ({_where(first)})."
    else:
        chance = f", in time with a probability of {best.ends_within(limit_s):.0%}" if asked else ""
        yield f"CHEAPEST{asked}: {_run(best)}{chance}."
    asked = f" within ${budget:,.0f}" if budget < float("inf") else ""
    best = answer.fastest
    if best is None:
        first = answer.front[0]
        yield f"NONE{asked}: the cheapest costs {dollars(first.usd, first.error)} ({_where(first)})."
    else:
        chance = f", in budget with a probability of {best.costs_at_most(budget):.0%}" if asked else ""
        yield f"FASTEST{asked}: {_run(best)}{chance}."


def _where(one: RunOn) -> str:
    spares = f" and {one.weeks.spares} spare" if one.weeks.spares else ""
    return f"{one.offer.nodes} x {one.offer.name}{spares}"


def _run(one: RunOn) -> str:
    low, high = (dollars(usd, one.error) for usd in one.range_usd)
    return (
        f"{_where(one)}, {days(one.wall_s, one.error)}, {dollars(one.usd, one.error)} (90% range {low} to {high}), "
        f"goodput {one.weeks.goodput:.1%}"
    )


def _front(answer: RentAnswer) -> Iterator[str]:
    heads = ("bill", "time", "nodes x cluster", "goodput", "energy", "fits", "stops going further")
    return _table((heads, *map(_cells, answer.front)), ">><>>><")


def _table(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Columns as wide as their widest cell, each to its side."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{side}{size}}" for cell, side, size in zip(row, sides, wide, strict=True))
        yield ("    " + "  ".join(cells)).rstrip()


def _cells(one: RunOn) -> tuple[str, ...]:
    spares = f"+{one.weeks.spares}" if one.weeks.spares else ""
    return (
        dollars(one.usd, one.error), days(one.wall_s, one.error), f"{one.offer.nodes}{spares} x {one.offer.name}",
        f"{one.weeks.goodput:.1%}", _energy(one), f"{one.fits:.0%}",
        ", ".join(limit.partition(":")[0] for limit in one.limits[:LIMITS]),
    )  # fmt: skip


def _energy(one: RunOn) -> str:
    if one.kwh is None:
        return "unknown"
    mwh = one.kwh >= 1e3
    return f"{_plain(rounded(one.kwh / (1e3 if mwh else 1), one.error))} {'MWh' if mwh else 'kWh'}"


def footnotes(answer: RentAnswer) -> Iterator[str]:
    """What was tried, what was assumed."""
    swept, given = answer.swept, answer.asked.given
    yield (
        f"{swept.clusters} clusters tried: {len(swept.runs)} searched to the end, {swept.dominated} cannot beat these, "
        f"{swept.too_long} take over a year, {len(swept.unfit)} do not fit."
    )
    yield (
        "Stops going further: shares of a step that more nodes do not shrink; batch: each data-parallel rank has one "
        "sequence; memory: layers recompute to fit."
    )
    if answer.unpriced:
        yield f"No price, so not tried: {', '.join(answer.unpriced)}."
    yield (
        f"Counted: a failure every {given.mtbf_device_hours:,.0f} hours of a device (Llama 3), {given.evaluation:.0%} "
        f"for evaluation, {duration(given.restart_s)} for a restart, {duration(given.repair_s)} until a node is back, "
        f"checkpoints at {given.storage_bytes_per_s / 1e9:g} GB/s per node."
    )
    yield (
        "Energy: datasheet watts of all devices all the time, without hosts and cooling. Bills: "
        f"{answer.prices.file}, on demand, without storage, traffic and tax."
    )


def reproduced(answer: RentAnswer) -> Iterator[str]:
    """The command of the recommended run."""
    best = answer.cheapest or answer.front[0]
    weeks = best.weeks
    size = digits(best.error)
    few = _plain(rounded(weeks.failures, best.error)) if weeks.failures >= FEW else f"fewer than {FEW:g}"
    yield (
        f"Layout of {_where(best)}: {step_time(best.found.step_s)} per step, {short_gib(best.found.peak_bytes)}; save "
        f"every {duration(float(f'{weeks.interval_s:.{size}g}'))} ({short_gib(best.saves.total_bytes)}), "
        f"{few} failures expected."
    )
    yield f"Again: {answer.command(best)}"


def serve_rent_answer(answer: ServeRentAnswer) -> Iterator[str]:
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
        name = _name(first.offer.nodes, first.offer.name)
        yield f"  NONE{limit}: the fastest takes {first.per_token_s * 1e3:.3g} ms ({name})."
    else:
        users = f", {best.users_within(answer.latency_s):,} requests at once{limit}" if limit else ""
        line = (
            f"CHEAPEST{limit}: {_name(best.offer.nodes, best.offer.name)}, {best.layout.words}, "
            f"${_three(best.usd_per_hour)} per hour, ${best.usd_per_million:.2g} per million tokens of answers{users}."
        )
        yield from wrapped(line, width(), "  ", "    ")
    yield ""
    heads = ("$ per hour", "$ per M", "nodes x cluster", "layout", "per token", "first token", "tokens/s")
    yield from _table((heads, *map(_served, answer.front)), ">><<>>>")
    yield ""
    if answer.prices.unpriced():
        yield from wrapped(f"No price, so not tried: {', '.join(answer.prices.unpriced())}.", width(), "  ", "    ")
    yield from wrapped(f"Again: {answer.command(best or answer.front[0])}", width(), "  ", "    ")


def _served(one: ServedOn) -> tuple[str, ...]:
    return (
        _three(one.usd_per_hour), f"{one.usd_per_million:.2g}", _name(one.offer.nodes, one.offer.name),
        one.layout.words, f"{one.per_token_s * 1e3:.3g} ms", f"{one.first_token_s * 1e3:,.0f} ms",
        f"{one.layout.tokens_per_s:,.0f}",
    )  # fmt: skip


def _three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _name(nodes: int, cluster: str) -> str:
    return f"{nodes} x {cluster}"
