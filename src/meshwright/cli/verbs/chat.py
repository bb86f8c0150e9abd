"""`meshwright chat`: a conversation with a model, in the terminal."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.engine_arguments import OneAdapter, check_adapter
from meshwright.spec.errors import MeshwrightError, PlanError, RunError

if TYPE_CHECKING:
    from meshwright.api.dialogue import Dialogue, TurnFigures
    from meshwright.api.trained_model import TrainedModel

RESET, QUIT = "/reset", "/quit"
MARK = "> "
"""Before what a user types."""


def chat(
    model: Annotated[
        Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="Run folder, Hugging Face directory or .gguf file.")
    ],
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="What the model reads before all turns.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens per answer.")] = 512,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Above 1 bolder, below 1 safer.  [default: 0.8]")] = None,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that together reach p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="WHICH", help="Of a run: last, best by held-out loss, or a step.")
    ] = "last",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, as stored on a GPU.")] = "auto",
    adapter: OneAdapter = None,
) -> None:
    """Talk with a model by its chat template. /reset begins anew, /quit ends, Ctrl-C stops an answer."""
    from meshwright.cli.verbs.generate import chosen_temperature

    heat = chosen_temperature(greedy, temperature)
    if max_new_tokens < 1:
        raise PlanError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    check_adapter(adapter)

    from meshwright.serve.request_options import RequestOptions
    from meshwright.store.model_place import check_model

    check_model(model, dtype=dtype, checkpoint=checkpoint)
    options = RequestOptions(
        max_new_tokens=max_new_tokens, temperature=heat, top_k=top_k, top_p=top_p, seed=seed
    )  # fmt: skip
    from meshwright.api.dialogue import Dialogue  # loads torch
    from meshwright.api.model_opening import load

    opened = load(model, dtype, checkpoint=checkpoint)
    say_of_template(opened)
    talk(Dialogue(opened, options, system=system, adapter=adapter))


def say_of_template(model: "TrainedModel") -> None:
    """One line on stderr where a tokenizer came without a chat template, and the default one is taken."""
    if model.tokenizer is not None and not model.tokenizer.chat_template:
        print(
            f"{model.path} has no chat template: turns begin with '### user', which a model without fine-tuning on "
            "conversations has not learned", file=sys.stderr,
        )  # fmt: skip


def talk(conversation: "Dialogue") -> None:
    """Read turns until they end; without a terminal a turn is a line."""
    people = sys.stdin.isatty()
    if people:
        print(f"{RESET} begins anew, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    while (said := _read(people)) is not None and said != QUIT:
        if said == RESET:
            conversation.reset()
        elif said.startswith("/"):
            print(f"{said.split()[0]} is not known: there are {RESET} and {QUIT}", file=sys.stderr)
        elif said:
            _answer(conversation, said)


def _read(people: bool) -> str | None:
    """The next turn; empty where Ctrl-C took it back, None at the end."""
    try:
        if people:
            return input(MARK).strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        if not people:
            raise
        print(f"\n{QUIT} or Ctrl-D ends", file=sys.stderr)
        return ""


def _answer(conversation: "Dialogue", said: str) -> None:
    """Print an answer as it grows, then what it cost. What cannot be answered is said, and the next turn read."""
    from meshwright.cli.terminal.streaming import printable

    safe = printable if sys.stdout.isatty() else str
    pieces = conversation.say(said)
    before = conversation.last
    try:
        for piece in pieces:
            print(safe(piece), end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # a generator
    except MeshwrightError as error:
        if isinstance(error, RunError):
            raise
        print(f"{error}; {RESET} begins anew", file=sys.stderr)
    if conversation.last is not None and conversation.last is not before:
        print(flush=True)
        print(cost(conversation.last), file=sys.stderr)


def cost(last: "TurnFigures") -> str:
    """One line on a turn."""
    stopped = {"length": ", stopped at --max-new-tokens or the model's last position", "cancelled": ", stopped"}
    return (
        f"[first token {last.first_seconds:.2f} s; {last.cached:,} of {last.prompt:,} prompt tokens were cached; "
        f"{last.tokens:,} new{stopped.get(last.ending, '')}]"
    )
