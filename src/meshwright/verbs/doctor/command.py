"""`meshwright doctor`: check whether this machine, or this cluster, is fit to train."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.spec.units import duration, many

if TYPE_CHECKING:
    from meshwright.verbs.doctor.answer import Examination

SIGNS = {"ok": "ok", "warning": "WARNING", "failure": "FAILURE", "skipped": "skipped"}


def doctor(
    folder: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Folder of runs.")] = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Finish in seconds: start no processes and train nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON document.")] = False,
) -> None:
    """Check whether this machine is fit to train, in about two minutes.

    It checks versions, memory, disk, GPUs, kernels, links, every pipeline schedule, a checkpoint and a real step. Every
    problem comes with advice; exit code 1 where training would fail. Under torchrun it checks all ranks and their
    links, and names the slow ones. The output of --json can be sent to others: it holds no names of machines or people.
    """
    from meshwright.interface.process.environment import processes, rank
    from meshwright.interface.process.launch import joined

    with joined():
        from meshwright.interface.terminal.screen_text import print_json
        from meshwright.parallel.groups.group import Group
        from meshwright.verbs.doctor.answer import examine

        world = None
        if processes() > 1:
            import torch.distributed as dist

            world = Group("world", tuple(range(processes())), rank(), dist.group.WORLD)
        examination = examine(folder, world=world, quick=quick, say=_progress)
        if rank() == 0 and json:
            print_json(examination.document())
        elif rank() == 0:
            print("\n".join(lines(examination)), flush=True)
    if examination.verdict == "failure":
        raise typer.Exit(1)


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name} ...", end="", file=sys.stderr, flush=True)


def lines(examination: "Examination") -> list[str]:
    """Return the report for people: verdict, problems with advice, then every check."""
    if sys.stderr.isatty():  # erase the line of progress
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    bad = [finding for finding in examination.findings if finding.state in ("failure", "warning")]
    failures = sum(finding.state == "failure" for finding in bad)
    tried = sum(finding.state != "skipped" for finding in examination.findings)
    counts = [many(failures, "failure"), many(len(bad) - failures, "warning")]
    verdict = {
        "failure": f"NOT fit to train: {', '.join(counts)}",
        "warning": f"Fit to train, with {counts[1]}",
    }.get(examination.verdict, "Fit to train")
    ranks = (
        f", {many(examination.ranks, 'rank')} on {many(len(examination.node_names), 'node')}"
        if examination.ranks > 1
        else ""
    )
    lines = [f"{verdict} ({many(tried, 'check')}{ranks}, {duration(examination.seconds)})"]
    for finding in sorted(bad, key=lambda finding: finding.state != "failure"):
        lines += ["", f"{SIGNS[finding.state]}  {finding.check}: {finding.observation}", f"  {finding.advice}"]
    lines.append("")
    width = max(len(finding.check) for finding in examination.findings)
    lines += [
        f"{SIGNS[finding.state]:<8} {finding.check:<{width}}  {finding.observation}" for finding in examination.findings
    ]
    if len(examination.node_names) > 1:
        lines += ["", *(f"node {number} = {name}" for number, name in enumerate(examination.node_names))]
    return lines
