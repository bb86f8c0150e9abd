"""The model to be compressed: a run folder, one of its checkpoints, a Hugging Face directory, or a GGUF file."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.gguf_reading import gguf_generation, gguf_tokenizer, is_gguf_path
from meshwright.data import Tokenizer
from meshwright.formats.gguf.model import open_gguf
from meshwright.formats.hub.adapter import is_adapter
from meshwright.formats.hub.json_files import GENERATION, TEMPLATE, read_json
from meshwright.formats.hub.weights import stored_weights
from meshwright.formats.quantized.folder import open_numbers
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import ModelShape
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import final_weights, locate
from meshwright.store.run_folder import no_model


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalModel:
    """A model to be compressed, with lazily read weights."""

    shape: ModelShape
    dtype: torch.dtype
    """Dtype of the stored weights."""
    weights: Callable[[torch.dtype], Iterator[tuple[str, Tensor]]]
    """dtype -> parameters in that dtype by Meshwright's names, layer after layer."""
    tokenizer: Tokenizer | None
    chat_template: str | None
    generation: Mapping[str, object] | None
    dropout: float


def open_original(path: Path, which: str) -> OriginalModel:
    """Open a model of any kind.

    Raises RunError when there is none, CheckpointError or HubError when it is damaged, PlanError for an adapter.
    """
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        return _open_run(path, which)
    if (path / "config.json").is_file():
        return _open_directory(path)
    if is_gguf_path(path):
        return _open_gguf(path)
    if is_adapter(path):
        raise PlanError(f"{path} is an adapter: quantize the run that trained it, or its merged model")
    raise no_model(path)


def _open_run(path: Path, which: str) -> OriginalModel:
    from meshwright.training.optimizer.precision import DTYPES

    run, checkpoint = locate(path, which)
    template = run.path / TEMPLATE
    return OriginalModel(
        shape=run.plan.model.base,
        dtype=DTYPES[run.plan.recipe.precision],
        weights=lambda dtype: final_weights(run.plan, checkpoint, dtype),
        tokenizer=run.load_tokenizer(checkpoint),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        generation=read_json(run.path / GENERATION),
        dropout=run.plan.recipe.dropout,
    )


def _open_gguf(path: Path) -> OriginalModel:
    model = open_gguf(path)
    return OriginalModel(
        shape=model.shape, dtype=model.dtype, weights=model.weights, tokenizer=gguf_tokenizer(model),
        chat_template=model.chat_template, generation=gguf_generation(model), dropout=0.0,
    )  # fmt: skip


def _open_directory(path: Path) -> OriginalModel:
    folder = open_numbers(path)

    def weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_weights(path, folder.shape):
            yield name, tensor if name.endswith("correction_bias") else tensor.to(dtype)

    return OriginalModel(
        shape=folder.shape,
        dtype=folder.dtype,
        weights=weights,
        tokenizer=Tokenizer.load(folder.tokenizer) if folder.tokenizer else None,
        chat_template=folder.chat_template,
        generation=folder.generation,
        dropout=0.0,
    )
