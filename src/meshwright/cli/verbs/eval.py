"""`meshwright eval`: loss, perplexity and bits per byte of a model on a text."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.cli.inputs.trained_model import Opened
    from meshwright.data import TokenStream
    from meshwright.train.watch import EvalMetrics

LONGEST = 2048
"""Tokens of a window for a Hugging Face directory, which does not say what length it was trained with."""
ROWS_TOKENS = 8192
"""Tokens of one forward pass."""


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
    from meshwright.spec.errors import PlanError

    if sequences < 0:
        raise PlanError(f"--sequences {sequences} must be 0 (all) or more")
    from meshwright.cli.inputs.trained_model import open_model
    from meshwright.cli.terminal import fields
    from meshwright.cli.terminal.output import print_json

    opened = open_model(model, dtype)
    found = score(opened, _text(opened, model, data), sequences)
    if json:
        figures = ("loss", "perplexity", "bits_per_byte", "tokens", "seconds")
        print_json({name: getattr(found, name) for name in figures})
    else:
        print(fields.held_out(found))


def score(opened: "Opened", stream: "TokenStream", sequences: int) -> "EvalMetrics":
    """Windows of the trained length in order, each token scored once."""
    from meshwright.data import Sampler
    from meshwright.parallel import on_one_device
    from meshwright.spec.errors import DataError
    from meshwright.train.batches import held_out
    from meshwright.train.evaluate import evaluate as measure

    assert opened.tokenizer is not None
    plan, device = opened.plan, opened.model.embed.weight.device
    length = plan.recipe.sequence if plan else min(LONGEST, opened.model.shape.max_positions)
    if stream.num_tokens < 2:
        raise DataError(
            f"the text has {stream.num_tokens} tokens, and at least 2 are needed to score one: give more text"
        )
    sampler = Sampler(stream, sequence=length, tokenizer_separator=opened.tokenizer.separator, seed=0, shuffle=False)
    batches = held_out(
        sampler,
        device,
        rows=max(1, ROWS_TOKENS // length),
        limit=sequences,
        document_mask=plan.recipe.document_mask if plan else True,
    )
    engine = on_one_device(opened.model)
    return measure(engine, batches, step=0, tokens_per_byte=stream.num_tokens / max(1, stream.num_bytes))


def _text(opened: "Opened", model: Path, path: str | None) -> "TokenStream":
    """With a path the whole text there; without one the part that the run held out."""
    from meshwright.data import prepare
    from meshwright.spec import Data
    from meshwright.spec.errors import PlanError

    if opened.tokenizer is None:
        raise PlanError(f"{model} has no tokenizer.json to read a text with: put its tokenizer there")
    if path is not None:
        return prepare(Data(path=path, tokenizer=opened.tokenizer_file, validation=0.0)).train
    if opened.plan is None:
        raise PlanError(f"{model} does not say which text to score it on: give --data PATH, or --data stdlib")
    return prepare(replace(opened.plan.data, tokenizer=opened.tokenizer_file)).validation
