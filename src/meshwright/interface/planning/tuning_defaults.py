"""Defaults of `tune`, and of `plan --tune`."""

from collections.abc import Container, Mapping

SAMPLES = "data.form=samples"

TUNED_RANK = 16
"""Rank of adapters."""

CODED_BASE = "nf4-double"
"""Format of frozen matrices when `plan` is asked for qlora (arXiv:2305.14314)."""

DEFAULTS: Mapping[str, str] = {
    "recipe.epochs": "3",
    "recipe.sequence": "1024",
    "recipe.global_batch": "16",
    "recipe.learning_rate": "2e-5",
    "recipe.weight_decay": "0",
}
"""Defaults for all weights. TRL's SFTConfig has the same, except for a batch of 8 and a linear decay to 0."""

ADAPTER_FACTOR = 10
"""Factor on learning rates when only adapters are trained (Thinking Machines 2025, "LoRA Without Regret")."""

PREFERENCE_DEFAULTS: Mapping[str, str] = {
    **DEFAULTS,
    "recipe.objective": "dpo",
    "recipe.epochs": "1",
    "recipe.sequence": "2048",
    "recipe.learning_rate": "1e-6",
}
"""Defaults for files of chosen and rejected answers, two of which share a row. TRL's DPOConfig has this rate."""

RATES = {"orpo": "8e-6"}
"""Learning rates of objectives with one of their own (arXiv:2403.07691, appendix C)."""

SHARED: Mapping[str, str] = {"layout.dp_shard": "auto", "layout.zero": "1"}
"""Defaults on several processes without a given layout. Each reads other rows, and they share the optimizer's states.

That sends as much as if each held all states.
"""

INSTEAD = {"recipe.epochs": ("recipe.steps", "recipe.tokens")}
"""Default -> keys that replace it."""


def defaults_of(defaults: Mapping[str, str], keys: Container[str]) -> dict[str, str]:
    """Return the defaults for which nothing is given."""
    taken = {key: value for key, value in defaults.items() if key not in keys}
    return {key: value for key, value in taken.items() if not any(other in keys for other in INSTEAD.get(key, ()))}


def rate_of_adapters(rate: str) -> str:
    """Return the learning rate of adapters, for that of all weights."""
    return f"{ADAPTER_FACTOR * float(rate):g}"
