"""The words after a verb that takes a plan: a plan file, and changes to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.spec import ModelShape

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="PLAN.yaml|KEY=VALUE", help="A plan file, and changes to it.", show_default=False),
]


def sort_words(words: Sequence[str]) -> tuple[Path | None, list[str], str]:
    """(plan file, KEY=VALUE overrides, resume) from the words of a command line, in any order."""
    from meshwright.spec.errors import PlanError

    files = [word for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if len(files) > 1:
        raise PlanError(f"two plan files, {files[0]} and {files[1]}: give one, and changes as KEY=VALUE")
    resume = [pair.partition("=")[2] for pair in pairs if pair.startswith("resume=")]
    overrides = [pair for pair in pairs if not pair.startswith("resume=")]
    if resume and not resume[-1]:
        raise PlanError("resume= is empty: give resume=auto, resume=no or the path of a checkpoint")
    return (Path(files[0]) if files else None), overrides, resume[-1] if resume else "no"


def shape_from_folder(folder: Path) -> "ModelShape":
    """Of a Hugging Face directory."""
    from meshwright.model.hub import import_folder

    return import_folder(folder).shape
