"""`meshwright import`: make a run folder of a Hugging Face directory, to generate from, evaluate and train on."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec import num_parameters
from meshwright.spec.units import count


def import_(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face directory.")],
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Run folder to make; run=RUN means the same.  [runs/NAME]")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what was made as one JSON document.")] = False,
) -> None:
    """Make a run folder from a Hugging Face directory: plan, tokenizer, and a checkpoint of step 0."""
    from meshwright.interface.terminal.screen_text import print_json
    from meshwright.verbs.import_.answer import import_hf

    # Every other verb takes run=RUN: no command could name a folder called run=RUN again.
    word = run.removeprefix("run=")
    target = Path(word) if word else Path("runs") / folder.resolve().name
    plan = import_hf(folder, target)
    if json:
        print_json({"run": target, "family": plan.model.family, "parameters": num_parameters(plan.model)})
    else:
        print(f"{target}: {plan.model.family} of {count(num_parameters(plan.model))} parameters from {folder}")
        print(f"train it on: meshwright train {target}/plan.yaml data.path=PATH resume=auto")
