"""axolotl: the YAML of `axolotl train`, with FSDP2."""

from collections.abc import Iterator

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.accelerate_fsdp import RESHARDED
from meshwright.stacks.trainers.deepspeed import deepspeed_variant, zero_degrees
from meshwright.stacks.trainers.hugging_face import ADAPTER_OPTIONS, is_adapted

YAML = ConfigFile(
    name="axolotl.yaml",
    form="yaml",
    options=(
        Option(key="base_model", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(key="sequence_len", fact="sequence", default=512, meaning="tokens of a packed sequence"),
        Option(key="micro_batch_size", fact="micro_batch", default=1, meaning="sequences of a micro-batch on a GPU"),
        Option(key="gradient_accumulation_steps", fact="accumulation", default=1, meaning="micro-batches of a step"),
        Option(key="bf16", fact="bf16", default="auto", meaning="products in bfloat16"),
        Option(key="fp16", fact="fp16", meaning="in float16, with loss scaling"),
        Option(key="gradient_checkpointing", fact="checkpointing", default=False, also=("activation_checkpointing",),
               meaning="the backward pass makes blocks again"),
        Option(key="optimizer", fact="optimizer", meaning="AdamW with two states"),
        Option(key="attn_implementation", fact="attention_kernel", meaning="of attention"),
        Option(key="eager_attention", fact="writes_scores", meaning="the weights of attention are written"),
        Option(key="rl", fact="rl", meaning="a loss over pairs of answers"),
        Option(key="plugins", fact="plugins", meaning="what replaces parts of it"),
        Option(key="learning_rate", fact="learning_rate", meaning="yours to choose"),
        Option(key="max_steps", fact="steps", meaning="optimizer steps: yours to choose"),
        Option(key="adapter", fact="adapter", meaning="low-rank adapters in place of the weights"),
        Option(key="lora_r", fact="lora_rank", meaning="rank of adapters"),
        Option(key="lora_target_linear", fact="lora_every", meaning="adapters on every matrix of a block"),
        *ADAPTER_OPTIONS,
        Option(key="deepspeed", fact="deepspeed_file", meaning="file of DeepSpeed, which shards in FSDP's place"),
        Option(key="fsdp", fact="fsdp_words", meaning="words of FSDP 1"),
        Option(key="fsdp_config.sharding_strategy", fact="strategy", also=("fsdp_config.fsdp_sharding_strategy",),
                meaning="of FSDP 1"),
        Option(key="fsdp_version", fact="fsdp_version", meaning="fully_shard, by tensors"),
        Option(key="fsdp_config.reshard_after_forward", fact="resharded",
               also=("fsdp_config.fsdp_reshard_after_forward",),
               meaning="true: parameters are freed after the forward pass (ZeRO-3); false: kept (ZeRO-2)"),
        Option(key="fsdp_config.activation_checkpointing", fact="fsdp_checkpointing", meaning="the same by FSDP",
               also=("fsdp_config.fsdp_activation_checkpointing",)),
        Option(key="fsdp_config.auto_wrap_policy", fact="wrap", meaning="a unit per block",
               also=("fsdp_config.fsdp_auto_wrap_policy",)),
        Option(key="fsdp_config.offload_params", fact="offload_params", meaning="nothing in host memory",
               also=("fsdp_config.fsdp_offload_params",)),
        Option(key="fsdp_config.state_dict_type", fact="state_dict", meaning="a checkpoint file per rank",
               also=("fsdp_config.fsdp_state_dict_type",)),
        Option(key="dp_shard_size", fact="dp_shard", meaning="ranks that share parameters, gradients and optimizer"),
        Option(key="dp_replicate_size", fact="dp_replicate", meaning="replicas that each hold all shards"),
        Option(key="context_parallel_size", fact="cp", default=1, also=("sequence_parallel_degree",),
               meaning="ranks that share every sequence"),
        Option(key="tensor_parallel_size", fact="tp", default=1, quiet=True, meaning="ranks that share every matrix"),
    ),
    fixed={
        "sample_packing": (True, "sequences are full: what the prediction is of"),
        "pad_to_sequence_len": (True, "every sequence has the same length"),
        "attn_implementation": ("flash_attention_2", "a kernel that keeps packed documents apart"),
        "output_dir": ("runs/out", "where checkpoints go"),
        "datasets": ([{"path": "DATASET", "type": "completion"}], "yours"),
    },
    unread=(
        UncountedOption(key="sample_packing", counted=True, absent=False,
               effect="pads short texts, so that fewer tokens are trained on"),
    ),
    ignored=(
        "datasets*", "test_datasets*", "dataset_*", "val_set_size", "output_dir", "sample_packing_*", "eval_*", "seed",
        "pad_to_*", "special_tokens*", "chat_template*", "wandb_*", "mlflow_*", "comet_*", "use_tensorboard", "hub_*",
        "logging_*", "save_*", "saves_*", "evals_*", "warmup_*", "lr_*", "lr_scheduler", "weight_decay", "adam_*",
        "cosine_*", "max_grad_norm", "num_epochs", "train_on_inputs", "group_by_length", "tf32", "strict", "resume_*",
        "auto_resume_*", "early_stopping_*", "flash_attention", "sdp_attention", "tokenizer_*", "model_type",
        "is_falcon_*", "is_llama_*", "is_mistral_*", "is_qwen_*", "eot_tokens", "push_to_hub",
        "rl_beta", "dpo_*", "orpo_alpha", "simpo_gamma", "trust_remote_code",
        "dataloader_*", "shuffle_*", "loss_watchdog_*", "debug", "gc_steps",
        "ddp_*", "bfloat16", "base_model_*", "revision_of_model", "type_of_model", "tokens", "xformers_*",
        "gradient_checkpointing_kwargs*", "fsdp_config.cpu_*", "fsdp_config.fsdp_cpu_*", "fsdp_config.fsdp_version",
        "fsdp_config.transformer_layer_cls_to_wrap", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "ring_attn_func",
        "fsdp_config.final_state_dict_type", "fsdp_final_state_dict_type", "fsdp_config.version", "heads_k_stride",
        "fsdp_config.mixed_precision_policy", "excess_length_strategy", "local_rank", "s2_attention",
        "lora_model_dir", "lora_fan_in_fan_out",
        "peft_use_rslora", "bnb_*", "peft_*", "reinit_weights", "pretraining_dataset",
        *(f"fsdp_config.{start}{name}" for start in ("", "fsdp_") for name in (
            "limit_all_gathers", "sync_module_states", "use_orig_params", "backward_prefetch", "forward_prefetch",
        )), "flex_attn_compile_kwargs*", "model_config.*",
        "fsdp_config.fsdp_final_state_dict_type", "profiler_*", "include_*", "streaming*", "pretrain_multipack_*",
    ),
    refused={
        "selective_checkpointing": "keeps some operations of a block",
        "qat": "rounds weights in training",
        **{f"qat.{name}": "rounds weights in training" for name in ("activation_dtype", "weight_dtype", "group_size")},
        "reward_model": "trains a model that rewards answers",
        "process_reward_model": "trains a model that rewards answers",
    },
    bounded={
        "fp8": "makes products of 8 bits, which takes less time",
        "fp8_enable_fsdp_float8_all_gather": "gathers weights in 8 bits, which takes less time",
        "torch_compile": "compiles the model, which takes less time",
        "activation_offloading": f"keeps activations {hf.ON_HOST}",
        "layer_offloading": f"keeps layers {hf.ON_HOST}",
        "chunked_cross_entropy": hf.NO_LOGITS, "cut_cross_entropy": hf.NO_LOGITS,
        "tiled_mlp": "cuts the MLP along the sequence, which needs less memory",
        "flash_attn_cross_entropy": hf.OTHER_KERNEL, "flash_attn_fuse_mlp": hf.OTHER_KERNEL,
        "fused_attn_kernel": hf.OTHER_KERNEL,
        "unfrozen_parameters": "trains some parameters only, which needs less memory",
        "quantize_moe_experts": "holds experts in fewer bits, which needs less memory",
        **{f"lora_{name}_kernel": hf.OTHER_KERNEL for name in ("mlp", "qkv", "o", "embedding")},
        **{f"liger_{name}": hf.OTHER_KERNEL for name in (
            "rope", "rms_norm", "layer_norm", "swiglu", "glu_activation", "cross_entropy",
            "fused_linear_cross_entropy",
        )},
    },
    title="configuration for axolotl train",
)  # fmt: skip


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why axolotl cannot split so. Without FSDP2, over at least two ranks, weights and states have 16 bits."""
    if layout.world == 1 or layout.zero == 0:
        return "without FSDP axolotl keeps weights and optimizer states in 16 bits, which is not counted: take zero=3"
    return hf.fsdp_refusal(shape, layout)


def _facts(plan: Plan) -> Facts:
    layout = plan.layout
    return {
        **hf.trainer_facts(plan, "axolotl"), "checkpointing": layout.recompute == "full",
        "optimizer": "adamw_torch_fused", "fsdp_version": 2, "resharded": RESHARDED[layout.zero],
        "wrap": hf.BY_BLOCK, "offload_params": False, "state_dict": "SHARDED_STATE_DICT",
    }  # fmt: skip


def objections(facts: Facts) -> Iterator[str]:
    """Yield settings of its file that are not counted."""
    yield from hf.objections(facts)
    if facts.get("rl") and str(facts["rl"]) not in hf.PREFERENCES:
        yield f"rl={facts['rl']} compares or rewards answers in a way that is not counted: take dpo or orpo"
    if (facts.get("tp") or 1) > 1 and not _has_fsdp(facts):
        yield f"tensor_parallel_size={facts['tp']} without fsdp_config is not counted: DeepSpeed cuts the matrices"


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time."""
    yield from hf.bounds(facts)
    if "cut_cross_entropy" in str(facts.get("plugins")):
        yield f"plugins: CutCrossEntropyPlugin {hf.NO_LOGITS}: not counted."
    if not _is_sharded(facts) and not is_adapted(facts):
        yield "without fsdp_config or deepspeed weights and states have 16 bits, which needs less memory: not counted."


def _is_sharded(facts: Facts) -> bool:
    return bool(facts.get("deepspeed_file")) or _has_fsdp(facts)


def _has_fsdp(facts: Facts) -> bool:
    shards = ("fsdp_version", "resharded", "wrap", "fsdp_words", "strategy")
    return any(facts.get(name) for name in shards) or facts.get("resharded") is not None


def resolve(facts: Facts) -> Facts:
    """Return the degrees and the ZeRO stage that the file means."""
    resolved = hf.resolve_trainer(facts)
    if resolved.get("distributed") == "DEEPSPEED":
        return {**resolved, **zero_degrees(resolved.get("zero_stage") or 0)}
    if not _is_sharded(resolved):
        return {**resolved, "zero": 0, "dp_shard": 1}
    keeps_parameters = str(resolved.get("resharded")).lower() == "false" or str(resolved.get("strategy")) in (
        "SHARD_GRAD_OP",
        "2",
    )
    # A stated number of shards leaves the number of replicas to the devices.
    copies = resolved.get("dp_replicate") or (None if resolved.get("dp_shard") else 1)
    return {**resolved, "zero": 2 if keeps_parameters else 3, "dp_replicate": copies}


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        command='axolotl train "$HERE/axolotl.yaml" --launcher torchrun -- $TORCHRUN',
        yours=("DATASET", "learning rate and its schedule"),
    )


AXOLOTL = TrainingSoftware(
    word="axolotl",
    title="axolotl 0.21 with FSDP2",
    stack=hf.stack_of,
    offered={**hf.OFFERED, "tp": (1,), "sp": (False,), "zero": (2, 3)},
    reasons={**hf.REASONS, "tp": "its models are cut where transformers has a plan for it", "zero": "it has FSDP2"},
    split_refusal=split_refusal,
    files=(YAML,),
    facts=_facts,
    resolve=resolve,
    objections=objections,
    bounds=bounds,
    variant=deepspeed_variant,
    launch=_launch,
    unknown=(
        hf.NOT_SCORED,
        hf.PACKED,
    ),
    axes={"micro_batch": "micro_batch_size", "zero": "fsdp_config.reshard_after_forward", "cp": "context_parallel_size",
          "recompute": "gradient_checkpointing", "dp_shard": "dp_shard_size", "dp_replicate": "dp_replicate_size"},
)  # fmt: skip
