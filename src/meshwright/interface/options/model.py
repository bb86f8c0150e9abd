"""A trained model on the command line: where it is, in which dtype, and how it samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec.errors import ArgumentError, PlanError

DEFAULT_TEMPERATURE = 0.8

ModelPath = Annotated[
    Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="Run folder, Hugging Face directory or .gguf file.")
]
Checkpoint = Annotated[
    str,
    typer.Option("--checkpoint", metavar="WHICH", help="Checkpoint of a run: last, best by held-out loss, or a step."),
]
ServedDtype = Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, as stored on a GPU.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature: above 1 bolder, below 1 safer.  [default: 0.8]")
]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens only; 0 = all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that together reach p only.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter", metavar="DIR", help="LoRA adapter to apply: a PEFT folder, or a run with model.lora."
    ),
]  # fmt: skip


def check_adapter(adapter: Path | None) -> None:
    """Raise ArgumentError unless the folder exists."""
    if adapter is not None and not adapter.is_dir():
        raise ArgumentError(
            "adapter",
            adapter,
            "does not exist",
            "give a folder of PEFT or of `meshwright export --adapter`, or a run with model.lora",
        )


def named_adapters(words: Sequence[str] | None, model: str) -> dict[str, Path]:
    """Return {name: folder} of NAME=DIR words.

    Raises ArgumentError for a malformed word, a missing folder, or a name that is taken, as `model` is.
    """
    folders: dict[str, Path] = {}
    for word in words or ():
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ArgumentError("adapter", word, "must be NAME=DIR", "the name that requests use, and a folder")
        if name in folders or name == model:
            raise ArgumentError("adapter", word, remedy=f"the name {name} is taken; give each adapter its own")
        if not Path(folder).is_dir():
            raise ArgumentError("adapter", word, "does not exist", "give NAME=FOLDER")
        folders[name] = Path(folder)
    return folders


def chosen_temperature(greedy: bool, temperature: float | None) -> float:
    """Return the temperature that --greedy and --temperature ask for.

    Raises PlanError when they contradict each other.
    """
    if greedy and temperature:
        raise PlanError(f"--greedy and --temperature {temperature} contradict each other: give one")
    return 0.0 if greedy else DEFAULT_TEMPERATURE if temperature is None else temperature
