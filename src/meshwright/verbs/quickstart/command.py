"""`meshwright quickstart`: from nothing to a small model of Python, in about three minutes on a laptop."""

import re
import time
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.process.launch import command
from meshwright.interface.terminal.screen_text import printable
from meshwright.spec import Plan
from meshwright.spec.units import MIB, duration, many

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.data import Corpus
    from meshwright.interface.trained.trained_model import TrainedModel
    from meshwright.training.step.watch import Summary

PLAN = Path(__file__).with_name("quickstart.yaml")
RUN = "runs/quickstart"
SAMPLE_TOKENS = 160
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 0
HEADS = re.compile(r"^(?:async def|def|class) .+:$", re.MULTILINE)
"""Lines of source code that open a definition."""
READ_TOKENS = 20_000
"""Tokens of the held-out text that are searched for a prompt."""
PROMPT_WORDS = 3


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
    from meshwright.data.preparation import check_sources
    from meshwright.store.durable import refuse_unwritable

    began = time.monotonic()
    plan = planfile.read(PLAN, [f"run={RUN}", *(words or ())])
    if not any(word.startswith("run=") for word in words or ()):
        plan = replace(plan, run=str(free_folder(Path(plan.run))))
    # Check everything before torch is imported, which takes seconds.
    plan.check()
    refuse_unwritable(Path(plan.run))
    check_sources(plan.data)

    from meshwright.interface.process.failure import INTERRUPTED
    from meshwright.interface.terminal.screen_text import console, print_json

    people = console(json=json)
    outcome = run(plan, people)
    if isinstance(outcome, str):
        people.print(f"\nSaved; to continue:\n  {_longer(plan, plan.recipe.steps)}", markup=False, soft_wrap=True)
        if outcome == "interrupted":
            raise typer.Exit(INTERRUPTED)
    elif json:
        document = {key: value for key, value in asdict(outcome).items() if key != "prompt"}
        print_json({"run": plan.run, "seconds": time.monotonic() - began, **document})
    else:
        farewell(people, plan, outcome, time.monotonic() - began)


def free_folder(wanted: Path) -> Path:
    """Return `wanted`, or the first of wanted-2, wanted-3 ... that does not exist."""
    tries = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return wanted if not wanted.exists() else next(path for path in tries if not path.exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartResult:
    """Outcome of a finished quickstart."""

    bits_per_byte: float | None
    """On held-out text. None = nothing was held out."""
    prompt: str
    """Start of a held-out text."""
    before: str
    """Continuation of the prompt by the untrained model."""
    after: str
    summary: "Summary"


def run(plan: "Plan", people: "Console") -> QuickstartResult | str:
    """Encode, sample, train, sample, export. Returns Summary.stopped for a run that was ended early and saved."""
    people.print(_opening(plan), markup=False)  # before torch is imported, which takes seconds
    from meshwright.data import prepare
    from meshwright.interface.trained.opening import load
    from meshwright.interface.trained.trained_model import TrainedModel
    from meshwright.model import build
    from meshwright.verbs.export.answer import write_directory
    from meshwright.verbs.train.answer import run as run_plan
    from meshwright.verbs.train.display import choose

    with choose(people) as display:
        corpus = prepare(plan.data, progress=display.encoding)
        tokenizer, prompt = corpus.tokenizer, first_words(corpus)
        model = build(plan.model, seed=plan.recipe.seed)
        fresh = TrainedModel(model=model, tokenizer=tokenizer, tokenizer_file="", plan=plan, stop_ids=())
        before = sample(fresh, prompt)
        show(people, "Before training", prompt, before, 6)
        summary = run_plan(plan, watchers=[display]).summary
    if summary.stopped != "done":
        return summary.stopped
    opened = load(Path(plan.run), None)
    after = sample(opened, prompt)
    show(people, "After training", prompt, after, 18)
    write_directory(Path(plan.run), Path(plan.run) / "hf")
    return QuickstartResult(
        bits_per_byte=summary.bits_per_byte, prompt=prompt, before=before, after=after, summary=summary
    )


def first_words(corpus: "Corpus") -> str:
    """Return a prompt from the data: the first definition of source code, else the first words.

    They are of the held-out text, or of the training text when nothing is held out; of a mixture, of its first source.
    """
    stream = (corpus.validation if corpus.validation.num_tokens else corpus.train).parts[0]
    marks = {corpus.tokenizer.bos, corpus.tokenizer.eos}
    ids = [token for token in stream.read(0, min(READ_TOKENS, stream.num_tokens)).tolist() if token not in marks]
    text = printable(corpus.tokenizer.decode(ids))
    head = HEADS.search(text)
    return head[0] if head else " ".join(text.split()[:PROMPT_WORDS])


def sample(opened: "TrainedModel", prompt: str) -> str:
    """Return the prompt and its continuation."""
    assert opened.tokenizer is not None
    generated = opened.generate(prompt, max_new_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED)
    return prompt + opened.tokenizer.decode(token for token in generated.ids if token not in opened.stop_ids)


def show(people: "Console", title: str, prompt: str, text: str, most_lines: int) -> None:
    """Print a sample in a frame, coloured as Python on a terminal."""
    from rich.padding import Padding
    from rich.syntax import Syntax
    from rich.text import Text

    lines = printable(text).rstrip().splitlines()[:most_lines]
    body = "\n".join(lines)
    colours = Syntax(body, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    people.print(f"\n{title} the model continues a line of the held-out text, {prompt}", markup=False, soft_wrap=True)
    if people.is_terminal:
        people.print(Padding(colours, (0, 0, 0, 4)))
    else:
        people.print(Text(indent(body, "    ")))
    people.print()


def farewell(people: "Console", plan: "Plan", outcome: QuickstartResult, seconds: float) -> None:
    """Print the outcome, one line on memory, and three commands to go on with."""
    from meshwright.verbs.train.preflight import memory_summary

    quality = f"{outcome.bits_per_byte:.3f} bits per byte on held-out text" if outcome.bits_per_byte is not None else ""
    summary = f"Trained {many(outcome.summary.step, 'step')} in {duration(seconds)}{': ' if quality else ''}{quality}."
    memory = memory_summary(Path(plan.run), outcome.summary)
    for line in [summary, *([memory] if memory else []), "", "Next"]:
        people.print(line, markup=False)
    for line, comment in commands(plan, outcome.prompt):
        people.print(f"  {line}", markup=False, soft_wrap=True, end="")
        people.print(f"  [dim]# {comment}[/dim]" if comment else "", soft_wrap=True)


def commands(plan: "Plan", prompt: str) -> list[tuple[str, str]]:
    """Return (command, comment) pairs. The commands work from this folder as they are."""
    return [
        (command(["generate", plan.run, "--prompt", prompt]), ""),
        (command(["report", plan.run]), "curves, memory, timeline in the browser"),
        (_longer(plan, 4 * plan.recipe.steps), "four times as long"),
    ]


def _longer(plan: "Plan", steps: int) -> str:
    return command(["train", f"{plan.run}/plan.yaml", f"recipe.steps={steps}", "resume=auto"])


def _opening(plan: "Plan") -> str:
    from meshwright.data.text.sources import Source

    sources = [Source(data) for data in plan.data.sources or (plan.data,)]
    size = sum(path.stat().st_size for source in sources for path in source.files)
    names = ", ".join(source.title for source in sources)
    return f"Found the {names}, {size / MIB:.1f} MiB of text. Nothing leaves this machine."
