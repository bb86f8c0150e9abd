"""Low-rank adapters as trainers over transformers and PEFT state them."""

import re
from collections.abc import Iterator

from meshwright.stacks.declaration.option import Facts, Option

MATRICES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "qkv_proj": "q,k,v", "gate_up_proj": "gate,up", "dense": "o", "out_proj": "o",
    "output_proj": "o", "w1": "gate", "w2": "down", "w3": "up",
    "self_attn": "attention", "mlp": "mlp",
}  # fmt: skip
"""PEFT's names of matrices -> Meshwright's."""
EVERY = ("all", "all-linear")
BY_DEFAULT = "q,v"
"""peft/utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING: Llama, Mistral, Qwen."""
WHOLE = {
    "embed_tokens": "embedding", "wte": "embedding", "tok_embeddings": "embedding", "embedding": "embedding",
    "embeddings": "embedding",
    "lm_head": "head", "output_layer": "head",
}  # fmt: skip
"""Names of matrices that are trained whole -> Meshwright's."""
KINDS = ("lora", "qlora", "True", "true")
OFF = ("full", "False", "false", "None", "")
FROZEN = "freeze"
"""LLaMA-Factory's word for training some layers only."""
FULL_OPTIONS = (
    Option(key="lora_alpha", fact="lora_alpha", meaning="factor of adapters, times their rank"),
    Option(key="lora_target_modules", fact="lora_targets", also=("lora_target",), meaning="matrices with adapters"),
    Option(key="lora_dropout", fact="lora_dropout", meaning="share of their input that is set to 0"),
    Option(key="lora_modules_to_save", fact="whole_matrices", also=("additional_target",),
           meaning="matrices that are trained whole beside them"),
    Option(key="use_dora", fact="dora", also=("peft_use_dora",), meaning="lengths of rows are trained apart"),
    Option(key="load_in_4bit", fact="base_4bit", meaning="frozen matrices in 4 bits"),
    Option(key="load_in_8bit", fact="base_8bit", meaning="frozen matrices in 8 bits"),
)  # fmt: skip
"""Options that these trainers share. Each names adapters and their rank in its own way."""


def is_adapted(facts: Facts) -> bool:
    """Return True if adapters are trained instead of the weights."""
    return str(facts.get("adapter")) in KINDS


def adapter_facts(facts: Facts) -> Facts:
    """Return `lora`, the fields of the adapters' shape. Empty if all weights are trained."""
    if not is_adapted(facts):
        return {}
    four, eight = _on(facts, "base_4bit") or facts.get("base_bits") == 4, _on(facts, "base_8bit")
    base = "llm-int8" if eight or facts.get("base_bits") == 8 else "same"
    nested = facts.get("nested", True) is not False
    rank = facts.get("lora_rank") or 8
    whole = {WHOLE[name] for name in _whole(facts) if name in WHOLE}
    return {"whole": ",".join(sorted(whole)), "lora": {
        "rank": rank, "alpha": float(facts.get("lora_alpha") or 2 * rank), "targets": _targets(facts) or BY_DEFAULT,
        "base": ("nf4-double" if nested else "nf4") if four else base, "dora": _on(facts, "dora"),
        "dropout": float(facts.get("lora_dropout") or 0.0),
    }}  # fmt: skip


def objections(facts: Facts) -> Iterator[str]:
    """Yield kinds of tuning that are neither adapters nor all weights."""
    kind = str(facts.get("adapter"))
    if kind not in (*KINDS, *OFF, FROZEN):
        yield f"adapter={kind} trains other parameters than low-rank adapters, which is not counted: take lora"
    coded = _on(facts, "base_4bit") or _on(facts, "base_8bit") or facts.get("base_bits")
    if coded and not is_adapted(facts):
        yield "matrices of 4 or 8 bits are not trained: name an adapter beside load_in_4bit or load_in_8bit"
    unknown = [] if not is_adapted(facts) or _targets(facts) == "all" else _unknown(facts)
    if unknown:
        yield f"adapters of {', '.join(unknown)} are not counted: take names of {', '.join(MATRICES)}"
    if is_adapted(facts) and (others := [name for name in _whole(facts) if name not in WHOLE]):
        yield (
            f"{', '.join(others)} are trained whole beside adapters, which needs more memory than is counted: take "
            f"names of {', '.join(WHOLE)}, or leave them out"
        )


def _whole(facts: Facts) -> list[str]:
    """Return the names of matrices that are trained whole, without their modules."""
    named = facts.get("whole_matrices")
    listed = map(str, named) if isinstance(named, list) else re.split(r"[,\s]+", str(named or ""))
    return [name.rpartition(".")[2] for name in listed if name and name.lower() not in ("none", "null")]


def _unknown(facts: Facts) -> list[str]:
    """Return names of adapted matrices that no model here has. The last part of a path counts."""
    named = facts.get("lora_targets")
    listed = map(str, named) if isinstance(named, list) else re.split(r"[,\s]+", str(named or ""))
    words = [re.split(r"\W+", name.strip("$)")) for name in listed if name]
    return [parts[-1] for parts in words if not any(part in MATRICES for part in parts)]


def _targets(facts: Facts) -> str:
    named = facts.get("lora_targets")
    if _on(facts, "lora_every") or named in EVERY or named in [[every] for every in EVERY]:
        return "all"
    words = re.findall(r"\w+", " ".join(map(str, named)) if isinstance(named, list) else str(named or ""))
    return ",".join(dict.fromkeys(MATRICES[word] for word in words if word in MATRICES))


def _on(facts: Facts, name: str) -> bool:
    return str(facts.get(name) or False).lower() == "true"
