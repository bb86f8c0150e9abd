"""Reader of adapter_config.json in PEFT's format. The file is untrusted, so it is checked."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.formats.hub.config import read_json
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.shape import LoRAShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNREAD = (
    "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora", "use_bdlora",
    "alora_invocation_tokens",
)  # fmt: skip
"""Entries that change the computation and are not supported."""
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initializations (init_lora_weights) that leave the weights unchanged. Others change them on each load."""
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError, re.error, PlanError)
"""Exceptions that malformed entries lead to."""
REPEATS, MOST_REPEATS, LONGEST = re.compile(r"[*+?{]"), 2, 256
"""Limits of a pattern for module names. Matching a longer one could take hours, in which no other thread runs."""


def adapter_config(folder: Path) -> dict[str, Any]:
    """Read the config of an adapter whose weights are beside it. Raises HubError for an unsupported one."""
    try:
        config = read_json(folder / CONFIG)
    except OSError as error:
        raise HubError(f"{folder}/{CONFIG} cannot be read ({error}): give a folder that PEFT has written") from error
    if config is None:
        raise HubError(f"{folder} has no {CONFIG}: give a folder that PEFT has written")
    if config.get("peft_type") != "LORA":
        raise HubError(f"{folder}/{CONFIG}: peft_type {config.get('peft_type')!r} is not supported (supported: LORA)")
    # Refused, not ignored: the adapter would compute something else without a word.
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


def lora_shape(config: Mapping[str, Any], folder: Path) -> LoRAShape:
    """Return the adapter's shape, with the largest rank of all modules. Raises HubError."""
    try:
        ranks, _ = (_pattern_numbers(config, name) for name in ("rank_pattern", "alpha_pattern"))
        return LoRAShape(
            rank=max(int(config["r"]), *map(int, ranks.values()), 1),
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    except UNREADABLE as error:
        raise HubError(f"{folder}/{CONFIG}: {error}") from error


def _pattern_numbers(config: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the numbers by pattern of module names. Raises one of UNREADABLE."""
    numbers = {key: float(value) for key, value in (config.get(name) or {}).items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"{name} must have finite numbers")
    for key in numbers:
        repeats = len(REPEATS.findall(re.compile(key).pattern))
        if len(key) > LONGEST or repeats > MOST_REPEATS or key.count("(") > 1 or re.search(r"\)[*+{]", key):
            raise ValueError(f"{name} has {key[:40]!r}, which may take hours to match: name the modules")
    return numbers


def adapter_scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the scale s of one of their modules. The config must have passed `lora_shape`.

    PEFT's rule: the first key that is the end of the module's name, or matches it, counts.
    """
    # `lora_shape` has bounded the patterns, so matching them takes no time worth a limit.
    alphas = (config.get("alpha_pattern") or {}).items()
    alpha = next((number for key, number in alphas if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
