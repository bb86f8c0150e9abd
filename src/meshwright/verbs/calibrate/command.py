"""`meshwright calibrate`: measure this machine for the planner, as a cluster file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.spec.units import duration

if TYPE_CHECKING:
    from meshwright.planner.machine.clusterfile import ClusterFile


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.toml", help="File to write; without it the text is printed."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure a few sizes in seconds and no training steps, as a trial.")
    ] = False,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="Measure nothing: learn from the steps of this run. Repeatable."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="File that --from corrects.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Measure this machine in about a minute, and write a cluster file for the planner.

    It measures products, memory, attention, exchanges, and real steps of small plans. `meshwright plan MODEL --cluster
    FILE.toml` reads the file. Measure while nothing else runs.
    """
    from meshwright.interface.answers.answer import check_parent
    from meshwright.interface.process.environment import processes
    from meshwright.store.durable import refuse_unwritable

    # Measuring takes a minute: check the arguments before.
    if processes() > 1:
        raise PlanError("calibrate starts its processes itself: run it without torchrun")
    if out is not None:
        if out.suffix != ".toml" or out.is_dir():
            file = argument("out", out.with_suffix(".toml"))
            raise ArgumentError("out", out, remedy=f"name a file that ends in .toml, as {file}")
        check_parent(out, "out")
        refuse_unwritable(out.parent, "out")
    if bool(runs) != bool(cluster):
        raise PlanError("--from RUN and --cluster FILE.toml belong together: runs correct a cluster file")
    from meshwright.planner.machine.clusterfile import text
    from meshwright.store.durable import replace_file, report_in_one_line

    machine = _learned(cluster, runs) if cluster and runs else _measured(quick)
    if out is not None:
        with report_in_one_line(out, argument("out")):
            replace_file(out, text(machine).encode())
    if json:
        import tomllib

        from meshwright.interface.terminal.screen_text import print_json

        print_json(tomllib.loads(text(machine)))
    elif out is None:
        print(text(machine), end="")
    else:
        print(
            f"{out}: {machine.device.name}; meshwright plan MODEL --cluster {out}x{machine.devices_per_node} reads it"
        )


def _measured(quick: bool) -> "ClusterFile":
    from dataclasses import replace

    from meshwright.verbs.calibrate.campaign import calibrate as measure
    from meshwright.verbs.calibrate.engine_rates import QUICK, engine_rates

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    machine = measure(quick=quick, say=say)
    if machine.device.is_gpu:
        return machine
    say("steps of the serving engine")
    return replace(machine, serving=engine_rates(QUICK if quick else None))


def _learned(cluster: Path, runs: list[Path]) -> "ClusterFile":
    """Correct a cluster file by runs, and print the predicted step time of each run before and after."""
    from meshwright.planner.machine.clusterfile import load
    from meshwright.verbs.calibrate.feedback import learn

    before = load(cluster)
    after, seen = learn(before, runs)
    for run, (plan, seconds) in zip(runs, seen, strict=True):
        earlier, now = (machine.estimator(plan).predict(plan).step_s for machine in (before, after))
        print(
            f"{run}: a step took {duration(seconds)}; predicted {duration(earlier)} before, {duration(now)} now",
            file=sys.stderr,
        )
    return after
