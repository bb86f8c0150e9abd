"""LitGPT: the YAML of `litgpt finetune_full`, `finetune_lora` and `pretrain`. Read only.

Defaults: litgpt/finetune/full.py, finetune/lora.py and pretrain.py of LitGPT 0.5.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.hugging_face import adapter_facts, is_adapted
from meshwright.stacks.trainers.torchtune import NARROW

BASES = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "bnb.int8": "llm-int8"}
"""quantize -> storage of frozen matrices."""
MATRICES = {
    "query": "q", "key": "k", "value": "v", "projection": "o", "mlp": "gate,up,down",
}  # fmt: skip
YAML = ConfigFile(
    name="litgpt.yaml",
    form="yaml",
    options=(
        Option(key="checkpoint_dir", fact="hub", meaning="folder of the model, by its name on the hub",
               also=("model_name",)),
        Option(key="train.max_seq_length", fact="sequence", meaning="tokens of a sequence"),
        Option(key="train.micro_batch_size", fact="micro_batch", default=1, meaning="sequences of a micro-batch"),
        Option(key="train.global_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
        Option(key="precision", fact="word", default="bf16-mixed", meaning="of weights and products"),
        Option(key="quantize", fact="quantized", meaning="frozen matrices in fewer bits"),
        Option(key="devices", fact="node_devices", default=1, meaning="GPUs of a node"),
        Option(key="num_nodes", fact="nodes", default=1, meaning="nodes"),
        Option(key="optimizer.class_path", fact="optimizer_class", default="torch.optim.AdamW",
               meaning="AdamW with two states"),
        Option(key="lora_r", fact="lora_rank", meaning="rank of adapters"),
        Option(key="lora_alpha", fact="lora_alpha", default=16, meaning="factor of adapters, times their rank"),
        Option(key="lora_dropout", fact="lora_dropout", default=0.05, meaning="share of their input set to 0"),
        Option(key="lora_query", fact="lora_query", default=True, meaning="adapters on queries"),
        Option(key="lora_key", fact="lora_key", default=False, meaning="on keys"),
        Option(key="lora_value", fact="lora_value", default=True, meaning="on values"),
        Option(key="lora_projection", fact="lora_projection", default=False, meaning="on attention's output"),
        Option(key="lora_mlp", fact="lora_mlp", default=False, meaning="on matrices of the MLP"),
    ),
    ignored=(
        "out_dir", "data", "data.*", "train.*", "eval.*", "logger_name", "log.*", "seed", "optimizer", "optimizer.*",
        "access_token", "resume", "tokenizer_dir", "initial_checkpoint_dir", "eval", "train", "log", "ops",
    ),
    refused={
        "adapter_prompt_length": "trains prompts in place of adapters",
        "model_config": "makes a model of its own",
        "train.tie_embeddings": "ties embedding and head",
    },
    unread=(
        UncountedOption(key="lora_head", counted=False, absent=False, effect="adds a thin adapter to the head"),
    ),
    marks=("train.micro_batch_size", "train.global_batch_size", "train.max_seq_length"),
    title="configuration for litgpt",
)  # fmt: skip


def noticed(entries: object) -> Facts:
    """Return the facts by which LitGPT's programs differ: pre-training names a model, and adapters have options."""
    keys = {entry.key for entry in entries if entry.value is not None}  # type: ignore[attr-defined]  # entries of a file
    resolved: Facts = {"pretrains": "model_name" in keys or "initial_checkpoint_dir" in keys}
    return resolved | ({"adapter": "lora"} if any(key.startswith("lora_") for key in keys) else {})


def resolve(facts: Facts) -> Facts:
    """Return adapters, precision and sharding. Each program has one way to shard (FSDPStrategy of its source)."""
    resolved = dict(facts)
    if is_adapted(resolved):
        adapted_matrices = [ours for name, ours in MATRICES.items() if resolved.get(f"lora_{name}")]
        lora = adapter_facts({**resolved, "lora_targets": []})["lora"]
        base = BASES.get(str(resolved.get("quantized")), "same")
        resolved["lora"] = {**lora, "targets": ",".join(adapted_matrices), "base": base}
    resolved["precision"] = re.split("[-_]", str(resolved.get("word") or "bf16-mixed"))[0].replace("32", "fp32")
    resolved["precision"] = {"16": "fp16"}.get(resolved["precision"], resolved["precision"])
    nodes, per_node = resolved.get("nodes") or 1, resolved.get("node_devices")  # a number, or auto
    alone = per_node == 1 and nodes == 1
    if isinstance(per_node, int):
        resolved["devices"] = per_node * nodes
    if alone:
        return {**resolved, "zero": 0, "dp_shard": 1, "dp_replicate": 1, "recompute": "none"}
    # litgpt pretrain shards within a node and keeps activations; fine-tuning shards over all devices and recomputes.
    pretrains = bool(resolved.get("pretrains"))
    resolved["recompute"] = "none" if pretrains else "full"
    shard = per_node if pretrains and isinstance(per_node, int) else None
    return {**resolved, "zero": 3, "dp_shard": shard, "dp_replicate": nodes if shard else 1}


def objections(facts: Facts) -> Iterator[str]:
    """Yield reasons why a file cannot be modelled: its optimizer, its quantization, or no matrix with an adapter."""
    optimizer = str(facts.get("optimizer_class") or "")
    if not optimizer.endswith(("AdamW", "Adam")) and not hf.SMALLER.search(optimizer.lower()):
        yield f"optimizer {optimizer} is not counted: take torch.optim.AdamW"
    quantized = facts.get("quantized")
    if quantized and str(quantized) not in BASES:
        yield f"quantize={quantized} is not counted: take one of {', '.join(BASES)}"
    if quantized and not is_adapted(facts):
        yield f"quantize={quantized} trains quantized matrices, which is not modelled"
    if is_adapted(facts) and not any(facts.get(f"lora_{name}") for name in MATRICES):
        yield "no matrix has an adapter: turn on lora_query or another lora_* option"


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time."""
    # The suffix -true holds weights and states in 16 bits, where the count has fp32 of both.
    if str(facts.get("word")) in ("bf16-true", "16-true") and not is_adapted(facts):
        yield f"precision={facts['word']} {NARROW}"
    yield from hf.smaller_states(str(facts.get("optimizer_class") or ""))
    if facts.get("pretrains"):
        yield "litgpt pretrain compiles the model, which takes less time: not counted."


LITGPT = TrainingSoftware(
    word="litgpt",
    title="LitGPT 0.5",
    stack=lambda facts: replace(hf.FSDP, name="litgpt"),
    offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 3)},
    reasons=hf.REASONS,
    split_refusal=hf.fsdp_refusal,
    files=(YAML,),
    noticed=noticed,
    resolve=resolve,
    objections=objections,
    bounds=bounds,
    binds_devices=True,
    unknown=(hf.NOT_SCORED,),
    axes={"micro_batch": "train.micro_batch_size"},
)  # fmt: skip
