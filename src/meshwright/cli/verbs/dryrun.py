"""`meshwright dryrun [PLAN.yaml] [KEY=VALUE ...]`: peak and traffic of the real program, without its hardware."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.plan_arguments import Words
from meshwright.spec.ledger import KINDS
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import gib, many

if TYPE_CHECKING:
    from meshwright.observe.dryrun.dryrun_document import Room
    from meshwright.observe.dryrun.rank_run import WatchedRank
    from meshwright.observe.dryrun.simulate import DryRun

SHOWN = 20
KERNELS = {"cuda": "a GPU", "cpu": "a CPU"}


def dryrun(
    words: Words = None,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", help="Only this rank; may be given again. [default: one of each pipeline stage]"),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cuda or cpu: whose kernels. [default: those of the plan's cluster]")
    ] = "",
    load: Annotated[
        float, typer.Option("--load", help="Mixture of experts: rows that a rank's experts get over an even share.")
    ] = 1.0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Every micro-batch of a step, not only until nothing new comes.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the communication of every rank for deadlocks, and nothing else.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Run the program that `train` runs on fake tensors in a simulated process group: two optimizer steps, an
    evaluation and a checkpoint's reading, for one rank of each pipeline stage. Exit code 3 where it does not fit."""
    from meshwright.api import dry_runs
    from meshwright.cli.terminal.output import console, print_json

    if check:
        from meshwright.cli.verbs.check_communication import check_communication

        plan = dry_runs.read_plan(words or (), {}, device=device, load=load)
        check_communication(plan, device=device, load=load, whole=whole, json=json)
        return

    with console(json=json).status("dry run") as status:
        answer = dry_runs.dry_run(
            *(words or ()), ranks=rank or (), device=device, load=load, whole=whole,
            told=lambda done, of: status.update(f"dry run: {done} of {of} ranks"),
        )  # fmt: skip
    from meshwright.cli.terminal.screen_text import folded, show

    if json:
        print_json(answer.to_dict())
    else:
        show(folded(lines(answer.found, answer.room)))
    answer.check()


def lines(found: "DryRun", room: "Room") -> Iterator[str]:
    """For people."""
    from meshwright.observe.dryrun.dryrun_document import fits, judged, needed, needed_bytes

    plan, worst = found.plan, found.worst
    yield (
        f"{plan.model.name}, {many(plan.layout.world, 'rank')}, {many(plan.recipe.global_batch, 'sequence')} of "
        f"{plan.recipe.sequence} tokens per step, {plan.recipe.precision}, "
        f"kernels of {KERNELS[found.device]}"
    )
    verdict = ""
    if room.usable_bytes:
        verdict = judged(found, room, needed_bytes(found, room))
        verdict += f": {'fits' if fits(found, room) else 'does not fit'}"
    yield f"Peak {needed(found)} (rank {worst.rank}, {phase_words(worst.when)}){verdict}"
    yield ""
    yield from _table(found)
    yield ""
    if worst.staging_bytes and found.device == "cuda":
        yield f"Host memory, pinned: {gib(worst.staging_bytes)} for the copy that a thread saves (layout.saving)"
    yield from _largest(worst)
    yield ""
    traffic = found.traffic(worst.rank)
    yield f"Rank {worst.rank} sends in a step:" if traffic else f"Rank {worst.rank} sends nothing."
    for (axis, collective), (calls, sent) in sorted(traffic.items()):
        yield f"  {axis:<14}{collective:<16}{calls:>8} {'call ' if calls == 1 else 'calls'} {gib(sent):>12}"
    for note in found.notes:
        yield f"note: {note}"


def _table(found: "DryRun") -> Iterator[str]:
    """A column for each rank; beyond eight, and what the terminal has room for, the lightest are left out."""
    from meshwright.cli.terminal.screen_text import width

    ranks = sorted(
        sorted(found.ranks, key=lambda seen: -seen.peak_bytes)[: min(8, (width() - 20) // 12)],
        key=lambda seen: seen.rank,
    )
    yield f"{'at the peak of rank':<20}" + "".join(f"{seen.rank:>12}" for seen in ranks)
    for kind in KINDS:
        if any(seen.kinds.get(kind) for seen in ranks):
            yield f"{kind:<20}" + "".join(f"{gib(seen.kinds.get(kind, 0)):>12}" for seen in ranks)
    yield f"{'peak':<20}" + "".join(f"{gib(seen.peak_bytes):>12}" for seen in ranks)


def _largest(seen: "WatchedRank") -> Iterator[str]:
    """Equal ones of several layers in one line."""
    from collections import Counter

    from meshwright.observe.dryrun.rank_run import generic

    yield "Largest tensors then:"
    alike = Counter(
        (one.bytes, one.kind, one.dtype, one.shape, one.line, generic(one.module) or one.operation)
        for one in seen.largest[:SHOWN]
    )
    for (size, kind, dtype, shape, line, made), count in alike.items():
        times = f"{count} x" if count > 1 else ""
        yield f"  {times:>5}{gib(size):>10}  {kind:<12} {dtype} {'x'.join(map(str, shape)):<16} {line} ({made})"
