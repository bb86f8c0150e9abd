"""`plan --for STACK` and `plan --from FILE`: layouts and configurations of other training software."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.api.config_planning import ConfigAnswer
    from meshwright.api.planning import PlanAnswer

AskedStack = Annotated[
    str,
    typer.Option(
        "--for", metavar="STACK", show_default=False,
        help="Search layouts of this training software: torchtitan, megatron-lm, accelerate, "
        "deepspeed, trl, axolotl, nanotron, nemo, maxtext.",
    ),
]  # fmt: skip
AskedFrom = Annotated[
    str,
    typer.Option(
        "--from", metavar="FILE|FOLDER", show_default=False,
        help="Read a configuration of such software: does it fit, what makes it fit, what is faster.",
    ),
]  # fmt: skip
AskedOutputFolder = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", "--output", metavar="FOLDER", help="With --for: folder for its configuration and launch scripts."
    ),
]


def check_folder(folder: Path | None, stack: str) -> None:
    """Raise PlanError, before the search, for an output folder that cannot be written."""
    from meshwright.spec.errors import PlanError

    if folder is None:
        return
    if stack in ("", "meshwright"):
        raise PlanError("--out is for --for STACK: take --save FILE for a plan of this package's engine")
    if folder.is_file():
        raise PlanError(f"--out {folder} is a file: name a folder")


def after_plan(answer: "PlanAnswer", written: list[Path]) -> Iterator[str]:
    """Yield what follows the layouts of another software: errors of its figures, and the files written."""
    from meshwright.cli.terminal.screen_text import width, wrapped

    assert answer.software is not None
    yield ""
    yield f"  Counted as {answer.software.title}"
    for sentence in answer.known_errors or ("No published row of it was scored.",):
        yield from wrapped(sentence, width(), "    ")
    if not written:
        yield ""
        yield from wrapped("-o FOLDER (its configuration, launch.sh, launch.sbatch)", width(), "  Next:  ")
        return
    folder, launch = written[0].parent, answer.software.launch(answer.plan)
    yield ""
    yield from wrapped(f"Written to {folder}: {', '.join(path.name for path in written)}.", width(), "  ")
    if launch.yours:
        yield from wrapped(f"Yours to set: {', '.join(launch.yours)}.", width(), "  ")
    yield f"  Command: cd {shlex.quote(str(folder))} && sbatch launch.sbatch, or on each node bash launch.sh"


def print_config(answer: "ConfigAnswer", *, details: bool, json: bool) -> None:
    """Print the answer to --from. Raises DoesNotFit, with its exit code, for a configuration that does not fit."""
    from meshwright.cli.terminal.output import print_json
    from meshwright.cli.terminal.screen_text import show
    from meshwright.planner.step.prediction import usable_bytes
    from meshwright.spec.errors import DoesNotFit
    from meshwright.spec.units import short_gib

    if json:
        print_json(answer.to_dict())
    else:
        show(_config_lines(answer, details=details))
    if not answer.fits:
        peak, room = answer.prediction.peak_bytes, usable_bytes(answer.plan)
        bounds = answer.config.bounds
        need = f"needs {'at most ' * bool(bounds)}{short_gib(peak)} per device; {short_gib(room)} is usable"
        if bounds:
            raise DoesNotFit(
                f"does not fit as counted: {need}; settings that are not counted need less memory, so it may fit"
            )
        raise DoesNotFit(f"does not fit: {need}")


def _config_lines(answer: "ConfigAnswer", *, details: bool) -> Iterator[str]:
    from meshwright.cli.terminal.plan_answer import configuration, headline
    from meshwright.cli.terminal.screen_text import width, wrapped
    from meshwright.planner import explain
    from meshwright.planner.step.prediction import usable_bytes
    from meshwright.spec.units import short_gib
    from meshwright.stacks.stack_errors import sentences

    columns, prediction = width(), answer.prediction
    yield from headline(answer.plan)
    yield ""
    yield from configuration(prediction)
    yield ""
    if not answer.fits:
        kind, _ = explain.largest_kind(prediction)
        need, room = short_gib(prediction.peak_bytes), short_gib(usable_bytes(answer.plan))
        most = "at most " * bool(answer.config.bounds)
        yield from wrapped(f"This will need {most}{need} of {room} (most of it {kind}).", columns, "  ")
        for change in answer.fixes:
            cost = change.prediction.step_s / prediction.step_s - 1
            paid = f"costs {cost:.0%}" if cost >= 0.005 else "is as fast" if cost > -0.005 else f"is {-cost:.0%} faster"
            options = answer.options(change.prediction.plan)
            yield from wrapped(
                f"`{options}` fits ({short_gib(change.prediction.peak_bytes)}) and {paid}.", columns, "  "
            )
        if not answer.fixes:
            yield "  No single change of the layout makes it fit."
    yield from _better(answer)
    for sentence in sentences(answer.software):
        yield from wrapped(sentence, columns, "  ")
    for sentence in (*answer.config.bounds, *answer.config.uncounted):
        yield from wrapped(sentence, columns, "  ! ")
    if answer.config.unknown:
        yield from wrapped(f"Not known here, and may matter: {', '.join(answer.config.unknown)}.", columns, "  ! ")
    if details and answer.config.ignored:
        yield from wrapped(
            f"Ignored, changes neither memory nor time: {', '.join(answer.config.ignored)}.", columns, "  "
        )


def _better(answer: "ConfigAnswer") -> Iterator[str]:
    from meshwright.cli.terminal.screen_text import width, wrapped
    from meshwright.spec.units import short_gib, step_time

    best = answer.best
    if best is None:
        yield f"  No layout of {answer.software.word} fits these devices."
        return
    ratio = answer.prediction.step_s / best.step_seconds
    if not answer.fits:
        fastest = f"The fastest layout that fits takes {step_time(best.step_seconds)} per step"
        lead = f"{fastest} ({short_gib(best.peak_bytes)}): "
        yield from wrapped(f"{lead}{answer.options(best.plan)}", width(), "  ")
        return
    if best.plan.layout == answer.plan.layout or (ratio < 1.005):
        yield f"  No layout of {answer.software.word} on these devices is predicted to be faster."
        return
    lead = f"The best layout on the same devices is {ratio:.2f} times as fast ({short_gib(best.peak_bytes)}): "
    yield from wrapped(f"{lead}{answer.options(best.plan)}", width(), "  ")
