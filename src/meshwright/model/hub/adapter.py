"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, in and out.

PEFT has an A and a B for each of its modules. Where a module of theirs is several of ours (GPT-2's c_attn is queries,
keys and values), its A is ours on top of one another, its B ours on a diagonal, and its rank their sum: the same matrix
B A. Reading, an A of such a module is each of ours, and B is cut by rows.
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

from meshwright.model.hub.adapter_config import CONFIG, WEIGHTS, adapter_config, factor_of, lora_of
from meshwright.model.hub.directory import PromptFiles, fresh_folder
from meshwright.model.hub.safetensors_files import Stored, read_header, write_file
from meshwright.model.hub.transforms import CONV1D, JOINED, STACKED
from meshwright.model.hub.weight_names import Binding, bindings
from meshwright.model.hub.weights import TOO_MANY
from meshwright.spec.errors import HubError
from meshwright.spec.inventory import adapter_parts, adapter_prefix, parameters
from meshwright.spec.lora import LoRAShape
from meshwright.spec.shape import ModelShape

PREFIX = "base_model.model."
PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Ours and theirs."""


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], shape: ModelShape, *, base: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Write an adapter, by our names, into an existing folder; `base` is what its config calls the model's folder."""
    lora = shape.lora
    assert lora is not None
    adapted: dict[str, dict[str, Tensor]] = {}
    others: list[str] = []
    for binding in bindings(shape):
        low = [parts for name in binding.ours if (parts := adapter_parts(name, tensors))]
        if low:
            adapted |= _theirs(binding, low, shape)
        else:
            others += [name.removesuffix(".weight") for name in binding.theirs]
    found = {f"{PREFIX}{module}.{PARTS[part]}": x for module, parts in adapted.items() for part, x in parts.items()}
    write_file(folder / WEIGHTS, found, dtype)
    ranks = {module: len(parts["a"]) for module, parts in adapted.items() if len(parts["a"]) != lora.rank}
    config = _config(lora, ranks, base) | {
        "target_modules": _targets(list(adapted), others),
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
    """`save_adapter` into a folder that appears whole or not at all, with the files that its prompts are made by.
    HubError where it holds something, and where PEFT would read another adapter from it."""
    problem = misread(shape)
    if problem:
        raise HubError(problem)
    with fresh_folder(folder) as partial:
        save_adapter(partial, tensors, shape, base=base, dtype=dtype)
        if prompts is not None:
            prompts.write(partial, shape)


def misread(shape: ModelShape) -> str:
    """What PEFT (0.21) would make of an adapter that is not what was trained; empty where it reads it as it is.

    It joins the experts of a layer to stacks by the last names of their matrices: gate and up with down, or down alone;
    and drops the adapters of other modules with these names.
    """
    adapted = [one for one in parameters(shape) if one.adapts and one.trained]
    stacked, single = (
        {
            one.adapts.removesuffix(".weight").rpartition(".")[2]
            for one in adapted
            if (one.group == "expert") == is_stack
        }
        for is_stack in (True, False)
    )
    if not stacked or (stacked in ({"down"}, {"gate", "up", "down"}) and not stacked & single):
        return ""
    why = "drops those of dense layers and shared experts" if stacked & single else "needs gate, up and down, or down"
    return (
        f"PEFT would read other adapters of experts than were trained: beside experts it {why}; export the merged "
        "model, without --adapter"
    )


def base_folder(folder: Path) -> Path:
    """The folder of the model that an adapter is for, from here or from its own place. HubError where it is not
    there."""
    named = str(adapter_config(folder).get("base_model_name_or_path") or "")
    for place in (Path(named), folder / named):
        if named and place.is_dir():
            return place
    raise HubError(
        f"{folder}/{CONFIG}: base_model_name_or_path {named!r} is not a folder here: put the model there, "
        "or change the entry"
    )


def _targets(adapted: list[str], others: list[str]) -> list[str]:
    """Last names of modules, as PEFT takes them; whole names where a module of that last name has no adapter."""
    shared = {module.rpartition(".")[2] for module in others}
    return sorted({last if (last := module.rpartition(".")[2]) not in shared else module for module in adapted})


def _theirs(binding: Binding, low: list[dict[str, Tensor]], shape: ModelShape) -> dict[str, dict[str, Tensor]]:
    """Their modules with their parts, of what one binding pairs."""
    names = [name.removesuffix(".weight") for name in binding.theirs]
    if binding.transform is STACKED:
        return {name: {part: x[expert] for part, x in low[0].items()} for expert, name in enumerate(names)}
    if binding.transform in JOINED:
        return {names[0]: _joined(binding, low)}
    made = {part: binding.transform.export([x], shape)[0] for part, x in low[0].items() if part != "a"}
    return {names[0]: {"a": low[0]["a"], **made}}


def _joined(binding: Binding, low: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of one module of theirs that is several of ours. HubError where some of them have no adapter."""
    if len(low) != len(binding.ours):
        raise HubError(
            f"{next(iter(binding.theirs))} is one matrix in PEFT's format, and only some of "
            f"{', '.join(binding.ours)} have an adapter: train model.lora.targets=attention, or export the "
            "merged model"
        )
    found = {"a": torch.cat([parts["a"] for parts in low]), "b": torch.block_diag(*(parts["b"] for parts in low))}
    return found | ({"magnitude": torch.cat([p["magnitude"] for p in low])} if "magnitude" in low[0] else {})


def _config(lora: LoRAShape, ranks: Mapping[str, int], base: str) -> dict[str, Any]:
    def alpha(rank: int) -> float:
        """What gives a module of another rank the same factor."""
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
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG).is_file()


def load_adapter(folder: Path, shape: ModelShape, widest: int = 0) -> tuple[ModelShape, dict[str, Tensor]]:
    """(the shape with the adapter, its tensors by our names, fp32). HubError where the folder holds none, where it is
    for a model of another shape, asks for what is not supported, or its rank is above `widest` (0 = any; else it must
    not grow much in memory either)."""
    config = adapter_config(folder)
    lora = lora_of(config, folder)
    if 0 < widest < lora.rank:
        raise HubError(f"{folder}/{CONFIG}: rank {lora.rank} is more than the {widest} that are taken here")
    stored = {name.removeprefix(PREFIX): one for name, one in read_header(folder / WEIGHTS).items()}
    if widest:
        _check_room(folder, stored, lora.rank)
    found: dict[str, Tensor] = {}
    adaptable = {one.adapts for one in parameters(replace(shape.base, lora=LoRAShape(rank=1)))}
    for binding in bindings(shape.base):
        if not adaptable.intersection(binding.ours):
            continue
        read = [
            {part: stored.pop(f"{name}.{theirs}").read().float()
             for part, theirs in PARTS.items() if f"{name}.{theirs}" in stored}
            for name in (name.removesuffix(".weight") for name in binding.theirs)
        ]  # fmt: skip
        wanted = {"a", "b", "magnitude"} if lora.dora else {"a", "b"}
        if any(read) and any(set(one) != wanted for one in read):
            raise HubError(
                f"{folder}: not all of {', '.join(PARTS[part] for part in sorted(wanted))} are there for "
                f"{next(iter(binding.theirs))}, or for only some of its experts: save the adapter again"
            )
        if any(read):
            _check_sizes(folder, binding, read, shape, lora.rank)
            found |= _ours(binding, read, shape, config, lora)
    if stored:
        raise HubError(f"{folder}: {_unknown(next(iter(stored)), shape)}")
    if missing := _unadapted(config, shape, found):
        raise HubError(
            f"{folder} does not fit the model: {CONFIG} names {missing}, and {WEIGHTS} has no adapter for it. "
            f"Take an adapter for as many layers as {shape.name}, or save it again"
        )
    targets = sorted({name.split(".lora.")[0].split("_lora.")[0].rpartition(".")[2] for name in found})
    return replace(shape.base, lora=replace(lora, targets=",".join(targets))), found


def _check_room(folder: Path, stored: Mapping[str, Stored], rank: int) -> None:
    """HubError where one wide module, or the config alone, makes many times as much of all others as files hold."""
    held = sum(math.prod(one.size) for one in stored.values())
    sides = ((one.size[-1:] if name.endswith(PARTS["a"]) else one.size[:1]) for name, one in stored.items())
    if (padded := sum(rank * size for side in sides for size in side)) > TOO_MANY * held:
        raise HubError(
            f"{folder} has several ranks: with rank {rank} everywhere it has {padded:,} numbers, and "
            f"{WEIGHTS} holds {held:,}. Save it with one rank"
        )


def _check_sizes(folder: Path, binding: Binding, read: list[dict[str, Tensor]], shape: ModelShape, widest: int) -> None:
    """HubError: a module's parts have other sizes than its matrix, an expert's another rank, or a rank is too large."""
    rank = next(iter(read[0]["a"].shape), 0)
    if not 0 < rank <= widest:
        raise HubError(f"{folder}: {next(iter(binding.theirs))} has rank {rank}, and {CONFIG} 1 to {widest}")
    for (name, size), one in zip(binding.theirs.items(), read, strict=True):
        size_out, size_in = reversed(size) if binding.transform is CONV1D else size
        wanted = {"a": (rank, size_in), "b": (size_out, rank), "magnitude": (size_out,)}
        for part, tensor in one.items():
            there, right = tuple(tensor.flatten().shape if part == "magnitude" else tensor.shape), wanted[part]
            if there != right:
                raise HubError(
                    f"{folder} is for another model: {PARTS[part]} of {name} is {list(there)}, and {shape.name} has "
                    f"{list(right)}. Give the model that it was trained with"
                )


def _unadapted(config: Mapping[str, Any], shape: ModelShape, found: Mapping[str, Tensor]) -> str:
    """A module that `target_modules` names and that has no adapter, although the same module of another layer has one.
    Empty where there is none, and where the config chooses modules or layers in another way than by their names."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or any(config.get(key) for key in ("layers_to_transform", "exclude_modules")):
        return ""
    adapted, rest = set[str](), dict[str, str]()
    for binding in bindings(shape.base):
        for name in (name.removesuffix(".weight") for name in binding.theirs):
            kind = re.sub(r"\.\d+\.", ".N.", name, count=1)
            if any(adapter_parts(one, found) for one in binding.ours):
                adapted.add(kind)
            elif any(name == target or name.endswith(f".{target}") for target in targets):
                rest.setdefault(kind, name)
    return next((name for kind, name in rest.items() if kind in adapted), "")


def _unknown(name: str, shape: ModelShape) -> str:
    """Why a tensor of an adapter is not read."""
    module, _, part = name.partition(".lora_")
    if f"lora_{part}" not in PARTS.values() and not module.endswith("experts"):
        return f"{name} is no tensor of a LoRA or DoRA adapter (supported: {', '.join(PARTS.values())})"
    theirs = {one.removesuffix(".weight") for binding in bindings(shape.base) for one in binding.theirs}
    if module.endswith("experts") and any(one.startswith(f"{module}.") for one in theirs):
        return f"{name} adapts a stack of experts, as PEFT 0.21 writes them; supported are experts one by one"
    if module in theirs or any(module.endswith(one) for one in ("lm_head", "embed_tokens", "wte", "wpe")):
        return f"{name} adapts a matrix that has no adapter here (supported: attention, MLP, experts)"
    return f"{name} adapts no matrix of {shape.name}: it is for another model"


def _ours(
    binding: Binding, read: list[dict[str, Tensor]], shape: ModelShape, config: Mapping[str, Any], lora: LoRAShape
) -> dict[str, Tensor]:
    """What one binding pairs, padded to one rank and with the factor of a module in its B."""
    parts: list[dict[str, Tensor]]
    if binding.transform is STACKED:
        parts = [{part: torch.stack([one[part] for one in read]) for part in read[0]}]
    elif binding.transform in JOINED:
        rows = [size[0] for size in binding.ours.values()]
        cut = {part: tensor.flatten(1).split(rows) if part == "b" else tensor.flatten().split(rows)
               for part, tensor in read[0].items() if part != "a"}  # fmt: skip
        parts = [
            {"a": read[0]["a"], **{part: pieces[place] for part, pieces in cut.items()}} for place in range(len(rows))
        ]
    else:
        rows = [size[0] for size in binding.ours.values()]
        parts = [
            {part: x if part == "a" else binding.transform.restore([x.flatten() if part == "magnitude" else x], rows,
                                                                   shape)[0] for part, x in read[0].items()}
        ]  # fmt: skip
    module = next(iter(binding.theirs)).removesuffix(".weight")
    found = {}
    for name, one in zip(binding.ours, parts, strict=True):
        prefix = adapter_prefix(name)
        factor = factor_of(module, one["a"].shape[-2], config) / lora.scale
        one["b"] = one["b"] * factor
        for part, tensor in one.items():
            found[prefix + part] = _padded(part, tensor, lora.rank)
    return found


def _padded(part: str, tensor: Tensor, rank: int) -> Tensor:
    """With zeros up to a rank: A has rows more, B columns."""
    if part == "magnitude":
        return tensor
    dim = -2 if part == "a" else -1
    missing = rank - tensor.shape[dim]
    zeros = list(tensor.shape)
    zeros[dim] = missing
    return tensor if not missing else torch.cat((tensor, tensor.new_zeros(zeros)), dim)
