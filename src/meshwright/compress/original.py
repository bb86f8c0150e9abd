"""The model to be compressed: a run folder, one of its checkpoints, a Hugging Face directory, or a GGUF file.

A GGUF file brings its tokenizer and generation settings.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.data.corpus.corpus import lock, new_folder
from meshwright.formats.gguf.header import is_gguf
from meshwright.formats.hub.adapter import is_adapter
from meshwright.formats.hub.config import GENERATION, TEMPLATE, read_json
from meshwright.formats.hub.directory import stored_weights
from meshwright.formats.quantized.folder import open_numbers
from meshwright.spec.errors import DataError, HubError, PlanError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.user_cache import default_root
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import final_weights, locate
from meshwright.store.run_folder import no_model

if TYPE_CHECKING:
    from meshwright.formats.gguf.model import GGUFModel


def gguf_tokenizer(model: "GGUFModel") -> Tokenizer | None:
    """Return the tokenizer of a GGUF file, or None if it has no supported one.

    Raises HubError when it is damaged or larger than the model's vocabulary.
    """
    vocabulary = model.vocabulary
    if vocabulary is None:
        return None
    try:
        templates = {"template": model.chat_template, "tool_template": model.tool_template}
        tokenizer = Tokenizer(vocabulary.text, bos=vocabulary.bos, eos=vocabulary.eos, **templates)
    except DataError as error:
        raise HubError(f"{model.path}: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise HubError(f"{model.path}: its tokenizer is damaged: {' '.join(str(error).split())}") from error
    if tokenizer.vocab > model.shape.vocab:
        raise HubError(f"{model.path}: its tokenizer has {tokenizer.vocab} tokens, its model {model.shape.vocab}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer) -> str:
    """Write a tokenizer.json into the user's cache and return its path."""
    folder = default_root() / "tokenizers" / f"gguf-{tokenizer.fingerprint}"
    with lock(folder):
        if not (folder / "tokenizer.json").is_file():
            with new_folder(folder) as new:
                tokenizer.save(new)
    return str(folder / "tokenizer.json")


def gguf_generation_config(model: "GGUFModel") -> dict[str, object] | None:
    """Return the end-of-text ids in the form of generation_config.json, or None."""
    ends = model.vocabulary.stop_ids if model.vocabulary else ()
    return {"eos_token_id": list(ends)} if ends else None


def is_gguf_path(path: Path) -> bool:
    """Return whether a path is a GGUF file or is named like one."""
    return path.suffix == ".gguf" or is_gguf(path)


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
    # Loaded here: verbs of other formats import this module too, and the blocks of GGUF take time to load.
    from meshwright.formats.gguf.model import open_gguf

    model = open_gguf(path)
    return OriginalModel(
        shape=model.shape, dtype=model.dtype, weights=model.weights, tokenizer=gguf_tokenizer(model),
        chat_template=model.chat_template, generation=gguf_generation_config(model), dropout=0.0,
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
