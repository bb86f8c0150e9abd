"""What `tune` takes where nothing else is said; `plan --tune` plans for the same."""

from collections.abc import Container, Mapping

SAMPLES = "data.form=samples"
TUNED_RANK = 16
"""Of adapters."""
CODED_BASE = "nf4-double"
"""How frozen matrices are held where `plan` is asked for qlora (arXiv:2305.14314)."""
DEFAULTS: Mapping[str, str] = {
    "recipe.epochs": "3",
    "recipe.sequence": "1024",
    "recipe.global_batch": "16",
    "recipe.learning_rate": "2e-5",
    "recipe.weight_decay": "0",
}
"""Of fine-tuning all weights; TRL's SFTConfig has the same, but for the batch of 8 and a linear fall to 0."""
ADAPTER_FACTOR = 10
"""Of learning rates, where adapters alone are trained (Thinking Machines 2025, "LoRA Without Regret")."""
PREFERENCE_DEFAULTS: Mapping[str, str] = {
    **DEFAULTS,
    "recipe.objective": "dpo",
    "recipe.epochs": "1",
    "recipe.sequence": "2048",
    "recipe.learning_rate": "1e-6",
}
"""Of a file with chosen and rejected answers, two of which share a row; TRL's DPOConfig has the same rate."""
RATES = {"orpo": "8e-6"}
"""Learning rates of objectives that have one of their own (arXiv:2403.07691, appendix C)."""
SHARED: Mapping[str, str] = {"layout.dp_shard": "auto", "layout.zero": "1"}
"""On several processes, where nothing is said of the layout: each reads other rows, and they share the optimizer's
states, which sends as much as if each had all of them."""
INSTEAD = {"recipe.epochs": ("recipe.steps", "recipe.tokens")}
"""A default that is not taken where one of these keys is given."""


def defaults_of(defaults: Mapping[str, str], keys: Container[str]) -> dict[str, str]:
    """Those that nothing is said of."""
    taken = {key: value for key, value in defaults.items() if key not in keys}
    return {key: value for key, value in taken.items() if not any(one in keys for one in INSTEAD.get(key, ()))}


def rate_of_adapters(rate: str) -> str:
    """The learning rate of adapters where that of all weights is `rate`."""
    return f"{ADAPTER_FACTOR * float(rate):g}"
