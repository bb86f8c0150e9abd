"""`meshwright export`: a run as a Hugging Face directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.train.run import RunFolder

MASTER = "optimizer.master."
"""Where a checkpoint of a run below fp32 keeps its weights in full."""


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; it must not hold anything.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.  [default: as trained]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON document.")] = False,
) -> None:
    """Write the newest weights of a run as a Hugging Face directory: config, weights, tokenizer, generation config."""
    from meshwright.cli.output import print_json

    checkpoint = write_directory(run, out, dtype)
    if json:
        print_json({"out": out, "checkpoint": checkpoint, "files": sorted(path.name for path in out.iterdir())})
    else:
        print(f"{out}: {checkpoint.name} of {run}, for transformers (v4 and v5) and what reads its directories")


def write_directory(source: Path, out: Path, dtype: str | None = None) -> Path:
    """Export a run (its newest checkpoint) or one of its checkpoints; returns the checkpoint that was taken.

    `dtype` fp32, bf16 or fp16; None = as trained. Holds 256 MiB of weights in memory, or the largest tensor, whichever
    ranks wrote the checkpoint. RunError, CheckpointError, HubError where the shape cannot be written or `out` holds
    something, PlanError for an unknown dtype.
    """
    from meshwright.model.hub import export_folder
    from meshwright.model.hub.folder import GENERATION, TEMPLATE, read_json
    from meshwright.spec.errors import PlanError
    from meshwright.train.precision import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype} is not known: take one of {', '.join(DTYPES)}")
    run, checkpoint = locate(source)
    wanted = DTYPES[dtype or run.plan.recipe.precision]
    template = run.path / TEMPLATE
    export_folder(
        out,
        model_tensors=weights(checkpoint, wanted, verified=True),
        shape=run.plan.model,
        tokenizer=run.known_tokenizer(checkpoint),
        dtype=wanted,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        generation=read_json(run.path / GENERATION),
        dropout=run.plan.recipe.dropout,
    )
    return checkpoint


def locate(source: Path) -> "tuple[RunFolder, Path]":
    """The run and the checkpoint that `source` means, verified: one of its checkpoints, or a run folder and its newest
    that is whole."""
    from meshwright.spec.errors import CheckpointError
    from meshwright.train import checkpoint, shelf
    from meshwright.train.run import RunFolder

    if shelf.is_one(source) and not (source / "plan.yaml").is_file():
        return RunFolder.open(source.resolve().parent.parent), checkpoint.named(source)
    run = RunFolder.open(source)
    found = checkpoint.newest_whole(shelf.newest_first(run.checkpoints))
    if found is None:
        raise CheckpointError(f"{source} holds no complete checkpoint yet: train it first, or go on with resume=auto")
    return run, found


def weights(checkpoint: Path, wanted: "torch.dtype", *, verified: bool = False) -> "Iterator[tuple[str, Tensor]]":
    """The weights of a checkpoint by name, layer after layer, a few at a time; for fp32 the master weights, where there
    are any. Everything is verified at the first one, unless it was (`locate`)."""
    import torch

    from meshwright.train.checkpoint import names, stream

    kinds = names(checkpoint)
    chosen = {name: name.removeprefix("model.") for name in kinds if name.startswith("model.")}
    if wanted == torch.float32:
        masters = {name.removeprefix(MASTER): name for name in kinds if name.startswith(MASTER)}
        chosen = {masters.get(plain, name): plain for name, plain in chosen.items()}
    # In this order what one tensor of the directory is made of lies close together.
    ordered = sorted(chosen, key=lambda name: _by_layer(chosen[name]))
    for name, tensor in stream(checkpoint, ordered, verified=verified):
        yield chosen[name], tensor


def _by_layer(name: str) -> "list[tuple[int, str]]":
    """To sort names with layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
