"""Adapters beside a model in memory: folders in PEFT's format, and runs that trained one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.formats.hub import import_folder
from meshwright.formats.hub.adapter import is_adapter, load_adapter
from meshwright.interface.answers.arguments import Place, folder_of
from meshwright.model import Transformer
from meshwright.serving.engine.rows.loaded_adapters import LoadedAdapters
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.shape import SAME_BASE
from meshwright.spec.plan.plan import RANDOM
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import base_fingerprint, locate, weights


def opened_adapters(
    locations: Mapping[str, Place] | None, model: Transformer, source: Path
) -> dict[str, ServedAdapter]:
    """Open adapters, by name, for requests to a model that was read from `source`.

    Raises ArgumentError, HubError or CheckpointError when one cannot be opened or does not fit.
    """
    adapters = {
        name: opened_adapter(name, folder_of(location), model, source) for name, location in (locations or {}).items()
    }
    for name, adapter in adapters.items():
        adapter.check(name, model)
    return adapters


def named_folder(location: Place | None) -> dict[str, Path]:
    """Return an adapter under the name of its folder, or nothing for None."""
    if location is None:
        return {}
    folder = folder_of(location)
    return {folder.resolve().name: folder}


@contextmanager
def beside(location: Place, model: Transformer, source: Path) -> Iterator[None]:
    """Apply an adapter to all rows of a model within `with`. Raises as `opened_adapters`."""
    folders = named_folder(location)
    adapters = LoadedAdapters(model, exact=False)
    for name, adapter in opened_adapters(folders, model, source).items():
        adapters.load(name, adapter)
    with adapters.by_number.apply_to({adapters.number(name): slice(None) for name in folders}):
        yield


def opened_adapter(name: str, path: Path, model: Transformer, source: Path) -> ServedAdapter:
    """Open one adapter of a model that was read from `source`. Raises as `opened_adapters`."""
    if is_adapter(path):
        return peft_adapter(model, path)
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        return _adapter_of_run(name, path, source)
    raise ArgumentError(
        "adapter",
        name,
        remedy=(
            f"{path} has neither adapter_config.json nor plan.yaml: give a folder that PEFT or "
            "`meshwright export --adapter` has written, or a run with model.lora"
        ),
    )


def peft_adapter(model: Transformer, path: Path, widest: int = 0) -> ServedAdapter:
    """Open an adapter in PEFT's format, of at most rank `widest` (0 = any). Raises HubError."""
    shape, tensors = load_adapter(path, model.shape.base, widest)
    assert shape.lora is not None
    return ServedAdapter(shape.lora, tensors)


def _adapter_of_run(name: str, path: Path, source: Path) -> ServedAdapter:
    """Open the adapter of a checkpoint, if `source` has the very weights that it was trained beside."""
    run, checkpoint = locate(path)
    lora, init = run.plan.model.lora, run.plan.init
    if lora is None:
        raise ArgumentError(
            "adapter", name, remedy=f"{path} trained all weights and has no adapter: give it as the model"
        )
    if init == RANDOM:
        raise ArgumentError(
            "adapter",
            name,
            remedy=f"{path} began from random weights, which no folder holds: give the run as the model",
        )
    if lora.base != SAME_BASE:
        raise ArgumentError(
            "adapter",
            name,
            "needs its own codes",
            (
                f"{path} trained it beside {lora.base}. For other weights write it in PEFT's format "
                "(`meshwright export --adapter`)"
            ),
        )
    trained_beside = checkpoints.read_values(checkpoint).get("base")
    fingerprint = import_folder(source).fingerprint() if (source / "config.json").is_file() else ""
    if trained_beside != base_fingerprint(run.plan) or trained_beside != fingerprint:
        raise ArgumentError(
            "adapter",
            name,
            "does not fit",
            (
                f"{path} trained it beside the weights of {init}, and {source} has others. Give the folder "
                "that model.init names as the model"
            ),
        )
    return ServedAdapter(lora, dict(weights(checkpoint, torch.float32, verified=True)))
