"""Checks of model paths, dtypes and checkpoint names that run before torch is loaded."""

from pathlib import Path
from typing import Literal

from meshwright.formats.gguf.header import is_gguf
from meshwright.formats.hub import adapter_config
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from meshwright.spec.recipe.recipe import PRECISIONS
from meshwright.store import checkpoint_folder
from meshwright.store.run_folder import no_model

AUTO = "auto"
"""Dtype choice: fp32 on a CPU, the stored dtype on a GPU."""
LAST, BEST = "last", "best"
"""Checkpoint choice: the newest undamaged one, or the one with the lowest held-out loss."""
Kind = Literal["run", "folder", "gguf", "adapter"]
NAMES: dict[Kind, str] = {"folder": "a Hugging Face directory", "gguf": "a GGUF file", "adapter": "an adapter"}


def check_model(path: Path, *, dtype: str | None = None, checkpoint: str = LAST, named: str = "") -> Kind:
    """Return the kind of the model at `path`: a run or its checkpoint, a Hugging Face directory, GGUF, or PEFT adapter.

    `named` is the argument that named it, such as `against=`. Raises RunError when there is no model, ArgumentError
    for an unknown dtype or checkpoint.
    """
    check_dtype(dtype, AUTO)
    kind = _kind(path)
    if kind is None:
        raise RunError(f"{named}{no_model(path)}")
    if kind == "run":
        check_checkpoint(checkpoint)
    elif checkpoint != LAST:
        raise ArgumentError(f"checkpoint={checkpoint}: {path} is {NAMES[kind]}, which has none; leave it out")
    return kind


def _kind(path: Path) -> Kind | None:
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        return "run"
    if (path / "config.json").is_file():
        return "folder"
    if is_gguf(path):
        return "gguf"
    return "adapter" if (path / adapter_config.CONFIG).is_file() else None


def check_dtype(dtype: str | None, *more: str) -> None:
    """Raise ArgumentError unless the dtype is None (as stored), fp32, bf16, fp16 or one of `more`."""
    if dtype is not None and dtype not in (*more, *PRECISIONS):
        raise ArgumentError(f"dtype={dtype} is not known: take one of {', '.join((*more, *PRECISIONS))}")


def check_checkpoint(which: str) -> None:
    """Raise ArgumentError unless the word is last, best or the number of a step."""
    if which not in (LAST, BEST) and not which.isdigit():
        raise ArgumentError(f"checkpoint={which} is not known: take last, best, or the number of a step")


def check_gguf_path(out: Path) -> None:
    """Raise PlanError when a GGUF file cannot be created at this path."""
    if out.suffix != ".gguf":
        raise PlanError(f"out={out} is one GGUF file, whose name ends with .gguf: take {out}.gguf")
    if out.exists():
        raise PlanError(f"out={out} is there already: take another name, or remove it")
