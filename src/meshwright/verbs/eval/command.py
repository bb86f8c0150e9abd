"""`meshwright eval`: score a model on held-out text or on tasks, alone or against another one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.options import Checkpoint, ModelPath, named_adapters
from meshwright.interface.terminal.screen_text import aligned, coloured, plus_minus, width, wrapped

if TYPE_CHECKING:
    from meshwright.verbs.eval.answer import EvaluationAnswer

COLOURS = {"better": "green", "worse": "red", "changed": "yellow"}


def evaluate(
    model: ModelPath,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Text to score in full. [default: the held-out part of the run]")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Task of lm-evaluation-harness (YAML), or a folder of them."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN_OR_HF_DIR", help="Model to compare with; differences are paired by item."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR", help="Adapter to compare with the model: a PEFT folder, or a run. Repeatable."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most items of each task.  [default: all]")] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before each item.  [default: as the task says]")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Write prompts with the model's chat template.")] = False,
    checkpoint: Checkpoint = "last",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.  [default: as trained]")] = None,
    sequences: Annotated[int, typer.Option(help="Most windows of the text; 0 = all.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Score a model on held-out text or tasks. With --against, say what changed, and whether beyond noise."""
    from meshwright.interface.terminal.screen_text import print_answer
    from meshwright.verbs.eval.request import check_request

    adapters = named_adapters(adapter, "")
    check_request(
        model, tasks=tasks or (), against=against, adapters=adapters, data=data, dtype=dtype, sequences=sequences,
        limit=limit, shots=shots, checkpoint=checkpoint,
    )  # fmt: skip
    # One model on text needs neither the harness nor paired statistics.
    if not tasks and against is None and not adapter:
        _held_out(model, data, dtype, sequences, checkpoint, json=json)
        return
    from meshwright.verbs.eval.answer import evaluate as compare_models

    with _progress() as progress:
        answer = compare_models(
            model, tasks=tasks or (), against=against, adapters=adapters, data=data,
            dtype=dtype, sequences=sequences, limit=limit,
            shots=shots, chat=chat, checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
    print_answer(answer, _lines(answer), json=json)


def _held_out(model: Path, data: str | None, dtype: str | None, sequences: int, checkpoint: str, *, json: bool) -> None:
    """Score one model on text: nats per token, perplexity, bits per byte, and the loss of each role."""
    from meshwright.interface.terminal import fields
    from meshwright.interface.terminal.screen_text import print_json
    from meshwright.interface.trained.opening import load

    metrics = load(model, dtype, checkpoint=checkpoint).evaluate(data, sequences=sequences)
    if json:
        figures = ("loss", "perplexity", "bits_per_byte", "tokens", "seconds", "roles")
        print_json({name: getattr(metrics, name) for name in figures if getattr(metrics, name) is not None})
    else:
        print(fields.held_out(metrics))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from meshwright.interface.terminal.screen_text import console

    out = console(json=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, wanted: bar.update(task, completed=done, total=wanted)


def _lines(answer: "EvaluationAnswer") -> Iterator[str]:
    """Yield all lines for tasks or two models: what changed beyond noise, then every figure with its error."""
    if answer.against is not None:
        word = "BETTER" if answer.counted("better") else "NOT BETTER"
        colour = "red" if answer.counted("worse") else "green" if answer.counted("better") else "yellow"
        yield f"{coloured(word, colour)}  {answer.headline}"
        alone = answer.run != answer.against
        yield (
            f"after {answer.run}, before {answer.against}" if alone else f"before {answer.run}, after with each adapter"
        )
        yield ""
    yield from _table(answer)
    yield ""
    noise = "± is the standard error over items."
    if answer.against is not None:
        noise += " Differences are paired by item; one is within noise if its 95% interval contains 0."
    yield from wrapped(plus_minus(noise), width())


def _table(answer: "EvaluationAnswer") -> Iterator[str]:
    from meshwright.verbs.eval.answer import cells

    rows = [answer.head, *(tuple(cells(figure)) for figure in answer.figures)]
    texts = rows[0].index("metric") + 1
    rows = [tuple(map(plus_minus, row)) for row in rows]
    for number, line in enumerate(aligned(rows, left=texts)):
        verdict = answer.figures[number - 1].verdict if number else None
        colour = COLOURS.get(verdict or "")
        yield line.replace(str(verdict), coloured(str(verdict), colour)) if colour else line
