"""`meshwright quickstart`: from nothing to a small model of Python, in about three minutes on a laptop."""

import time
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.process.invocation import command

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.api.trained_model import TrainedModel
    from meshwright.spec import Plan
    from meshwright.train.watch import Summary

PLAN = Path(__file__).with_name("quickstart.yaml")
RUN = "runs/quickstart"
PROMPT = "def "
SAMPLE_TOKENS = 160
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 0
LEFT = {
    "plan.yaml": "what was run; train it again with it",
    "metrics.jsonl": "every step: loss, gradient norm, rate, tokens/s",
    "loss.png": "the loss curve",
    "checkpoints/": "weights, optimizer and random states: resume=auto goes on from here",
    "hf/": "the model for transformers, vLLM, llama.cpp",
}


def quickstart(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to its plan.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON document.")] = False,
) -> None:
    """Train a small model on Python's own source, here and now: no arguments, no network, about three minutes.

    Leaves a run folder with metrics, loss plot, checkpoint and Hugging Face directory. The plan can be changed as for
    train: recipe.steps=100 data=./texts.
    """
    from meshwright import planfile

    began = time.monotonic()
    plan = planfile.read(PLAN, [f"run={RUN}", *(words or ())])
    if not any(word.startswith("run=") for word in words or ()):
        plan = replace(plan, run=str(free_folder(Path(plan.run))))
    plan.check()

    from meshwright.cli.process.failure import INTERRUPTED
    from meshwright.cli.terminal.output import console, print_json

    people = console(json=json)
    outcome = run(plan, people)
    if isinstance(outcome, str):
        people.print(f"\nSaved. Go on with:\n  {_longer(plan, plan.recipe.steps)}", markup=False, soft_wrap=True)
        if outcome == "interrupted":
            raise typer.Exit(INTERRUPTED)
    elif json:
        print_json({"run": plan.run, "seconds": time.monotonic() - began, **asdict(outcome)})
    else:
        farewell(people, plan, outcome, time.monotonic() - began)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or with the first of -2, -3 ... that is not taken."""
    tries = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return wanted if not wanted.exists() else next(path for path in tries if not path.exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a finished quickstart has to show."""

    bits_per_byte: float | None
    """On held-out text; None where nothing was held out."""
    before: str
    """What the untrained model makes of the prompt."""
    after: str
    summary: "Summary"


def run(plan: "Plan", people: "Console") -> Outcome | str:
    """Encode, sample, train, sample, export; or the word of Summary.stopped where it was ended before, and saved."""
    from meshwright.api import training_run
    from meshwright.api.trained_model import TrainedModel, load
    from meshwright.cli.terminal.display import choose
    from meshwright.cli.verbs.export import write_directory
    from meshwright.data import prepare
    from meshwright.model import build

    with choose(people) as display:
        people.print(_opening(plan), markup=False)
        tokenizer = prepare(plan.data, progress=display.encoding).tokenizer
        model = build(plan.model, seed=plan.recipe.seed)
        fresh = TrainedModel(model=model, tokenizer=tokenizer, tokenizer_file="", plan=plan, stop_ids=())
        before = sample(fresh)
        show(people, "Before training", before, 6)
        summary = training_run.run(plan, watchers=[display]).summary
    if summary.stopped != "done":
        return summary.stopped
    opened = load(Path(plan.run), None)
    after = sample(opened)
    show(people, "After training", after, 18)
    write_directory(Path(plan.run), Path(plan.run) / "hf")
    return Outcome(bits_per_byte=summary.bits_per_byte, before=before, after=after, summary=summary)


def sample(opened: "TrainedModel") -> str:
    """The prompt and what the model makes of it."""
    assert opened.tokenizer is not None
    found = opened.generate(PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED)
    return PROMPT + opened.tokenizer.decode(token for token in found.ids if token not in opened.stop_ids)


def show(people: "Console", title: str, text: str, most_lines: int) -> None:
    """A sample in its frame; coloured like Python on a terminal."""
    from rich.padding import Padding
    from rich.syntax import Syntax
    from rich.text import Text

    from meshwright.cli.terminal.streaming import printable

    lines = printable(text).rstrip().splitlines()[:most_lines]
    body = "\n".join(lines)
    colours = Syntax(body, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    people.print(f"\n{title}, the model continues [bold]{PROMPT.strip()}[/bold] like this:")
    if people.is_terminal:
        people.print(Padding(colours, (0, 0, 0, 4)))
    else:
        people.print(Text(indent(body, "    ")))
    people.print()


def farewell(people: "Console", plan: "Plan", outcome: Outcome, seconds: float) -> None:
    """What was reached, where it lies, and three commands to go on with."""
    from meshwright.spec.units import duration

    if outcome.bits_per_byte is not None:
        found = f"[bold]{outcome.bits_per_byte:.3f} bits per byte[/bold]"
        people.print(f"{found} on held-out text, after {duration(seconds)} in all.")
    people.print(f"\n{plan.run} holds:", markup=False)
    for name, what in LEFT.items():
        people.print(f"  {name:<14} [dim]{what}[/dim]")
    from meshwright.api.foresight import hindsight

    for line in hindsight(Path(plan.run)):
        people.print(line, markup=False, soft_wrap=True)
    people.print("\nGo on:")
    for line, what in commands(plan):
        people.print(f"  [dim]# {what}[/dim]")
        people.print(f"  {line}", markup=False, soft_wrap=True)


def commands(plan: "Plan") -> list[tuple[str, str]]:
    """(command, what it does); they work as they stand, from this folder."""
    return [
        (command(["generate", plan.run, "--prompt", "class "]), "write with the model"),
        (_longer(plan, 4 * plan.recipe.steps), "train it four times as long, from where it is"),
        (command(["init"]) + " > plan.yaml", "a commented plan; then: train plan.yaml data=FOLDER_OF_TEXTS"),
    ]


def _longer(plan: "Plan", steps: int) -> str:
    return command(["train", f"{plan.run}/plan.yaml", f"recipe.steps={steps}", "resume=auto"])


def _opening(plan: "Plan") -> str:
    from meshwright.data.sources import Source
    from meshwright.spec.units import MIB
    from meshwright.train.device import pick_device, title

    source = Source(plan.data)
    size = sum(path.stat().st_size for path in source.files)
    found = f"{title(pick_device())} and the {source.title}, {size / MIB:.1f} MiB of text"
    return f"Found {found}. Nothing leaves this machine."
