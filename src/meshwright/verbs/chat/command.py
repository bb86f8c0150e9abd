"""`meshwright chat`: a conversation with a model, in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface import options as asked
from meshwright.interface.terminal.screen_text import printable
from meshwright.spec.errors import ArgumentError, MeshwrightError, RunError

if TYPE_CHECKING:
    from meshwright.verbs.chat.answer import Dialogue, TurnFigures

RESET, QUIT = "/reset", "/quit"
MARK = "> "
"""Prompt before what the user types."""


def chat(
    model: asked.ModelPath,
    system: Annotated[str, typer.Option(metavar="TEXT", help="Text that precedes all turns.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 512,
    greedy: asked.Greedy = False,
    temperature: asked.Temperature = None,
    top_k: asked.TopK = 0,
    top_p: asked.TopP = 1.0,
    seed: asked.Seed = 0,
    checkpoint: asked.Checkpoint = "last",
    dtype: asked.ServedDtype = "auto",
    adapter: asked.Adapter = None,
) -> None:
    """Talk with a model by its chat template. /reset begins anew, /quit ends, Ctrl-C stops an answer."""
    chosen_temperature = asked.chosen_temperature(greedy, temperature)
    if max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1")
    asked.check_adapter(adapter)

    from meshwright.serving.engine.answers.request_options import RequestOptions
    from meshwright.store.run_folder import check_model

    check_model(model, dtype=dtype, checkpoint=checkpoint)
    options = RequestOptions(
        max_new_tokens=max_new_tokens, temperature=chosen_temperature, top_k=top_k, top_p=top_p, seed=seed
    )  # fmt: skip
    from meshwright.interface.trained.opening import load
    from meshwright.interface.trained.trained_model import warn_of_missing_template
    from meshwright.verbs.chat.answer import Dialogue  # loads torch

    opened = load(model, dtype, checkpoint=checkpoint)
    warn_of_missing_template(opened)
    talk(Dialogue(opened, options, system=system, adapter=adapter))


def talk(conversation: "Dialogue") -> None:
    """Answer turns until they end. Without a terminal, each line is a turn."""
    people = sys.stdin.isatty()
    if people:
        print(f"{RESET} begins anew, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    while (turn := _read(people)) is not None and turn != QUIT:
        if turn == RESET:
            conversation.reset()
        elif turn.startswith("/"):
            print(f"{turn.split()[0]} is not known: use {RESET} or {QUIT}", file=sys.stderr)
        elif turn:
            _answer(conversation, turn)


def _read(people: bool) -> str | None:
    """Return the next turn: empty after Ctrl-C, None at the end."""
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


def _answer(conversation: "Dialogue", turn: str) -> None:
    """Print an answer as it grows, then its cost. Errors of one turn are printed, and the next turn is read."""
    safe = printable if sys.stdout.isatty() else str
    pieces = conversation.say(turn)
    before = conversation.last
    try:
        for piece in pieces:
            print(safe(piece), end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # a generator
    except MeshwrightError as error:
        if isinstance(error, RunError):
            raise
        from meshwright.verbs.commands import option_writer

        # The error marks arguments of Python, and here people know options.
        print(f"{error.written(option_writer(['chat']))}; {RESET} begins anew", file=sys.stderr)
    if conversation.last is not None and conversation.last is not before:
        print(flush=True)
        print(cost(conversation.last), file=sys.stderr)


def cost(last: "TurnFigures") -> str:
    """Describe the cost of a turn in one line."""
    stopped = {"length": ", stopped at --max-new-tokens or the model's last position", "cancelled": ", stopped"}
    return (
        f"[first token {last.first_seconds:.2f} s; {last.cached:,} of {last.prompt:,} prompt tokens were cached; "
        f"{last.tokens:,} new{stopped.get(last.ending, '')}]"
    )
