"""`meshwright doctor`: is this machine, or this cluster, fit to train."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.spec.units import duration, many

if TYPE_CHECKING:
    from meshwright.observe.doctor.examine import Examination

SIGNS = {"ok": "ok", "warning": "WARNING", "failure": "FAILURE", "skipped": "skipped"}


def doctor(
    folder: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    quick: Annotated[bool, typer.Option("--quick", help="Seconds: start no processes and train nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON document.")] = False,
) -> None:
    """Check this machine in about two minutes: versions, memory, disk, GPUs, kernels, links, every pipeline schedule,
    a checkpoint, a real step. What is wrong is said with what to do about it; exit code 1 where training would fail.

    Under torchrun it checks all ranks and their links, and names the slow ones. --json is a file that can be sent: it
    holds no names of machines or people.
    """
    from meshwright.cli.process.launch import joined, processes, rank

    with joined():
        from meshwright.cli.terminal.output import print_json
        from meshwright.observe.doctor.examine import examine
        from meshwright.parallel.group import Group

        world = None
        if processes() > 1:
            import torch.distributed as dist

            world = Group("world", tuple(range(processes())), rank(), dist.group.WORLD)
        found = examine(folder, world=world, quick=quick, say=_progress)
        if rank() == 0 and json:
            print_json(found.document())
        elif rank() == 0:
            print("\n".join(lines(found)), flush=True)
    if found.verdict == "failure":
        raise typer.Exit(1)


def _progress(name: str) -> None:
    """On a terminal: what is being tried now."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name} ...", end="", file=sys.stderr, flush=True)


def lines(found: "Examination") -> list[str]:
    """For people: the verdict, what is wrong with its advice, then every check."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    bad = [one for one in found.findings if one.state in ("failure", "warning")]
    failures = sum(one.state == "failure" for one in bad)
    tried = sum(one.state != "skipped" for one in found.findings)
    counts = [many(failures, "failure"), many(len(bad) - failures, "warning")]
    said = {
        "failure": f"NOT fit to train: {', '.join(counts)}",
        "warning": f"Fit to train, with {counts[1]}",
    }.get(found.verdict, "Fit to train")
    ranks = f", {many(found.ranks, 'rank')} on {many(len(found.node_names), 'node')}" if found.ranks > 1 else ""
    result = [f"{said} ({many(tried, 'check')}{ranks}, {duration(found.seconds)})"]
    for one in sorted(bad, key=lambda one: one.state != "failure"):
        result += ["", f"{SIGNS[one.state]}  {one.check}: {one.found}", f"  {one.advice}"]
    result.append("")
    width = max(len(one.check) for one in found.findings)
    result += [f"{SIGNS[one.state]:<8} {one.check:<{width}}  {one.found}" for one in found.findings]
    if len(found.node_names) > 1:
        result += ["", *(f"node {number} = {name}" for number, name in enumerate(found.node_names))]
    return result
