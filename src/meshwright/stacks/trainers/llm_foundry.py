"""LLM Foundry: the YAML of `composer train.py`, for MPT and for models of transformers. Read only.

Defaults: llmfoundry/models/mpt/configuration_mpt.py and composer's FSDP, of LLM Foundry 0.22.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.accelerate_fsdp import STRATEGIES
from meshwright.stacks.trainers.hugging_face import adapter_facts

MPT, PUBLIC = "mpt_causal_lm", ("hf_causal_lm",)
YAML = ConfigFile(
    name="foundry.yaml",
    form="yaml",
    options=(
        Option(key="model.name", fact="kind", meaning="MPT, or a model of transformers"),
        Option(key="model.pretrained_model_name_or_path", fact="hub", meaning="model, by its name on the hub"),
        Option(key="model.d_model", fact="hidden", meaning="width of the residual stream"),
        Option(key="model.n_heads", fact="heads", meaning="query heads"),
        Option(key="model.n_layers", fact="layers", meaning="transformer blocks"),
        Option(key="model.expansion_ratio", fact="ratio", default=4, meaning="inner width of the MLP, over the outer"),
        Option(key="model.vocab_size", fact="vocab", meaning="rows of the embedding"),
        Option(key="model.max_seq_len", fact="max_positions", meaning="longest sequence"),
        Option(key="model.no_bias", fact="no_bias", default=False, meaning="matrices and norms without biases"),
        Option(key="model.learned_pos_emb", fact="learned", default=True, meaning="positions are added"),
        Option(key="model.tie_word_embeddings", fact="tied", default=True, meaning="head and embedding are one"),
        Option(key="model.attn_config.attn_impl", fact="kernel", default="flash", meaning="of attention"),
        Option(key="model.attn_config.alibi", fact="alibi", default=False, meaning="positions bias the scores"),
        Option(key="model.attn_config.rope", fact="rotary", default=False, meaning="positions turn queries and keys"),
        Option(key="model.attn_config.kv_n_heads", fact="kv_heads", meaning="key heads"),
        Option(key="model.peft_config.peft_type", fact="peft_type", meaning="adapters in place of the weights"),
        Option(key="model.peft_config.r", fact="lora_rank", meaning="rank of adapters"),
        Option(key="model.peft_config.lora_alpha", fact="lora_alpha", meaning="factor of adapters, times their rank"),
        Option(key="model.peft_config.lora_dropout", fact="lora_dropout", meaning="share of their input set to 0"),
        Option(key="model.peft_config.target_modules", fact="lora_targets", meaning="matrices with adapters"),
        Option(key="max_seq_len", fact="sequence", meaning="tokens of a sequence"),
        Option(key="global_train_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
        Option(key="device_train_microbatch_size", fact="micro_batch", meaning="sequences of a micro-batch",
               also=("device_train_grad_accum_size",)),
        Option(key="precision", fact="word", default="amp_bf16", meaning="of products",
               words={"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32"}),
        Option(key="fsdp_config.sharding_strategy", fact="strategy", meaning="how ranks share"),
        Option(key="fsdp_config.activation_checkpointing", fact="checkpointing", default=False,
               meaning="the backward pass makes blocks again"),
        Option(key="fsdp_config.mixed_precision", fact="wide_words", meaning="of what ranks exchange"),
        Option(key="optimizer.name", fact="optimizer_name", meaning="AdamW with two states"),
    ),
    ignored=(
        "variables*", "run_name", "model.init_device", "model.pretrained", "model.use_auth_token", "model.init_config*",
        "model.use_flash_attention_2", "model.attn_config.attn_uses_sequence_id", "model.emb_pdrop",
        "model.resid_pdrop", "model.attn_config.attn_pdrop", "model.attn_config.attn_type",
        "model.attn_config.clip_qkv", "model.attn_config.alibi_bias_max", "model.attn_config.rope_*",
        "model.attn_config.softmax_scale",
        "model.config_overrides*", "model.loss_fn", "model.norm_type", "model.peft_config*", "model.use_cache",
        "tokenizer*", "train_loader*", "eval_loader*", "scheduler*", "optimizer*", "algorithms*", "max_duration",
        "eval_*", "seed", "device_eval_*", "progress_bar", "log_*", "console_log_interval", "callbacks*", "loggers*",
        "save_*", "load_*", "dist_timeout", "expandable_segments", "autoresume", "python_log_level", "icl_*",
        "fsdp_config", "fsdp_config.activation_checkpointing_reentrant", "fsdp_config.limit_all_gathers",
        "fsdp_config.verbose", "fsdp_config.state_dict_type", "fsdp_config.backward_prefetch",
        "fsdp_config.forward_prefetch", "fsdp_config.use_orig_params", "fsdp_config.sync_module_states",
        "fsdp_config.load_*", "global_seed", "data_local", "data_remote", "tokenizer_name", "model_name", "metadata*",
        "model.attn_config", "model.ffn_config", "fsdp_config.cpu_offload", "fsdp_config.flatten_parameters",
    ),
    refused={
        "model.block_overrides": "makes blocks that differ",
        "model.ffn_config.ffn_type": "has another MLP",
        "model.attn_config.sliding_window_size": "attends within a window",
        "tp_config.strategy": "cuts matrices",
        "tp_config.tensor_parallel_degree": "cuts matrices",
        "fsdp_config.te_checkpoint_wrapper": "keeps some operations of a block",
        "fsdp_config.activation_checkpointing_target": "makes some operations again in the backward pass",
    },
    bounded={
        "fsdp_config.activation_cpu_offload": f"keeps activations {hf.ON_HOST}",
        "compile_config": "compiles the model, which takes less time",
    },
    marks=("device_train_microbatch_size", "device_train_grad_accum_size", "global_train_batch_size"),
    title="configuration for LLM Foundry's train.py",
)  # fmt: skip


def shape_named(facts: Facts) -> ModelShape | None:
    """Return MPT's shape from its sizes, or None for another model.

    It has GPT-2's block, optionally without biases. Positions are learned, rotary or a bias of the scores.
    """
    if facts.get("kind") != MPT:
        return None
    sizes = {name: facts.get(name) for name in ("hidden", "heads", "layers", "vocab")}
    if missing := [name for name, size in sizes.items() if not isinstance(size, int)]:
        raise PlanError(f"the model's {', '.join(missing)} are not said")
    width = round(float(sizes["hidden"] or 0) * float(facts.get("ratio") or 4))
    biased, added = not facts.get("no_bias"), facts.get("learned") and not facts.get("alibi")
    rotary = hf.is_on(facts.get("rotary"))
    positions = {"positions": "learned"} if added and not rotary else {"positions": "rope", "rope_theta": 1e4}
    unturned = {} if added or rotary else {"unbuilt": {"unrotated_every": 1}}
    return presets.shape_of({
        "name": "mpt", "family": "gpt2", **sizes, "kv_heads": facts.get("kv_heads") or sizes["heads"], "ffn": width,
        "max_positions": facts.get("max_positions") or facts.get("sequence") or 2048, "norm": "layernorm",
        "norm_eps": 1e-5, "mlp": "gelu_tanh", "qkv_bias": biased, "out_bias": biased, "mlp_bias": biased,
        "tied": facts.get("tied", True), **positions, **unturned,
    })  # fmt: skip


def resolve(facts: Facts) -> Facts:
    """Return precision, recomputation and sharding."""
    resolved = {**facts, "precision": facts.get("word"), "adapter": "lora" if facts.get("peft_type") else None}
    resolved |= adapter_facts(resolved)
    resolved["recompute"] = "full" if hf.is_on(resolved.get("checkpointing")) else "none"
    strategy = resolved.get("strategy")
    if strategy is None:
        return {**resolved, "zero": 0, "dp_shard": 1}
    if str(strategy) not in STRATEGIES:
        raise PlanError(f"fsdp_config.sharding_strategy={strategy} is not understood: take {', '.join(STRATEGIES)}")
    zero = STRATEGIES[str(strategy)]
    hybrid = str(strategy).startswith("HYBRID")
    shard = resolved.get("devices_per_node") if hybrid else None
    return {
        **resolved,
        "zero": zero,
        "dp_shard": shard if zero else 1,
        "dp_replicate": None if hybrid or not zero else 1,
    }


def objections(facts: Facts) -> Iterator[str]:
    """Yield models, kernels and optimizers that are not counted."""
    kind = str(facts.get("kind"))
    if kind not in (MPT, *PUBLIC):
        yield f"model.name={kind} is not counted: take {', '.join((MPT, *PUBLIC))}"
    if kind == MPT and facts.get("kernel") == "torch":
        yield "attn_impl=torch writes the weights of attention, which is not counted: take flash"
    optimizer = str(facts.get("optimizer_name") or "decoupled_adamw")
    # Composer's decoupled_adamw has the two fp32 states of AdamW.
    if "adam" not in optimizer and not hf.SMALLER.search(optimizer):
        yield f"optimizer {optimizer} is not counted: take decoupled_adamw"
    if facts.get("peft_type") and str(facts["peft_type"]).upper() != "LORA":
        yield f"peft_type={facts['peft_type']} is not counted: take LORA"


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time."""
    yield from hf.smaller_states(str(facts.get("optimizer_name") or ""))


LLM_FOUNDRY = TrainingSoftware(
    word="llm-foundry",
    title="LLM Foundry 0.22",
    stack=lambda facts: replace(hf.FSDP, name="llm-foundry"),
    offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 2, 3)},
    reasons=hf.REASONS,
    split_refusal=hf.fsdp_refusal,
    files=(YAML,),
    shape=shape_named,
    resolve=resolve,
    objections=objections,
    bounds=bounds,
    unknown=(hf.NOT_SCORED,),
    axes={"micro_batch": "device_train_microbatch_size", "zero": "fsdp_config.sharding_strategy",
          "recompute": "fsdp_config.activation_checkpointing"},
)  # fmt: skip
