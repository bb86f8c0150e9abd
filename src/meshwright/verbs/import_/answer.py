"""`import`: a run folder with the shape, tokenizer and weights of a Hugging Face directory."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec import Data, Plan, Recipe
from meshwright.spec.errors import HubError

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data import Tokenizer
    from meshwright.formats.hub import HubFolder


def import_hf(folder: Path, run: Path) -> Plan:
    """Make a run folder with the shape, tokenizer and weights of a directory, and return its plan.

    The recipe is the default one, in the precision of the weights. Weights are held once in memory. Everything is read
    and checked before the folder is made. Raises HubError, DataError, and PlanError when `run` is taken.
    """
    from meshwright.data import Tokenizer
    from meshwright.formats.hub.config import read_config
    from meshwright.formats.quantized.detection import quantization
    from meshwright.store.durable import refuse_nonempty, refuse_unwritable

    refuse_nonempty(run, "run")
    if not quantization(folder):  # the reader of quantized folders checks their config
        read_config(folder)
    refuse_unwritable(run, "run")
    from meshwright.formats.quantized.folder import open_numbers  # loads torch

    opened = open_numbers(folder)
    if opened.tokenizer is None:
        raise HubError(f"{folder} has no tokenizer.json, which a run needs: save its tokenizer in that format first")
    tokenizer = Tokenizer.load(opened.tokenizer)
    if tokenizer.vocab > opened.shape.vocab:
        raise HubError(f"{folder}: tokenizer.json has {tokenizer.vocab} tokens, config.json only {opened.shape.vocab}")
    plan = _plan(opened, run)
    _write(plan, tokenizer, opened, _weights(opened))
    return plan


def _plan(folder: "HubFolder", run: Path) -> Plan:
    from meshwright.training.optimizer.precision import DTYPES

    precision = next(name for name, dtype in DTYPES.items() if dtype == folder.dtype)
    sequence = min(Recipe().sequence, folder.shape.max_positions)
    return Plan(
        model=folder.shape,
        data=Data(tokenizer=str(run / "tokenizer.json")),
        run=str(run),
        recipe=Recipe(precision=precision, sequence=sequence),  # type: ignore[arg-type]  # one of the precisions of Recipe
    )


def _weights(folder: "HubFolder") -> "dict[str, Tensor]":
    """Return weights under the names of a checkpoint. Correction biases of routers stay fp32."""
    import torch

    tensors: dict[str, Tensor] = {}

    def put(name: str, tensor: "Tensor") -> None:
        dtype = torch.float32 if name.endswith("correction_bias") else folder.dtype
        tensors["model." + name] = tensor.to(dtype).clone(memory_format=torch.contiguous_format)

    folder.load(put)
    return tensors


def _write(plan: Plan, tokenizer: "Tokenizer", hub: "HubFolder", tensors: "dict[str, Tensor]") -> None:
    """Write the run folder. It keeps what an export needs: chat template and generation config."""
    from meshwright.store import checkpoint
    from meshwright.store.run_folder import RunFolder
    from meshwright.training.step.state import keep_hub_files

    path = Path(plan.run)
    is_new = not path.exists()
    try:
        with RunFolder.create(path, plan, tokenizer) as folder:
            keep_hub_files(hub, path)
            values: dict[str, checkpoint.Json] = {
                "step": 0,
                "sequence": plan.recipe.sequence,
                "tokenizer": tokenizer.fingerprint,
            }
            checkpoint.save(folder.checkpoints, step=0, tensors=tensors, values=values, score=None, keep_last=1)
    except BaseException:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
