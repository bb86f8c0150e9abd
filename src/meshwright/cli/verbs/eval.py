"""`meshwright eval`: loss, perplexity and bits per byte of a model on a text."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec.errors import PlanError


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="Run folder or Hugging Face directory.")],
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Text, all of it; without it the run's held-out part.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; without it as it was trained.")] = None,
    sequences: Annotated[int, typer.Option(help="At most so many windows of the text; 0 = all.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Score a model on held-out text: nats per token, perplexity, bits per byte."""
    if sequences < 0:
        raise PlanError(f"--sequences {sequences} must be 0 (all) or more")
    from meshwright.api.trained_model import load
    from meshwright.cli.terminal import fields
    from meshwright.cli.terminal.output import print_json

    found = load(model, dtype).evaluate(data, sequences=sequences)
    if json:
        figures = ("loss", "perplexity", "bits_per_byte", "tokens", "seconds")
        print_json({name: getattr(found, name) for name in figures})
    else:
        print(fields.held_out(found))
