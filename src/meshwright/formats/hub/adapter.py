"""Adapters in PEFT's format, read and written: adapter_config.json and adapter_model.safetensors.

PEFT has one A and one B per module. Where a module of theirs is several of ours (GPT-2's c_attn is queries, keys and
values), its A stacks ours, its B has ours on the diagonal, and its rank is their sum: the product B A is the same.
When such a module is read, each of ours gets its A and some rows of its B.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub.adapter_config import CONFIG, WEIGHTS, adapter_config, adapter_scale, lora_shape
from meshwright.formats.hub.directory import TOO_MANY, PromptFiles, fresh_folder
from meshwright.formats.hub.weight_names import CONV1D, JOINED, STACKED, Binding, bindings
from meshwright.formats.safetensors import Stored, read_header, write_file
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.inventory import adapter_parts, adapter_prefix, parameters

PREFIX = "base_model.model."
PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Parameter of ours -> end of the name of theirs."""


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], shape: ModelShape, *, base: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Write an adapter, given by our names, into an existing folder. Its config names `base` as the model."""
    lora = shape.lora
    assert lora is not None
    adapted: dict[str, dict[str, Tensor]] = {}
    others: list[str] = []
    for binding in bindings(shape):
        # Modules without adapter matter too: PEFT must not match them by their last names.
        low = [parts for name in binding.ours if (parts := adapter_parts(name, tensors))]
        if low:
            adapted |= _export_parts(binding, low, shape)
        else:
            others += [name.removesuffix(".weight") for name in binding.theirs]
    exported = {
        f"{PREFIX}{module}.{PARTS[part]}": tensor for module, parts in adapted.items() for part, tensor in parts.items()
    }
    write_file(folder / WEIGHTS, exported, dtype)
    ranks = {module: len(parts["a"]) for module, parts in adapted.items() if len(parts["a"]) != lora.rank}
    config = _peft_config(lora, ranks, base) | {
        "target_modules": _target_modules(list(adapted), others),
        "fan_in_fan_out": shape.family == "gpt2",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shape: ModelShape,
    *,
    base: str,
    dtype: torch.dtype,
    prompts: PromptFiles | None = None,
) -> None:
    """Write an adapter and its prompt files into a new folder, which appears complete or not at all.

    Raises HubError when the folder is not empty, or when PEFT would read another adapter from it.
    """
    problem = misread(shape)
    if problem:
        raise HubError(problem)
    with fresh_folder(folder) as partial:
        save_adapter(partial, tensors, shape, base=base, dtype=dtype)
        if prompts is not None:
            prompts.write(partial, shape)


def misread(shape: ModelShape) -> str:
    """Return how PEFT (0.21) would misread the adapter. Empty = it reads what was trained.

    PEFT joins the experts of a layer to stacks by the last names of their matrices: gate and up with down, or down
    alone. It drops the adapters of other modules with these names.
    """
    adapted = [parameter for parameter in parameters(shape) if parameter.adapts and parameter.trained]
    stacked, single = (
        {
            parameter.adapts.removesuffix(".weight").rpartition(".")[2]
            for parameter in adapted
            if (parameter.group == "expert") == is_stack
        }
        for is_stack in (True, False)
    )
    if not stacked or (stacked in ({"down"}, {"gate", "up", "down"}) and not stacked & single):
        return ""
    why = "drops those of dense layers and shared experts" if stacked & single else "needs gate, up and down, or down"
    return (
        f"PEFT would read other adapters of experts than were trained: of a model with experts it {why}; "
        "export the merged model, without --adapter"
    )


def base_folder(folder: Path) -> Path:
    """Return the folder of an adapter's model, relative to here or to the adapter. Raises HubError."""
    base_path = str(adapter_config(folder).get("base_model_name_or_path") or "")
    for candidate in (Path(base_path), folder / base_path):
        if base_path and candidate.is_dir():
            return candidate
    raise HubError(
        f"{folder}/{CONFIG}: base_model_name_or_path {base_path!r} is not a folder here: put the model there, "
        "or change the entry"
    )


def _target_modules(adapted: list[str], others: list[str]) -> list[str]:
    """Return last names of modules for PEFT, or whole names where another module of that last name has no adapter."""
    shared = {module.rpartition(".")[2] for module in others}
    return sorted({last if (last := module.rpartition(".")[2]) not in shared else module for module in adapted})


def _export_parts(binding: Binding, low: list[dict[str, Tensor]], shape: ModelShape) -> dict[str, dict[str, Tensor]]:
    names = [name.removesuffix(".weight") for name in binding.theirs]
    if binding.transform is STACKED:
        return {name: {part: x[expert] for part, x in low[0].items()} for expert, name in enumerate(names)}
    if binding.transform in JOINED:
        return {names[0]: _join_parts(binding, low)}
    exported = {part: binding.transform.export([x], shape)[0] for part, x in low[0].items() if part != "a"}
    return {names[0]: {"a": low[0]["a"], **exported}}


def _join_parts(binding: Binding, low: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the adapters of several modules of ours. Raises HubError when some have none."""
    if len(low) != len(binding.ours):
        raise HubError(
            f"{next(iter(binding.theirs))} is one matrix in PEFT's format, and only some of "
            f"{', '.join(binding.ours)} have an adapter: train model.lora.targets=attention, or export the "
            "merged model"
        )
    # Off the diagonal B is 0, so each module of ours still sees its own A alone.
    joined = {"a": torch.cat([parts["a"] for parts in low]), "b": torch.block_diag(*(parts["b"] for parts in low))}
    return joined | ({"magnitude": torch.cat([p["magnitude"] for p in low])} if "magnitude" in low[0] else {})


def _peft_config(lora: LoRAShape, ranks: Mapping[str, int], base: str) -> dict[str, Any]:
    def alpha(rank: int) -> float:
        return lora.scale * (math.sqrt(rank) if lora.rslora else rank)

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "rank_pattern": dict(ranks),
        "alpha_pattern": {module: alpha(rank) for module, rank in ranks.items()},
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "modules_to_save": None,
    }


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG).is_file()


def load_adapter(folder: Path, shape: ModelShape, widest: int = 0) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return the shape with the adapter, and the adapter's tensors by our names in fp32.

    Raises HubError when the folder holds none, when it is for another shape, or when it asks for something unsupported.
    With `widest` it also does so for a larger rank, and where all matrices padded to the largest rank would need many
    times the memory of the files. 0 = no limit.
    """
    config = adapter_config(folder)
    lora = lora_shape(config, folder)
    if 0 < widest < lora.rank:
        raise HubError(f"{folder}/{CONFIG}: rank {lora.rank} exceeds the limit of {widest}")
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in read_header(folder / WEIGHTS).items()}
    # Before anything is padded to the largest rank.
    if widest:
        _check_room(folder, stored, lora.rank)
    imported: dict[str, Tensor] = {}
    # Of a smallest adapter of everything: which matrices can have one does not depend on this adapter.
    adaptable = {parameter.adapts for parameter in parameters(replace(shape.base, lora=LoRAShape(rank=1)))}
    for binding in bindings(shape.base):
        if not adaptable.intersection(binding.ours):
            continue
        read = [
            {part: stored.pop(f"{name}.{theirs}").read().float()
             for part, theirs in PARTS.items() if f"{name}.{theirs}" in stored}
            for name in (name.removesuffix(".weight") for name in binding.theirs)
        ]  # fmt: skip
        wanted = {"a", "b", "magnitude"} if lora.dora else {"a", "b"}
        if any(read) and any(set(parts) != wanted for parts in read):
            raise HubError(
                f"{folder}: {next(iter(binding.theirs))}, or one of its experts, lacks some of "
                f"{', '.join(PARTS[part] for part in sorted(wanted))}: save the adapter again"
            )
        if any(read):
            _check_sizes(folder, binding, read, shape, lora.rank)
            imported |= _import_parts(binding, read, shape, config, lora)
    # A tensor that nobody has taken would be dropped without a word.
    if stored:
        raise HubError(f"{folder}: {_unread_reason(next(iter(stored)), shape)}")
    if missing := _missing_module(config, shape, imported):
        raise HubError(
            f"{folder} does not fit the model: {CONFIG} names {missing}, and {WEIGHTS} has no adapter for it. "
            f"Take an adapter for as many layers as {shape.name}, or save it again"
        )
    targets = sorted({name.split(".lora.")[0].split("_lora.")[0].rpartition(".")[2] for name in imported})
    return replace(shape.base, lora=replace(lora, targets=",".join(targets))), imported


def _check_room(folder: Path, stored: Mapping[str, Stored], rank: int) -> None:
    """Raise HubError if padding all ranks to the largest needs many times as much memory as the files hold."""
    held = sum(math.prod(tensor.size) for tensor in stored.values())
    sides = ((tensor.size[-1:] if name.endswith(PARTS["a"]) else tensor.size[:1]) for name, tensor in stored.items())
    if (padded := sum(rank * size for side in sides for size in side)) > TOO_MANY * held:
        raise HubError(
            f"{folder} has several ranks: with rank {rank} everywhere it has {padded:,} numbers, and "
            f"{WEIGHTS} holds {held:,}. Save it with one rank"
        )


def _check_sizes(folder: Path, binding: Binding, read: list[dict[str, Tensor]], shape: ModelShape, widest: int) -> None:
    """Raise HubError if the sizes of a module's parts do not fit its matrix, or if experts have different ranks."""
    rank = next(iter(read[0]["a"].shape), 0)
    if not 0 < rank <= widest:
        raise HubError(f"{folder}: {next(iter(binding.theirs))} has rank {rank}, and {CONFIG} 1 to {widest}")
    for (name, size), parts in zip(binding.theirs.items(), read, strict=True):
        size_out, size_in = reversed(size) if binding.transform is CONV1D else size
        wanted = {"a": (rank, size_in), "b": (size_out, rank), "magnitude": (size_out,)}
        for part, tensor in parts.items():
            actual, expected = tuple(tensor.flatten().shape if part == "magnitude" else tensor.shape), wanted[part]
            if actual != expected:
                raise HubError(
                    f"{folder} is for another model: {PARTS[part]} of {name} is {list(actual)}, and {shape.name} has "
                    f"{list(expected)}. Give the model that it was trained with"
                )


def _missing_module(config: Mapping[str, Any], shape: ModelShape, tensors: Mapping[str, Tensor]) -> str:
    """Return a module in `target_modules` without adapter, although the same module of another layer has one.

    Empty = there is none, or the config chooses modules or layers in another way than by name.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list) or any(config.get(key) for key in ("layers_to_transform", "exclude_modules")):
        return ""
    adapted, rest = set[str](), dict[str, str]()
    for binding in bindings(shape.base):
        for name in (name.removesuffix(".weight") for name in binding.theirs):
            kind = re.sub(r"\.\d+\.", ".N.", name, count=1)
            if any(adapter_parts(ours, tensors) for ours in binding.ours):
                adapted.add(kind)
            elif any(name == target or name.endswith(f".{target}") for target in targets):
                rest.setdefault(kind, name)
    return next((name for kind, name in rest.items() if kind in adapted), "")


def _unread_reason(name: str, shape: ModelShape) -> str:
    module, _, part = name.partition(".lora_")
    if f"lora_{part}" not in PARTS.values() and not module.endswith("experts"):
        return f"{name} is no tensor of a LoRA or DoRA adapter (supported: {', '.join(PARTS.values())})"
    theirs = {weight.removesuffix(".weight") for binding in bindings(shape.base) for weight in binding.theirs}
    if module.endswith("experts") and any(weight.startswith(f"{module}.") for weight in theirs):
        return f"{name} adapts a stack of experts, as PEFT 0.21 writes them; supported are experts one by one"
    if module in theirs or any(module.endswith(weight) for weight in ("lm_head", "embed_tokens", "wte", "wpe")):
        return f"{name} adapts a matrix that has no adapter here (supported: attention, MLP, experts)"
    return f"{name} adapts no matrix of {shape.name}: it is for another model"


def _import_parts(
    binding: Binding, read: list[dict[str, Tensor]], shape: ModelShape, config: Mapping[str, Any], lora: LoRAShape
) -> dict[str, Tensor]:
    """Return our tensors of one binding, padded to one rank, with the scale of the module multiplied into B."""
    parts: list[dict[str, Tensor]]
    if binding.transform is STACKED:
        parts = [{part: torch.stack([module_parts[part] for module_parts in read]) for part in read[0]}]
    elif binding.transform in JOINED:
        rows = [size[0] for size in binding.ours.values()]
        cut = {part: tensor.flatten(1).split(rows) if part == "b" else tensor.flatten().split(rows)
               for part, tensor in read[0].items() if part != "a"}  # fmt: skip
        parts = [
            {"a": read[0]["a"], **{part: pieces[index] for part, pieces in cut.items()}} for index in range(len(rows))
        ]
    else:
        rows = [size[0] for size in binding.ours.values()]
        parts = [
            {part: x if part == "a" else binding.transform.restore([x.flatten() if part == "magnitude" else x], rows,
                                                                   shape)[0] for part, x in read[0].items()}
        ]  # fmt: skip
    module = next(iter(binding.theirs)).removesuffix(".weight")
    tensors = {}
    for name, module_parts in zip(binding.ours, parts, strict=True):
        prefix = adapter_prefix(name)
        # Ours has one scale. What a module's own alpha and rank make of it goes into its B.
        factor = adapter_scale(module, module_parts["a"].shape[-2], config) / lora.scale
        module_parts["b"] = module_parts["b"] * factor
        for part, tensor in module_parts.items():
            tensors[prefix + part] = _padded(part, tensor, lora.rank)
    return tensors


def _padded(part: str, tensor: Tensor, rank: int) -> Tensor:
    """Pad with zeros up to a rank: A has more rows, B more columns."""
    if part == "magnitude":
        return tensor
    dim = -2 if part == "a" else -1
    missing = rank - tensor.shape[dim]
    zeros = list(tensor.shape)
    zeros[dim] = missing
    return tensor if not missing else torch.cat((tensor, tensor.new_zeros(zeros)), dim)
