"""`meshwright dryrun [PLAN.yaml] [KEY=VALUE ...]`: peak and traffic of the real program, without its hardware."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.options import Words
from meshwright.spec.errors import UnsafeCommunication
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.memory.held import KINDS
from meshwright.spec.units import gib, many

if TYPE_CHECKING:
    from meshwright.observe.dryrun.document import Room
    from meshwright.observe.dryrun.rank_run import WatchedRank
    from meshwright.observe.dryrun.simulate import DryRun
    from meshwright.spec import Plan

SHOWN = 20
KERNELS = {"cuda": "a GPU", "cpu": "a CPU"}


def dryrun(
    words: Words = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Run this rank only. Repeatable. [default: one of each pipeline stage]")
    ] = None,
    device: Annotated[str, typer.Option(help="Kernels of cuda or cpu. [default: those of the plan's cluster]")] = "",
    load: Annotated[
        float, typer.Option(help="Mixture of experts: rows of a rank's experts, as a multiple of an even share.")
    ] = 1.0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Run every micro-batch of a step, not only until nothing changes.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the communication of all ranks for deadlocks.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Run the program of `train` on fake tensors in a simulated process group, without the plan's hardware.

    It makes two optimizer steps, an evaluation and a checkpoint's reading, for one rank of each pipeline stage. Exit
    code 3 where it does not fit.
    """
    from meshwright.interface.terminal.screen_text import console, folded, print_answer
    from meshwright.verbs.dryrun.answer import dry_run, read_plan

    if check:
        plan = read_plan(words or (), {}, device=device, load=load)
        _check_communication(plan, device=device, load=load, whole=whole, json=json)
        return

    with console(json=json).status("dry run") as status:
        answer = dry_run(
            *(words or ()), ranks=rank or (), device=device, load=load, whole=whole,
            told=lambda done, number: status.update(f"dry run: {done} of {number} ranks"),
        )  # fmt: skip
    print_answer(answer, folded(lines(answer.simulation, answer.room)), json=json)
    answer.check()


def _check_communication(plan: "Plan", *, device: str, load: float, whole: bool, json: bool) -> None:
    """Record the communication of all ranks, check it and print the answer. Raises UnsafeCommunication."""
    from meshwright.interface.terminal.screen_text import console, print_json
    from meshwright.observe.check import recording
    from meshwright.observe.check.rules import check
    from meshwright.observe.dryrun.simulate import device_of

    device = device or device_of(plan)
    with console(json=json).status("check") as status:
        world = recording.record_world(
            plan, device=device, load=load, whole=whole,
            progress=lambda done, number: status.update(f"check: {done} of {number} ranks"),
        )  # fmt: skip
        verdict = check(world)
    if json:
        print_json({"source": "check", "device": device, **asdict(verdict)})
    else:
        print(verdict.sentence)
        for violation in verdict.violations:
            print(f"{violation.rule}: {violation.text}")
    if verdict.violations:
        first = verdict.violations[0]
        raise UnsafeCommunication(f"{verdict.sentence}; first: {first.rule}, {first.text.splitlines()[-1].strip()}")


def lines(run: "DryRun", room: "Room") -> Iterator[str]:
    """Yield the answer for people."""
    from meshwright.observe.dryrun.document import fits, needed_bytes, needed_text, room_sentence

    plan, worst = run.plan, run.worst
    yield (
        f"{plan.model.name}, {many(plan.layout.world, 'rank')}, {many(plan.recipe.global_batch, 'sequence')} of "
        f"{plan.recipe.sequence} tokens per step, {plan.recipe.precision}, "
        f"kernels of {KERNELS[run.device]}"
    )
    verdict = ""
    if room.usable_bytes:
        verdict = room_sentence(run, room, needed_bytes(run, room))
        verdict += f": {'fits' if fits(run, room) else 'does not fit'}"
    yield f"Peak {needed_text(run)} (rank {worst.rank}, {phase_words(worst.when)}){verdict}"
    yield ""
    yield from _table(run)
    yield ""
    if worst.staging_bytes and run.device == "cuda":
        yield f"Host memory, pinned: {gib(worst.staging_bytes)} for the copy that a thread saves (layout.saving)"
    yield from _largest_tensor_lines(worst)
    yield ""
    traffic = run.traffic(worst.rank)
    yield f"Rank {worst.rank} sends in a step:" if traffic else f"Rank {worst.rank} sends nothing."
    for (axis, collective), (calls, sent) in sorted(traffic.items()):
        yield f"  {axis:<14}{collective:<16}{calls:>8} {'call ' if calls == 1 else 'calls'} {gib(sent):>12}"
    for note in run.notes:
        yield f"note: {note}"


def _table(run: "DryRun") -> Iterator[str]:
    """Yield a column per rank. Beyond eight, or the width of the terminal, the lightest ranks are left out."""
    from meshwright.interface.terminal.screen_text import width

    ranks = sorted(
        sorted(run.ranks, key=lambda rank: -rank.peak_bytes)[: min(8, (width() - 20) // 12)], key=lambda rank: rank.rank
    )
    yield f"{'at the peak of rank':<20}" + "".join(f"{rank.rank:>12}" for rank in ranks)
    for kind in KINDS:
        if any(rank.kinds.get(kind) for rank in ranks):
            yield f"{kind:<20}" + "".join(f"{gib(rank.kinds.get(kind, 0)):>12}" for rank in ranks)
    yield f"{'peak':<20}" + "".join(f"{gib(rank.peak_bytes):>12}" for rank in ranks)


def _largest_tensor_lines(rank: "WatchedRank") -> Iterator[str]:
    """Yield a line for each of the largest tensors at the peak. Equal tensors of several layers share one."""
    from collections import Counter

    from meshwright.observe.dryrun.rank_run import generic

    yield "Largest tensors then:"
    alike = Counter(
        (tensor.bytes, tensor.kind, tensor.dtype, tensor.shape, tensor.line, generic(tensor.module) or tensor.operation)
        for tensor in rank.largest[:SHOWN]
    )
    for (size, kind, dtype, shape, line, made), count in alike.items():
        times = f"{count} x" if count > 1 else ""
        yield f"  {times:>5}{gib(size):>10}  {kind:<12} {dtype} {'x'.join(map(str, shape)):<16} {line} ({made})"
