"""Adapters beside a model that is in memory: folders of PEFT's, and runs that trained one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.api.arguments import Place, folder_of
from meshwright.model import Transformer
from meshwright.model.hub import import_folder
from meshwright.model.hub.adapter import is_adapter, load_adapter
from meshwright.serve.loaded_adapters import LoadedAdapters
from meshwright.serve.request_adapters import ServedAdapter
from meshwright.spec.errors import ArgumentError
from meshwright.spec.lora import SAME
from meshwright.spec.plan import RANDOM
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.base_weights import base_fingerprint
from meshwright.store.model_weights import locate, weights


def opened_adapters(given: Mapping[str, Place] | None, model: Transformer, source: Path) -> dict[str, ServedAdapter]:
    """Each by its name, for requests to a model that was read from `source`. ArgumentError, HubError or CheckpointError
    where one cannot be had."""
    found = {name: opened_adapter(name, folder_of(place), model, source) for name, place in (given or {}).items()}
    for name, adapter in found.items():
        adapter.check(name, model)
    return found


def named(place: Place | None) -> dict[str, Path]:
    """One adapter under the name of its folder; none where there is none."""
    if place is None:
        return {}
    folder = folder_of(place)
    return {folder.resolve().name: folder}


@contextmanager
def beside(place: Place, model: Transformer, source: Path) -> Iterator[None]:
    """While it lasts, all rows of a model that was read from `source` have an adapter. As `opened_adapters`."""
    given = named(place)
    adapters = LoadedAdapters(model, exact=False)
    for name, adapter in opened_adapters(given, model, source).items():
        adapters.load(name, adapter)
    with adapters.beside.over({adapters.number(name): slice(None) for name in given}):
        yield


def opened_adapter(name: str, path: Path, model: Transformer, source: Path) -> ServedAdapter:
    """One adapter of a model that was read from `source`. ArgumentError, HubError or CheckpointError."""
    if is_adapter(path):
        return peft_adapter(model, path)
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_one(path):
        return _of_run(name, path, source)
    raise ArgumentError(
        f"adapter={name}: {path} has neither adapter_config.json nor plan.yaml: give a folder that PEFT or "
        "`meshwright export --adapter` has written, or a run with model.lora"
    )


def peft_adapter(model: Transformer, path: Path, widest: int = 0) -> ServedAdapter:
    """One in PEFT's format, of any rank or at most one. HubError."""
    shape, tensors = load_adapter(path, model.shape.base, widest)
    assert shape.lora is not None
    return ServedAdapter(shape.lora, tensors)


def _of_run(name: str, path: Path, source: Path) -> ServedAdapter:
    """The adapter of a checkpoint, beside the very weights that it was trained with."""
    run, checkpoint = locate(path)
    lora, init = run.plan.model.lora, run.plan.init
    if lora is None:
        raise ArgumentError(f"adapter={name}: {path} trained all weights and has no adapter: give it as the model")
    if init == RANDOM:
        raise ArgumentError(
            f"adapter={name}: {path} began from random weights, which no folder holds: give the run as the model"
        )
    if lora.base != SAME:
        raise ArgumentError(
            f"adapter={name} needs its own codes: {path} trained it beside {lora.base}. For other weights "
            "write it in PEFT's format (`meshwright export --adapter`)"
        )
    known = checkpoints.values(checkpoint).get("base")
    given = import_folder(source).fingerprint() if (source / "config.json").is_file() else ""
    if known != base_fingerprint(run.plan) or known != given:
        raise ArgumentError(
            f"adapter={name} does not fit: {path} trained it beside the weights of {init}, and {source} has "
            "others. Give the folder that model.init names as the model"
        )
    return ServedAdapter(lora, dict(weights(checkpoint, torch.float32, verified=True)))
