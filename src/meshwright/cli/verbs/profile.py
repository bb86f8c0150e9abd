"""`meshwright profile [PLAN.yaml] [KEY=VALUE ...]`: a few real steps, measured."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.plan_arguments import Words
from meshwright.cli.process.launch import joined, nodes, processes, rank
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import MIB, count, gib, many
from meshwright.spec.worlds import world_violation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from meshwright.observe.profile.measure import Profile

SHOWN, COLUMNS, WIDEST = 8, 5, 56
"""Operations that are listed, ranks beside each other, characters of an operation's name."""
LEAST = 0.01
"""Share of the peak from which on a kind of memory is named."""


def profile(
    words: Words = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps that are timed.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Make a few real steps of a plan and measure them: memory by kind and over time, traffic, time.

    Alone on a machine it starts the processes itself: one for each GPU, or Gloo processes on a CPU; under torchrun it
    takes those that are there. Writes RUN/profile.json and RUN/trace.json, which opens in https://ui.perfetto.dev, and
    RUN/plan.yaml where none is there: `meshwright compare RUN` reads them.
    """
    from meshwright.api import profiling
    from meshwright.api.determinism import set_environment
    from meshwright.api.plan_reading import read_plan

    # Read when torch is loaded, here and by the processes that are started: its profiler would chat.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    notes: list[str] = []
    plan, _ = read_plan(words or (), {}, processes=processes(), notes=notes)
    set_environment(plan)
    profiling.check_steps(steps)
    violation = world_violation(plan, processes(), nodes()) if processes() > 1 else None
    if violation:
        raise IllegalLayout(violation)
    from meshwright.cli.terminal.output import console, print_json

    people = console(json=json)
    answer = profiling.kept(plan, lambda one: _measured(one, steps, people))
    if answer is None:
        return
    if json:
        print_json(answer.to_dict())
        return
    found, files = answer.found, answer.files
    for note in notes:
        print(f"meshwright: note: {note}", file=sys.stderr)
    for part in shown(found):
        people.print(part)
    people.print(f"written: {files[0]}, and {files[1]} for https://ui.perfetto.dev")


def _measured(plan: "Plan", steps: int, people: "Console") -> "Profile | None":
    """On the first rank the profile, on others None."""
    if processes() == 1:
        from meshwright.observe.profile.local_run import profile as alone

        with people.status("profile") as status:
            return alone(plan, steps=steps, said=lambda line: status.update(f"profile: {line}"))
    from meshwright.observe.profile.measure import gathered, measure

    with joined() as pulse:
        said: Callable[[str], None] | None = None if rank() else lambda line: people.print(f"profile: {line}")
        return gathered(measure(plan, steps=steps, pulse=pulse, said=said), plan)


def shown(found: "Profile") -> "Iterator[str | Table]":
    """For people: a line of speed, a table of ranks, what a step is spent on, traffic, operations."""
    plan, world = found.plan, found.plan.layout.world
    speed = f"{count(found.tokens_per_s)} tokens/s, {count(found.tokens_per_s / world)} per device"
    used = found.utilization(causal=True)
    full = found.utilization(causal=False)
    mfu = f", MFU {used:.1%} causal, {full:.1%} full" if used is not None and full is not None else ""
    yield f"{plan.model.name} on {many(world, 'rank')}, {found.ranks[0].device}"
    lengths = found.step_seconds
    timed = f"{many(len(lengths), 'step')} timed: {_ms(min(lengths))} to {_ms(max(lengths))}"
    yield f"step {_ms(found.step_s)} ({timed}), {speed}{mfu}"
    worst = found.worst
    kinds = sorted(worst.seen.kinds.items(), key=lambda item: -item[1])
    yield f"peak {gib(found.peak_bytes)} on rank {worst.rank}, in {phase_words(worst.seen.when)}: " + ", ".join(
        f"{kind} {gib(size)}" for kind, size in kinds if size >= LEAST * worst.seen.peak_bytes
    )
    yield from found.notes
    yield _first_steps(found)
    yield _ranks(found)
    if worst.traffic:
        yield _traffic(found)
    yield _operations(found)
    if world > 1:
        yield f"bubble {found.bubble_fraction:.1%} of the busiest rank's work; clocks agree to {found.residual_s:.0e} s"


def _first_steps(found: "Profile") -> str:
    """The most that each of the first steps held."""
    steps: dict[int, int] = {}
    for moment in found.worst.memory:
        steps[moment.step] = max(steps.get(moment.step, 0), moment.allocated_bytes)
    return "peak by step: " + ", ".join(f"{step}: {gib(size)}" for step, size in steps.items() if step)


def _ranks(found: "Profile") -> "Table":
    """A column a rank: memory, and the parts of the step. Of many ranks one of each pipeline place."""
    from meshwright.observe.profile.step_record import PARTS

    some = found.ranks
    if len(some) > COLUMNS:
        some = found.ranks[:: len(some) // found.plan.layout.pp][:COLUMNS]
    table = _table("rank", *(str(one.rank) for one in some))
    table.add_row("peak", *(gib(one.account.peak_bytes) for one in some))
    table.add_row("reserved", *(gib(one.account.reserved_bytes) for one in some))
    split = [one.account.inactive_split_bytes for one in some]
    if any(size is not None for size in split):
        table.add_row("free in pieces", *("-" if size is None else gib(size) for size in split))
    steps = [one.steps[found.chosen] for one in some]
    for part in PARTS:
        table.add_row(part, *(_ms(step.parts[part]) for step in steps))
    table.add_row("communication", *(_ms(step.streams["communication_s"]) for step in steps))
    return table


def _traffic(found: "Profile") -> "Table":
    table = _table("axis", "collective", "calls", "MiB sent")
    for (axis, what), (calls, sent) in sorted(found.worst.traffic.items()):
        table.add_row(axis, what, str(calls), f"{sent / MIB:.2f}")
    return table


def _operations(found: "Profile") -> "Table":
    table = _table("operation", "calls", "its own time")
    for operation in found.busiest.operations[:SHOWN]:
        table.add_row(operation.name.removeprefix("aten::")[:WIDEST], str(operation.calls), _ms(operation.seconds))
    return table


def _ms(seconds: float) -> str:
    """Times that stand below each other have one unit."""
    return f"{1e3 * seconds:.1f} ms"


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column != "collective" else "left", no_wrap=True)
    return table
