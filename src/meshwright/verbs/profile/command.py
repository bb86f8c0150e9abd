"""`meshwright profile [PLAN.yaml] [KEY=VALUE ...]`: measure a few real steps."""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.options import Words
from meshwright.interface.process.environment import nodes, processes, rank
from meshwright.interface.process.launch import joined
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.plan.plan import world_violation
from meshwright.spec.units import MIB, count, gib, many

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from meshwright.observe.profile.measure import Profile

SHOWN, COLUMNS, WIDEST = 8, 5, 56
"""Most operations listed, most ranks side by side, and most characters of an operation's name."""
LEAST = 0.01
"""Smallest share of the peak for which a kind of memory is named."""


def profile(
    words: Words = None,
    steps: Annotated[int, typer.Option(help="Number of timed steps.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Make a few real steps of a plan and measure them: memory by kind and over time, traffic, time.

    Alone on a machine it starts its own processes: one for each GPU, or Gloo processes on a CPU. Under torchrun it uses
    the processes that are there. It writes RUN/profile.json and RUN/trace.json, which opens in
    https://ui.perfetto.dev, and RUN/plan.yaml if there is none. `meshwright compare RUN` reads them.
    """
    from meshwright.interface.planning.plan_reading import read_plan
    from meshwright.interface.process.environment import fix_cublas_workspace
    from meshwright.verbs.profile.answer import check_steps, measure_and_keep

    notes: list[str] = []
    plan, _ = read_plan(words or (), {}, processes=processes(), notes=notes)
    fix_cublas_workspace(plan)
    check_steps(steps)
    violation = world_violation(plan, processes(), nodes()) if processes() > 1 else None
    if violation:
        raise IllegalLayout(violation)
    from meshwright.interface.terminal.screen_text import console, print_json

    people = console(json=json)
    answer = measure_and_keep(plan, lambda plan: _measured(plan, steps, people))
    if answer is None:
        return
    if json:
        print_json(answer.to_dict())
        return
    for note in notes:
        print(f"meshwright: note: {note}", file=sys.stderr)
    for part in shown(answer.profile):
        people.print(part)
    people.print(f"written: {answer.files[0]}, and {answer.files[1]} for https://ui.perfetto.dev")


def _measured(plan: "Plan", steps: int, people: "Console") -> "Profile | None":
    """Return the profile on the first rank, None on the others."""
    if processes() == 1:
        from meshwright.observe.profile.measure import profile as profile_here

        with people.status("profile") as status:
            return profile_here(plan, steps=steps, progress=lambda line: status.update(f"profile: {line}"))
    from meshwright.observe.profile.measure import gather_profile, measure

    with joined() as pulse:
        report: Callable[[str], None] | None = None if rank() else lambda line: people.print(f"profile: {line}")
        return gather_profile(measure(plan, steps=steps, pulse=pulse, progress=report), plan)


def shown(profile: "Profile") -> "Iterator[str | Table]":
    """Yield the report for people: speed, a table of ranks, the parts of a step, traffic, operations."""
    plan, world = profile.plan, profile.plan.layout.world
    speed = f"{count(profile.tokens_per_s)} tokens/s, {count(profile.tokens_per_s / world)} per device"
    used = profile.utilization(causal=True)
    full = profile.utilization(causal=False)
    mfu = f", MFU {used:.1%} causal, {full:.1%} full" if used is not None and full is not None else ""
    yield f"{plan.model.name} on {many(world, 'rank')}, {profile.ranks[0].device}"
    lengths = profile.step_seconds
    timed = f"{many(len(lengths), 'step')} timed: {_ms(min(lengths))} to {_ms(max(lengths))}"
    yield f"step {_ms(profile.step_s)} ({timed}), {speed}{mfu}"
    worst = profile.worst
    kinds = sorted(worst.seen.kinds.items(), key=lambda kind: -kind[1])
    yield f"peak {gib(profile.peak_bytes)} on rank {worst.rank}, in {phase_words(worst.seen.when)}: " + ", ".join(
        f"{kind} {gib(size)}" for kind, size in kinds if size >= LEAST * worst.seen.peak_bytes
    )
    yield from profile.notes
    yield _first_steps(profile)
    yield _ranks(profile)
    if worst.traffic:
        yield _traffic(profile)
    yield _operations(profile)
    if world > 1:
        bubble = f"bubble {profile.bubble_fraction:.1%} of the busiest rank's work"
        yield f"{bubble}; clocks agree to {profile.residual_s:.0e} s"


def _first_steps(profile: "Profile") -> str:
    """Describe the peak memory of each of the first steps."""
    steps: dict[int, int] = {}
    for moment in profile.worst.memory:
        steps[moment.step] = max(steps.get(moment.step, 0), moment.allocated_bytes)
    return "peak by step: " + ", ".join(f"{step}: {gib(size)}" for step, size in steps.items() if step)


def _ranks(profile: "Profile") -> "Table":
    """Return a table with a column per rank, of many ranks one per stage: memory, and the parts of the step."""
    from meshwright.observe.profile.step_record import PARTS

    ranks = profile.ranks
    if len(ranks) > COLUMNS:
        ranks = profile.ranks[:: len(ranks) // profile.plan.layout.pp][:COLUMNS]
    table = _table("rank", *(str(rank.rank) for rank in ranks))
    table.add_row("peak", *(gib(rank.account.peak_bytes) for rank in ranks))
    table.add_row("reserved", *(gib(rank.account.reserved_bytes) for rank in ranks))
    split = [rank.account.inactive_split_bytes for rank in ranks]
    if any(size is not None for size in split):
        table.add_row("free in pieces", *("-" if size is None else gib(size) for size in split))
    steps = [rank.steps[profile.chosen] for rank in ranks]
    for part in PARTS:
        table.add_row(part, *(_ms(step.parts[part]) for step in steps))
    table.add_row("communication", *(_ms(step.streams["communication_s"]) for step in steps))
    return table


def _traffic(profile: "Profile") -> "Table":
    table = _table("axis", "collective", "calls", "MiB sent")
    for (axis, what), (calls, sent) in sorted(profile.worst.traffic.items()):
        table.add_row(axis, what, str(calls), f"{sent / MIB:.2f}")
    return table


def _operations(profile: "Profile") -> "Table":
    table = _table("operation", "calls", "its own time")
    for operation in profile.busiest.operations[:SHOWN]:
        table.add_row(operation.name.removeprefix("aten::")[:WIDEST], str(operation.calls), _ms(operation.seconds))
    return table


def _ms(seconds: float) -> str:
    """Return a time in ms, one unit for all times of a column."""
    return f"{1e3 * seconds:.1f} ms"


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column != "collective" else "left", no_wrap=True)
    return table
