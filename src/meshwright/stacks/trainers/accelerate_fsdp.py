"""accelerate: its file for FSDP2, and run_clm.py of transformers. Files of LLaMA-Factory are read, not written."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption, as_shell
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.deepspeed import deepspeed_variant, zero_degrees
from meshwright.stacks.trainers.hugging_face import ADAPTER_OPTIONS

SMALLER = "keeps smaller states than AdamW's two of fp32, which needs less memory"
LLAMA_FACTORY_YAML = ConfigFile(
    name="train.yaml",
    form="yaml",
    options=(
        Option(key="model_name_or_path", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(key="cutoff_len", fact="sequence", default=2048, meaning="tokens of a sequence"),
        *(option for option in hf.TRAINER if option.key != "attn_implementation"),
        Option(key="flash_attn", fact="flash_word", meaning="kernel of attention"),
        Option(key="optim", fact="optimizer", meaning="AdamW with two states"),
        Option(key="do_train", fact="trains", default=False, meaning="else it evaluates, or writes a model"),
        Option(key="pref_loss", fact="pair_loss", meaning="of pairs of answers, where the stage is dpo"),
        Option(key="stage", fact="stage", meaning="loss over the next token"),
        Option(key="finetuning_type", fact="adapter", default="lora", meaning="adapters, or all weights"),
        Option(key="lora_rank", fact="lora_rank", default=8, meaning="rank of adapters"),
        *(replace(option, default="all") if option.fact == "lora_targets" else option
          for option in ADAPTER_OPTIONS if not option.fact.startswith("base")),
        Option(key="quantization_bit", fact="base_bits", meaning="bits of frozen matrices"),
        Option(key="double_quantization", fact="nested", default=True, meaning="scales of 4 bits are codes too"),
        Option(key="disable_gradient_checkpointing", fact="checkpointing", words={True: False, False: True},
               default=False, meaning="the backward pass makes no blocks again"),
        Option(key="deepspeed", fact="deepspeed_file", meaning="file of DeepSpeed"),
    ),
    ignored=(
        *(key for key in hf.TRAINER_IGNORED if not key.startswith(("activation_", "packing"))),
        "dataset", "template", "max_samples", "plot_loss", "overwrite_cache", "resume_from_checkpoint", "val_size",
        "lora_model_dir", "adapter_name_or_path", "pref_beta", "pref_ftx",
        "simpo_gamma", "use_fast_tokenizer", "tokenized_path", "mask_history",
        "train_on_prompt", "quantization_type", "quantization_method", "neat_packing", "ray_*", "resources_per_worker",
        "placement_strategy", "num_workers", "loraplus_*", "pissa_*", "create_new_adapter", "mix_strategy",
        "media_dir", "image_*", "video_*", "enable_thinking", "rope_scaling_note", "low_cpu_mem_usage", "swanlab_*",
        "gradient_checkpointing",
        "use_swanlab", "upcast_*", "lora_bias_trainable", "use_rslora", "freeze_*", "ddp_*", "galore_*", "apollo_*",
    ),
    refused={
        "use_llama_pro": "trains added blocks only", "shift_attn": "attends within shifted groups",
        "mixture_of_depths": "skips blocks by token", "use_ref_model": "holds a second model",
        "use_kt": "computes experts on the host",
    },
    bounded={
        **{key: SMALLER for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")},
        "pure_bf16": "holds weights and states in 16 bits, which needs less memory",
        "enable_liger_kernel": hf.OTHER_KERNEL, "use_unsloth": hf.OTHER_KERNEL,
        "use_unsloth_gc": f"keeps inputs of blocks {hf.ON_HOST}",
        "fp8": "makes products of 8 bits, which takes less time",
        "torch_compile": "compiles the model, which takes less time",
    },
    unread=(
        UncountedOption(key="packing", counted=True, absent=False,
                        effect="pads short texts, so that fewer tokens are trained on"),
    ),
    marks=("finetuning_type", "cutoff_len", "template", "stage"),
    title="configuration for llamafactory-cli train",
)  # fmt: skip
LLAMA_FACTORY = (LLAMA_FACTORY_YAML, as_shell(LLAMA_FACTORY_YAML))
"""The YAML or the arguments of `llamafactory-cli train`, with the defaults of its hparams/*_args.py."""
RESHARDED = {3: True, 2: False, 0: None}
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0,
              "1": 3, "2": 2, "3": 0, "4": 3, "5": 2}  # fmt: skip
"""fsdp_sharding_strategy of FSDP 1 -> ZeRO stage: torch.distributed.fsdp.ShardingStrategy."""
ACCELERATE = (
    Option(key="distributed_type", fact="distributed", meaning="FSDP shards, MULTI_GPU replicates"),
    Option(key="mixed_precision", fact="mixed_precision", default="no", meaning="of products; shards are fp32"),
    Option(key="num_machines", fact="nodes", meaning="nodes"),
    Option(key="num_processes", fact="devices", meaning="GPUs of all nodes"),
    Option(key="fsdp_config.fsdp_version", fact="fsdp_version", meaning="fully_shard, by tensors"),
    Option(key="fsdp_config.fsdp_reshard_after_forward", fact="resharded",
           meaning="true: parameters are freed after the forward pass (ZeRO-3); false: kept (ZeRO-2)"),
    Option(key="fsdp_config.fsdp_sharding_strategy", fact="strategy", meaning="of FSDP 1"),
    Option(key="fsdp_config.fsdp_activation_checkpointing", fact="fsdp_checkpointing",
           meaning="the backward pass makes blocks again"),
    Option(key="fsdp_config.fsdp_auto_wrap_policy", fact="wrap", meaning="a unit per block"),
    Option(key="fsdp_config.fsdp_offload_params", fact="offload_params", meaning="nothing in host memory"),
    Option(key="fsdp_config.fsdp_state_dict_type", fact="state_dict", meaning="a checkpoint file per rank"),
    Option(key="parallelism_config.parallelism_config_dp_replicate_size", fact="replicas",
           meaning="replicas that each hold all shards"),
    Option(key="parallelism_config.parallelism_config_dp_shard_size", fact="shards",
           meaning="ranks that share parameters, gradients and optimizer"),
    Option(key="parallelism_config.parallelism_config_cp_size", fact="cp_size",
           meaning="ranks that share every sequence"),
    Option(key="parallelism_config.parallelism_config_tp_size", fact="tp_size",
           meaning="ranks that share every matrix"),
    Option(key="deepspeed_config.deepspeed_config_file", fact="deepspeed_file", meaning="the rest of it"),
    Option(key="deepspeed_config.zero_stage", fact="zero_stage", meaning="ZeRO stage of DeepSpeed"),
)  # fmt: skip
ACCELERATE_FILE = ConfigFile(
    name="accelerate.yaml",
    form="yaml",
    options=ACCELERATE,
    fixed={
        "compute_environment": ("LOCAL_MACHINE", "no cloud service"),
        "machine_rank": (0, "set by the launch script"),
        "rdzv_backend": ("c10d", "how nodes find each other"),
        "main_training_function": ("main", ""),
        "use_cpu": (False, ""),
    },
    ignored=(
        "compute_environment",
        "machine_rank",
        "rdzv_backend",
        "main_training_function",
        "debug",
        "downcast_bf16",
        "enable_cpu_affinity",
        "same_network",
        "tpu_*",
        "gpu_ids",
        "main_process_*",
        "commands",
        "command_file",
        "mpirun_config",
        "fsdp_config.fsdp_backward_prefetch*",
        "fsdp_config.fsdp_forward_prefetch",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config.fsdp_use_orig_params",
        "fsdp_config",
        "dynamo_config",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_sync_module_states",
        "fsdp_config.fsdp_cpu_*",
        "fsdp_config.fsdp_min_num_params",
        "deepspeed_config",
        "deepspeed_config.gradient_*",
        "parallelism_config",
        "megatron_lm_config",
        "parallelism_config.parallelism_config_cp_comm_strategy",
        "parallelism_config.parallelism_config_cp_backend",
        "deepspeed_config.zero3_*",
        "fp8_config*",
        "deepspeed_config.deepspeed_multinode_launcher",
    ),
    refused={
        "parallelism_config.parallelism_config_sp_size": "shares sequences by Ulysses, which is not counted",
    },
    bounded={
        "fp8_config.backend": "makes products of 8 bits, which takes less time",  # accelerate's questionnaire writes it
        "deepspeed_config.offload_optimizer_device": f"keeps optimizer states {hf.ON_HOST}",
        "deepspeed_config.offload_param_device": f"keeps parameters {hf.ON_HOST}",
    },
    title="file for accelerate launch --config_file",
)


BESIDE = {**hf.RUN_CLM.refused, **hf.OWN_ADAPTERS, **hf.OWN_PARTS}
SCRIPTS = hf.as_script(as_shell(replace(hf.RUN_CLM, refused=BESIDE, options=(
    *hf.RUN_CLM.options,
    Option(key="optim", fact="optimizer", meaning="AdamW with two states"),
    Option(key="deepspeed", fact="deepspeed_file", meaning="file of DeepSpeed", also=("deepspeed_config_file",)),
    Option(key="config_file", fact="accelerate_file", meaning="how ranks share"),
    Option(key="num_processes", fact="devices", meaning="GPUs of all nodes"),
))))  # fmt: skip
"""Arguments of any script over transformers' Trainer."""
WORDS = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "HYBRID_SHARD",
         "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2", "no_shard": "NO_SHARD"}  # fmt: skip
"""The Trainer's words for FSDP -> accelerate's: transformers, FSDPOption."""
ARGUMENTS = {3: '"full_shard auto_wrap"', 2: '"shard_grad_op auto_wrap"', 0: None}
"""ZeRO stage -> value of --fsdp as typed."""


def accelerate_facts(plan: Plan) -> Facts:
    """Return the facts that accelerate's file states of a layout."""
    layout = plan.layout
    sharded, piece = layout.zero > 0, layout.cp > 1 or layout.dp_replicate > 1 or layout.tp > 1
    only = {"fsdp_version": 2, "resharded": RESHARDED[layout.zero], "wrap": hf.BY_BLOCK,
            "fsdp_checkpointing": layout.recompute == "full", "offload_params": False,
            "state_dict": "SHARDED_STATE_DICT"} if sharded else {}  # fmt: skip
    mesh = {"replicas": layout.dp_replicate, "shards": layout.dp_shard, "cp_size": layout.cp, "tp_size": layout.tp}
    return {
        "distributed": "FSDP" if sharded else "MULTI_GPU" if layout.world > 1 else "NO",
        "mixed_precision": next(word for word, name in hf.MIXED.items() if name == plan.recipe.precision),
        "checkpointing": layout.recompute == "full" and not sharded, **only, **(mesh if sharded and piece else {}),
    }  # fmt: skip


def resolve(facts: Facts) -> Facts:
    """Return the degrees and the ZeRO stage that the file means."""
    resolved = {**hf.resolve_trainer(facts), **_trainer_sharding(facts), **hf.count_devices(facts)}
    kind = str(resolved.get("distributed", "MULTI_GPU"))
    resolved["cp"], resolved["tp"] = resolved.get("cp_size") or 1, resolved.get("tp_size") or 1
    if kind in ("MULTI_GPU", "NO"):
        return {**resolved, "zero": 0, "dp_shard": 1}
    if kind == "DEEPSPEED":
        return {**resolved, **zero_degrees(resolved.get("zero_stage", 2))}
    if kind != "FSDP":
        raise PlanError(f"distributed_type={kind} is not counted: take FSDP, MULTI_GPU or NO")
    return {**resolved, **_sharding(resolved)}


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time, one of them sharding that only the launcher may know of."""
    yield from hf.bounds(facts)
    if facts.get("distributed") is None and not hf.is_on(facts.get("fsdp_words")) and not facts.get("deepspeed_file"):
        yield "Sharding is not said in the file, and may be by its launcher, which needs less memory: not counted."


def _trainer_sharding(facts: Facts) -> Facts:
    """Return the sharding of the Trainer's argument `fsdp`, if no file of accelerate or DeepSpeed says otherwise."""
    words = facts.get("fsdp_words")
    settings = [str(word) for word in words] if isinstance(words, list) else str(words or "").replace(",", " ").split()
    if not settings or not hf.is_on(settings[0]) or facts.get("deepspeed_file"):
        return {}
    # One FSDP unit for the whole model gathers all weights at once, as large as without sharding.
    if "auto_wrap" not in settings:
        raise PlanError(f"fsdp={' '.join(settings)} without auto_wrap gathers the whole model at once: not counted")
    kind = next((WORDS[word] for word in settings if word in WORDS), None)
    if kind is None:
        raise PlanError(f"fsdp={' '.join(settings)} is not understood: take one of {', '.join(WORDS)}")
    return {"distributed": "FSDP", "strategy": kind, "offload_params": "offload" in settings}


def variant(software: TrainingSoftware, facts: Facts) -> TrainingSoftware:
    """Return the software with advice that fits how the trainer shards and recomputes."""
    if facts.get("distributed") == "DEEPSPEED":
        return deepspeed_variant(software, facts)
    # Advice names the Trainer's arguments where these shard, because accelerate's file may not exist.
    words = str(facts.get("fsdp_words") or "")
    sharded = hf.is_on(words)
    # Of two switches of recomputation the argument counts if it is on, or if the other is not written.
    argument = hf.is_on(facts.get("checkpointing")) or (sharded and facts.get("fsdp_checkpointing") is None)
    # Nothing to say in other words: the common files already state both.
    if not (sharded or argument):
        return software

    def stated(plan: Plan) -> Facts:
        stated_facts = software.facts(plan)
        if argument:
            other = False if hf.is_on(facts.get("fsdp_checkpointing")) else None
            stated_facts |= {"checkpointing": str(plan.layout.recompute == "full").lower(), "fsdp_checkpointing": other}
        return {**stated_facts, "fsdp_words": ARGUMENTS[plan.layout.zero]} if sharded else stated_facts

    def refusal(shape: ModelShape, layout: Layout) -> str:
        copies = layout.zero > 0 and layout.dp_replicate > 1 and "hybrid" not in words
        return "--fsdp shards over all ranks: take layout.dp_replicate=1" if sharded and copies else (
            software.split_refusal(shape, layout)
        )  # fmt: skip

    return replace(software, facts=stated, split_refusal=refusal)


def _sharding(facts: Facts) -> Facts:
    strategy = facts.get("strategy")
    if strategy is not None and str(strategy) not in STRATEGIES:
        raise PlanError(f"fsdp_sharding_strategy={strategy} is not understood: take {', '.join(STRATEGIES)}")
    resharded = facts.get("resharded")
    by_word = STRATEGIES.get(str(resharded))
    zero = by_word if by_word is not None else 2 if str(resharded).lower() == "false" else 3
    if strategy is not None:
        zero = STRATEGIES[str(strategy)]
    hybrid = str(strategy or "").startswith("HYBRID") or str(strategy) in ("4", "5")
    # Hybrid strategies shard within a node and copy over nodes, unless sizes are stated.
    shard = facts.get("shards") or (facts.get("devices_per_node") if hybrid else None)
    copies = facts.get("replicas") or (None if hybrid else 1)
    return {"zero": zero, "dp_shard": 1 if zero == 0 else shard, "dp_replicate": None if zero == 0 else copies}


def _facts(plan: Plan) -> Facts:
    return {**hf.trainer_facts(plan, "accelerate"), **accelerate_facts(plan)}


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        command='accelerate launch --config_file "$HERE/accelerate.yaml" --machine_rank $NODE_RANK '
        '--main_process_ip $HEAD --main_process_port $PORT run_clm.py "$HERE/run_clm.json"',
        before=('cd "$HERE"',),
        yours=("DATASET", "learning rate and its schedule", "run_clm.py of transformers, next to these files"),
    )


AXES = {
    "micro_batch": "per_device_train_batch_size", "zero": "fsdp_reshard_after_forward",
    "recompute": "activation checkpointing",
    "dp_shard": "parallelism_config_dp_shard_size", "dp_replicate": "parallelism_config_dp_replicate_size",
    "cp": "parallelism_config_cp_size", "tp": "parallelism_config_tp_size",
}  # fmt: skip
ACCELERATE_FSDP = TrainingSoftware(
    word="accelerate",
    title="accelerate 1.x with FSDP2, and transformers' Trainer",
    stack=hf.stack_of,
    offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 2, 3)},
    reasons={**hf.REASONS, "tp": "run_clm.py loads whole models", "cp": "run_clm.py reads whole sequences"},
    split_refusal=hf.fsdp_refusal,
    files=(ACCELERATE_FILE, hf.RUN_CLM),
    also_read=(*LLAMA_FACTORY, SCRIPTS),
    facts=_facts,
    resolve=resolve,
    objections=hf.objections,
    bounds=bounds,
    variant=variant,
    launch=_launch,
    unknown=(hf.NOT_SCORED,),
    axes={**AXES, "recompute": "fsdp_activation_checkpointing"},
)
