"""What adapter_config.json says of an adapter in PEFT's format. Whoever wrote the folder wrote it: it is checked."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.model.hub.folder_config import read_json
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.lora import LoRAShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNREAD = (
    "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora", "use_bdlora",
    "alora_invocation_tokens",
)  # fmt: skip
"""Entries of a config that change what is computed and have no place here."""
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin (init_lora_weights) that leave the weights as they are: others change them on each load."""
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError, re.error, PlanError)
"""What entries of another kind than PEFT's end in."""
REPEATS, MOST_REPEATS, LONGEST = re.compile(r"[*+?{]"), 2, 256
"""Of a pattern for names of modules. One with more could be matched for hours, in which no other thread runs."""


def adapter_config(folder: Path) -> dict[str, Any]:
    """The config of an adapter whose weights are beside it. HubError where there is none, or it asks for what is not
    supported."""
    try:
        config = read_json(folder / CONFIG)
    except OSError as error:
        raise HubError(f"{folder}/{CONFIG} cannot be read ({error}): give a folder that PEFT has written") from error
    if config is None:
        raise HubError(f"{folder} has no {CONFIG}: give a folder that PEFT has written")
    if config.get("peft_type") != "LORA":
        raise HubError(f"{folder}/{CONFIG}: peft_type {config.get('peft_type')!r} is not supported (supported: LORA)")
    for key in UNREAD:
        if config.get(key):
            raise HubError(f"{folder}/{CONFIG}: {key} is not supported")
    if config.get("init_lora_weights") not in BEGINNINGS:
        raise HubError(
            f"{folder}/{CONFIG}: init_lora_weights={config['init_lora_weights']!r} changes the model's weights: save "
            "it in PEFT as a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") != "none":
        raise HubError(f"{folder}/{CONFIG}: bias={config['bias']!r} is not supported (supported: none)")
    if not (folder / WEIGHTS).is_file():
        raise HubError(f"{folder} has no {WEIGHTS}: copy or download the adapter again")
    return config


def lora_of(config: Mapping[str, Any], folder: Path) -> LoRAShape:
    """Its shape, with the largest rank of all modules. HubError."""
    try:
        ranks, _ = (_by_pattern(config, name) for name in ("rank_pattern", "alpha_pattern"))
        return LoRAShape(
            rank=max(int(config["r"]), *map(int, ranks.values()), 1),
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    except UNREADABLE as error:
        raise HubError(f"{folder}/{CONFIG}: {error}") from error


def _by_pattern(config: Mapping[str, Any], name: str) -> dict[str, float]:
    """Numbers of modules that a pattern names. One of UNREADABLE."""
    found = {key: float(value) for key, value in (config.get(name) or {}).items()}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"{name} must have finite numbers")
    for key in found:
        repeats = len(REPEATS.findall(re.compile(key).pattern))
        if len(key) > LONGEST or repeats > MOST_REPEATS or key.count("(") > 1 or re.search(r"\)[*+{]", key):
            raise ValueError(f"{name} has {key[:40]!r}, which may take hours to match: name the modules")
    return found


def factor_of(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """s of one of their modules, of a config that has passed `lora_of`. PEFT's rule: the first key that is the end of
    the module's name, or matches it."""
    alphas = (config.get("alpha_pattern") or {}).items()
    alpha = next((one for key, one in alphas if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
