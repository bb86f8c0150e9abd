"""DeepSpeed: its JSON, and the arguments of transformers' run_clm.py."""

from dataclasses import replace

from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, as_shell
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf

AUTO = "auto"
"""Value that transformers fills in from its own arguments."""
JSON = ConfigFile(
    name="deepspeed.json",
    form="json",
    options=(
        Option(key="train_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
        Option(key="train_micro_batch_size_per_gpu", fact="micro_batch", meaning="sequences of a micro-batch"),
        Option(key="gradient_accumulation_steps", fact="accumulation", meaning="micro-batches of a step"),
        Option(key="bf16.enabled", fact="bf16", default=False, meaning="16-bit parameters, fp32 masters",
               also=("bfloat16.enabled",)),
        Option(key="fp16.enabled", fact="fp16", meaning="the same in float16, with loss scaling"),
        Option(key="zero_optimization.stage", fact="zero", default=0,
               meaning="1 shards optimizer states, 2 also gradients, 3 also parameters"),
        Option(key="optimizer.type", fact="optimizer_type", words={"adamw": "AdamW", "adam": "Adam"},
               meaning="AdamW with two fp32 states"),
        Option(key="zero_optimization.overlap_comm", fact="overlaps",
               meaning="reductions overlap with the backward pass"),
        Option(key="communication_data_type", fact="travels", words={"fp32": "fp32", "fp16": "fp16", "bf16": "bfp16"},
               meaning="what gradients travel as"),
    ),
    fixed={"gradient_clipping": (1.0, "as the Trainer's max_grad_norm; DeepSpeed clips nothing where it is absent")},
    ignored=(
        "optimizer*", "scheduler*", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "zero_allow_*",
        "flops_profiler*",
        "zero_force_*", "bf16*", "fp16*", "tensorboard*", "wandb*", "csv_monitor*", "comms_logger*",
        "prescale_gradients",
        "zero_optimization.reduce_*", "zero_optimization.allgather_*", "zero_optimization.contiguous_gradients", "amp*",
        "zero_optimization.stage3_*", "zero_optimization.max_*", "zero_optimization.gather_16bit_*",
        "zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients",
        "zero_optimization.ignore_unused_parameters", "sparse_gradients", "checkpoint*",
        "dump_state",
        "gradient_predivide_factor", "data_types*", "aio*", "zero_optimization", "activation_checkpointing.*",
        "torch_autocast*",
        "zero_optimization.offload_optimizer.*", "zero_optimization.offload_param.*", "memory_breakdown", "seed",
        "zero_optimization.legacy_stage1", "_comment", "seq_parallel_communication_data_type", "fp8*",
        "compression*", "train_steps", "comms_config*", "monitor_config*",
    ),
    refused={
        "data_types.grad_accum_dtype": "keeps gradients in other bits",
        "zero_optimization.zero_hpz_partition_size": "keeps a second copy of the shards in each node (ZeRO++)",
        "zero_optimization.mics_shard_size": "shards within groups of ranks (MiCS)",
        "tensor_parallel.autotp_size": "cuts matrices, which is not counted",
        "expert_parallel.autoep_size": "spreads experts over ranks, which is not counted",
        "pipeline.stages": "cuts the model into a pipeline, which is not counted",
    },
    bounded={
        **{f"zero_optimization.offload_{kind}{end}": f"keeps {what} {hf.ON_HOST}" for end in ("", ".device")
           for kind, what in (("optimizer", "optimizer states"), ("param", "parameters"))},
        "zero_optimization.cpu_offload": f"keeps optimizer states {hf.ON_HOST}",
        "zero_optimization.cpu_offload_params": f"keeps parameters {hf.ON_HOST}",
        "zero_optimization.zero_quantized_weights": "sends weights in fewer bits (ZeRO++), which takes less time",
        "zero_optimization.zero_quantized_gradients": "sends gradients in fewer bits (ZeRO++), which takes less time",
    },
    title="configuration of DeepSpeed",
)  # fmt: skip


CHAT = as_shell(ConfigFile(
    name="train.sh",
    form="yaml",
    options=(
        Option(key="model_name_or_path", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(key="max_seq_len", fact="sequence", default=512, meaning="tokens of a sequence"),
        Option(key="zero_stage", fact="zero", default=0, meaning="stage of ZeRO"),
        Option(key="dtype", fact="mixed_precision", default="fp16", meaning="of parameters and products"),
        Option(key="per_device_train_batch_size", fact="micro_batch", default=16, meaning="sequences of a micro-batch"),
        Option(key="gradient_accumulation_steps", fact="accumulation", default=1, meaning="micro-batches of a step"),
        Option(key="gradient_checkpointing", fact="checkpointing", default=False, meaning="blocks are made again"),
    ),
    ignored=(
        "data_*", "per_device_eval_batch_size", "learning_rate", "weight_decay", "num_train_epochs", "num_warmup_steps",
        "lr_scheduler_type", "seed", "deepspeed", "output_dir", "dropout", "enable_tensorboard", "tensorboard_path",
        "print_loss", "lora_module_name", "lora_learning_rate", "master_port", "num_gpus", "num_nodes",
        "add_eot_token", "eval_interval", "eval_iters",
    ),
    refused={"lora_dim": "trains adapters, and embeddings and norms whole as well",
             "compute_fp32_loss": "keeps logits in fp32"},
    bounded={"offload": f"keeps parameters and optimizer states {hf.ON_HOST}"},
    marks=("zero_stage",),
    title="arguments of DeepSpeedExamples' DeepSpeed-Chat, step 1",
))  # fmt: skip
FSDP_FACTS = frozenset({
    "distributed", "resharded", "wrap", "state_dict", "offload_params", "fsdp_version", "fsdp_words", "strategy",
    "fsdp_checkpointing", "dp_shard", "dp_replicate", "shards", "replicas", "cp", "cp_size", "tp_size",
})  # fmt: skip
"""Facts that only options of FSDP state."""


def _stack(facts: Facts) -> Stack:
    """Return the stack. By default only stage 3 hides reductions: runtime/zero/config.py, overlap_comm_valid."""
    hidden = str(facts.get("overlaps", facts.get("zero", 3) == 3)).lower() != "false"
    stack = hf.with_attention(hf.DEEPSPEED if hidden else replace(hf.DEEPSPEED, hides_gradients=0.0), facts)
    travels = facts.get("travels")
    return replace(stack, gradient_exchange_bytes=4.0 if travels == "fp32" else 2.0) if travels else stack


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why DeepSpeed cannot split so: ZeRO shards over all ranks."""
    if layout.zero and layout.dp_replicate > 1:
        return "ZeRO shards among all ranks: take layout.dp_replicate=1"
    if layout.zero == 0 and layout.dp_shard > 1:
        return "without ZeRO nothing is shared: take layout.dp_shard=1"
    return ""


def _facts(plan: Plan) -> Facts:
    return {**hf.trainer_facts(plan, "deepspeed"), "overlaps": True, "checkpointing": plan.layout.recompute == "full"}


def resolve(facts: Facts) -> Facts:
    """Return common facts. `auto` states nothing."""
    resolved = hf.resolve_trainer({name: value for name, value in facts.items() if value != AUTO})
    half = str(resolved.get("fp16", False)).lower() == "true"
    resolved["precision"] = "fp16" if half else resolved["precision"]
    return {**resolved, **zero_degrees(resolved.get("zero", 0))}


def zero_degrees(stage: object) -> Facts:
    """Return the split of data parallelism at a stage of ZeRO. Raises PlanError for an unknown stage."""
    if stage not in (0, 1, 2, 3):
        raise PlanError(f"zero_optimization.stage={stage} is not understood: take 0, 1, 2 or 3")
    # ZeRO shards over all ranks of data parallelism, and without it each rank is a copy.
    return {"zero": stage, "dp_replicate": 1, "dp_shard": None} if stage else {"zero": 0, "dp_shard": 1}


def deepspeed_variant(software: TrainingSoftware, facts: Facts) -> TrainingSoftware:
    """Return a trainer that DeepSpeed shards with DeepSpeed's layouts and options."""
    if facts.get("distributed") != "DEEPSPEED":
        return software

    def without_fsdp(file: ConfigFile) -> ConfigFile:
        return replace(file, options=tuple(option for option in file.options if option.fact not in FSDP_FACTS))

    return replace(
        software,
        offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 1, 2, 3)},
        split_refusal=split_refusal,
        files=tuple(without_fsdp(file) for file in software.files),
        also_read=tuple(without_fsdp(file) for file in software.also_read),
        named_files=(JSON,) if facts.get("deepspeed_file") else (),
        facts=lambda plan: {**_facts(plan), "zero_stage": plan.layout.zero},
    )


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        command='torchrun $TORCHRUN run_clm.py "$HERE/run_clm.json"',
        before=('cd "$HERE"  # run_clm.json names deepspeed.json',),
        yours=("DATASET", "learning rate and its schedule", "run_clm.py of transformers, next to these files"),
    )


DEEPSPEED = TrainingSoftware(
    word="deepspeed",
    title="DeepSpeed 0.19 ZeRO, and transformers' Trainer",
    stack=_stack,
    offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 1, 2, 3)},
    reasons={**hf.REASONS, "tp": "its configuration has data parallelism alone",
             "cp": "its configuration has data parallelism alone"},
    split_refusal=split_refusal,
    files=(JSON, replace(hf.RUN_CLM, fixed={**hf.RUN_CLM.fixed, "deepspeed": ("deepspeed.json", "the other file")},
                         ignored=(*hf.RUN_CLM.ignored, "deepspeed"))),
    facts=_facts,
    resolve=resolve,
    also_read=(CHAT,),
    objections=hf.objections,
    bounds=hf.bounds,
    launch=_launch,
    unknown=(hf.NOT_SCORED, "Sizes of its buckets are not counted."),
    axes={"micro_batch": "train_micro_batch_size_per_gpu", "zero": "zero_optimization.stage",
          "recompute": "gradient_checkpointing"},
)  # fmt: skip
