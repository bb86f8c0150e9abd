"""torchtune: the YAML of `tune run`, for its full and low-rank recipes. Read only.

Defaults: recipes/full_finetune_distributed.py and lora_finetune_distributed.py of torchtune 0.6.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.hugging_face import adapter_facts, adapter_objections, is_adapted

BUILDER = re.compile(
    r"torchtune\.models\.((code_llama|llama|qwen|gemma|mistral|phi)(\d?)(?:_(\d))?)\.(?:q?lora_)?\1_"
    r"(\d+(?:_\d+)?b|mini)(?:_(?:base|instruct))?$"
)
"""Family, version and size in the name of a function that builds a model."""
SINGLE = "single_device"
"""Part of the name of a recipe for one GPU, without FSDP."""
NARROW = "keeps weights, gradients and optimizer states in 16 bits, which needs less memory: not counted."
YAML = ConfigFile(
    name="torchtune.yaml",
    form="yaml",
    options=(
        Option(key="model._component_", fact="builder", meaning="the function that builds the model"),
        Option(key="tokenizer.max_seq_len", fact="sequence", meaning="tokens of a sequence"),
        Option(key="batch_size", fact="micro_batch", meaning="sequences of a micro-batch"),
        Option(key="gradient_accumulation_steps", fact="accumulation", default=1, meaning="micro-batches of a step"),
        Option(key="dtype", fact="precision", words={"bf16": "bf16", "fp32": "fp32"}, meaning="of everything"),
        Option(key="enable_activation_checkpointing", fact="checkpointing", default=False,
               meaning="the backward pass makes blocks again"),
        Option(key="optimizer._component_", fact="optimizer_class", meaning="AdamW with two states"),
        Option(key="loss._component_", fact="loss_class", meaning="over chunks of logits, or over all"),
        Option(key="fsdp_reshard_after_forward", fact="resharded", default=True,
               meaning="parameters are freed after the forward pass (ZeRO-3), or kept (ZeRO-2)"),
        Option(key="data_parallel_replicate_dim", fact="dp_replicate", default=1,
               meaning="replicas that each hold all shards"),
        Option(key="data_parallel_shard_dim", fact="dp_shard", default=-1,
               meaning="ranks that share parameters, gradients and optimizer"),
        Option(key="context_parallel_dim", fact="cp", default=1, meaning="ranks that share every sequence"),
        Option(key="model.lora_rank", fact="lora_rank", meaning="rank of adapters"),
        Option(key="model.lora_alpha", fact="lora_alpha", meaning="factor of adapters, times their rank"),
        Option(key="model.lora_dropout", fact="lora_dropout", meaning="share of their input that is set to 0"),
        Option(key="model.lora_attn_modules", fact="lora_targets", meaning="matrices of attention with adapters"),
        Option(key="model.apply_lora_to_mlp", fact="lora_mlp", default=False, meaning="adapters on the MLP's"),
        Option(key="model.use_dora", fact="dora", meaning="lengths of rows are trained apart"),
        Option(key="model.quantize_base", fact="base_4bit", meaning="frozen matrices in 4 bits"),
    ),
    ignored=(
        "output_dir", "tokenizer*", "checkpointer*", "dataset*", "seed", "shuffle", "epochs", "max_steps_per_epoch",
        "optimizer.*", "lr_scheduler*", "loss*", "clip_grad_norm", "device", "metric_logger*", "log_*", "profiler*",
        "resume_from_checkpoint", "save_*", "run_val_every_n_steps", "batch_size_val", "custom_sharded_layers",
        "activation_offloading_use_streams", "cudnn_deterministic_mode", "enable_async_checkpointing", "collate_fn",
        "context_parallel_rotate_method", "model_dir", "checkpoint_dir", "keep_last_n_checkpoints", "lora_*",
        "data", "resize_token_embeddings",
    ),
    refused={
        "tensor_parallel_dim": "cuts matrices, which is not counted",
        "tensor_parallel_plan": "cuts matrices, which is not counted",
        "quantizer._component_": "rounds weights in training, or after it",
        "teacher_model._component_": "learns from a second model",
        "ref_policy_model._component_": "compares answers, and holds a frozen copy of the model",
        "policy_model._component_": "rewards answers",
        "tasks": "evaluates a model, and trains nothing",
        "prompt": "samples from a model, and trains nothing",
        "prompt.user": "samples from a model, and trains nothing",
        "ac_mode": "makes some operations again in the backward pass",
    },
    bounded={
        "enable_activation_offloading": f"keeps activations {hf.ON_HOST}",
        "fsdp_cpu_offload": f"keeps parameters, gradients and optimizer states {hf.ON_HOST}",
        "optimizer_in_bwd": "frees gradients before the step, which needs less memory",
        "compile": "compiles the model, which takes less time",
        "enable_fp8_training": "makes products of 8 bits, which takes less time",
    },
    unread=(
        UncountedOption(key="dataset.packed", counted=True, absent=False,
                        effect="pads short texts, so that fewer tokens are trained on"),
        UncountedOption(key="model.apply_lora_to_output", counted=False, absent=False,
                        effect="adds a thin adapter to the head"),
    ),
    marks=("model._component_",),
    title="configuration for tune run",
)  # fmt: skip


def _hub(builder: str) -> str:
    """Return the name of the model that a function builds. Raises PlanError if it is not counted."""
    match = BUILDER.match(builder)
    if match is None:
        raise PlanError(f"model._component_={builder} is not counted: give a model of text, by MODEL")
    family, version, minor, size = match.groups()[1:]
    size = size.replace("_", ".")
    if family == "code_llama":
        return f"codellama-{size}"
    if family == "phi":
        return "phi-3-mini-4k" if version == "3" else "phi-4"
    number = f"{version}.{minor}" if minor else version
    dash = "" if family == "qwen" else "-"
    return "-".join(filter(None, (f"{family}{dash}{number}".rstrip("-"), size)))


def noticed(entries: object) -> Facts:
    """Return the model's name and the adapters, by the function that builds the model."""
    values = {entry.key: entry.value for entry in entries}  # type: ignore[attr-defined]  # entries of a file
    builder = str(values.get("model._component_", ""))
    low = "lora_" in builder
    resolved: Facts = {"adapter": "lora"} if low else {}
    resolved |= {"base_4bit": True} if "qlora_" in builder else {}
    return resolved | {"hub": _hub(builder)}


def resolve(facts: Facts) -> Facts:
    """Return adapters, recomputation and sharding, by the recipe that the file's name belongs to."""
    resolved = dict(facts)
    # A switch of its own for the MLP, in addition to the list of attention matrices.
    if resolved.get("lora_mlp"):
        named = resolved.get("lora_targets") or []
        resolved["lora_targets"] = [*named, "gate_proj", "up_proj", "down_proj"]
    resolved |= adapter_facts(resolved)
    resolved["recompute"] = "full" if hf.is_on(resolved.get("checkpointing")) else "none"
    resolved["precision"] = resolved.get("precision") or "bf16"
    # The recipe is named on the command line alone; by custom the file is called like it.
    if SINGLE in str(resolved.get("file_name")):
        return {**resolved, "zero": 0, "dp_shard": 1, "dp_replicate": 1, "devices": 1}
    return {**resolved, "zero": 3 if hf.is_on(resolved.get("resharded")) else 2}


def objections(facts: Facts) -> Iterator[str]:
    """Yield optimizers and losses that are not counted."""
    optimizer = str(facts.get("optimizer_class") or "")
    if not optimizer:
        yield "no optimizer is named: the file trains nothing"
    elif not optimizer.endswith(("AdamW", "Adam")) and not hf.SMALLER.search(optimizer.lower()):
        yield f"optimizer {optimizer} is not counted: take torch.optim.AdamW"
    if re.search(r"DPO|RSO|IPO|SimPO|KD|PPO|GRPO", str(facts.get("loss_class") or "")):
        yield f"loss {facts['loss_class']} compares answers or learns from a second model, which is not counted"
    yield from adapter_objections(facts)


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time."""
    if not is_adapted(facts) and facts.get("precision") != "fp32":
        yield f"dtype=bf16 {NARROW}"
    yield from hf.smaller_states(str(facts.get("optimizer_class") or ""))
    loss = str(facts.get("loss_class") or "")
    if "Chunked" in loss or "Linear" in loss:
        yield f"loss {loss.rpartition('.')[2]} {hf.NO_LOGITS}: not counted."


TORCHTUNE = TrainingSoftware(
    word="torchtune",
    title="torchtune 0.6",
    stack=lambda facts: replace(hf.FSDP, name="torchtune"),
    offered={**hf.OFFERED, "tp": (1,), "sp": (False,), "zero": (0, 2, 3)},
    reasons=hf.REASONS,
    split_refusal=hf.fsdp_refusal,
    files=(YAML,),
    noticed=noticed,
    resolve=resolve,
    objections=objections,
    bounds=bounds,
    binds_devices=True,
    unknown=(hf.NOT_SCORED,),
    axes={"micro_batch": "batch_size", "zero": "fsdp_reshard_after_forward", "cp": "context_parallel_dim",
          "recompute": "enable_activation_checkpointing", "dp_shard": "data_parallel_shard_dim",
          "dp_replicate": "data_parallel_replicate_dim"},
)  # fmt: skip
