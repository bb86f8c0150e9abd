"""TRL: the YAML of `trl sft --config`, and accelerate's file next to it."""

from dataclasses import replace

from meshwright.planner.cost.stack import Stack
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption, as_shell
from meshwright.stacks.declaration.script_text import SCRIPT
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers import accelerate_fsdp as accelerate
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers.hugging_face import ADAPTER_OPTIONS

FUSED_HEAD = replace(
    hf.FSDP,
    name="trl-sft",
    loss_passes=1 / hf.FSDP.passes,
    head_chunk_bytes=4096 * 32768 * 4.0,
    source=f"{hf.FSDP.source} huggingface/trl v1.16 kernels/chunked_logprob.py and trainer/utils.py: the head runs on "
    "tiles of 4,096 tokens x 32,768 rows of the vocabulary, whose statistics one kernel makes, and keeps no logits; "
    "gradients of its matrix and its input are summed in fp32",
)
"""No published row of it could be scored.

Its backward pass recomputes the logits, where the count has more passes over the matrix gradient.
"""
FUSED_DEEPSPEED = replace(
    FUSED_HEAD,
    name="trl-sft-deepspeed",
    gradient_bytes=hf.DEEPSPEED.gradient_bytes,
    sharding=hf.DEEPSPEED.sharding,
    shard_bytes=hf.DEEPSPEED.shard_bytes,
    source=f"{FUSED_HEAD.source}; as transformers-deepspeed",
)
DEFAULTS = {"bf16": True, "learning_rate": 2e-5}
ADAPTERS = {"lora_alpha": 32, "lora_dropout": 0.05}
TRAINER = tuple(replace(option, default=DEFAULTS.get(option.key, option.default)) for option in hf.TRAINER)
"""Its defaults differ from the Trainer's: trl/trainer/sft_config.py."""
SFT = ConfigFile(
    name="sft.yaml",
    form="yaml",
    options=(
        Option(key="model_name_or_path", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(key="max_length", fact="sequence", default=1024, also=("max_seq_length",),
               meaning="tokens of a packed sequence"),
        *TRAINER,
        Option(key="gradient_checkpointing", fact="checkpointing", default=True, also=("activation_checkpointing",),
               meaning="the backward pass makes blocks again (with FSDP its own switch does)"),
        Option(key="loss_type", fact="pair_loss", meaning="of a loss over pairs of answers"),
        Option(key="optim", fact="optimizer", meaning="AdamW with two states"),
        Option(key="use_peft", fact="adapter", meaning="low-rank adapters in place of the weights"),
        Option(key="lora_r", fact="lora_rank", default=16, meaning="rank of adapters"),
        Option(key="use_bnb_nested_quant", fact="nested", default=False, meaning="scales of 4 bits are codes too"),
        *(replace(option, default=ADAPTERS.get(option.key)) for option in ADAPTER_OPTIONS),
        Option(key="accelerate_config", fact="accelerate_file", also=("config_file",), meaning="how ranks share"),
        Option(key="num_processes", fact="devices", meaning="GPUs of all nodes"),
        Option(key="deepspeed", fact="deepspeed_file", meaning="file of DeepSpeed, which shards in FSDP's place"),
    ),
    fixed={
        "packing": (True, "sequences are full: what the prediction is of"),
        "attn_implementation": ("flash_attention_2", "a kernel that keeps packed documents apart"),
        "output_dir": ("runs/out", "where checkpoints go"),
        "dataset_name": ("DATASET", "yours"),
    },
    ignored=(
        *hf.TRAINER_IGNORED, "padding_free", "shuffle_dataset", "truncation_mode", "eval_packing",
        "datasets", "env", "router_aux_loss_coef", "resume_from_checkpoint", "log_*", "average_tokens_*", "use_cache",
        "lora_task_type",
        "use_rslora", "bnb_4bit_quant_*", "num_machines", "machine_rank", "main_process_*",
    ),
    refused={
        **hf.OTHER_LOSSES,
        "optim_target_modules": "optimizes some matrices in another way",
        "model_init_kwargs": "loads the model in another way",
        "gradient_checkpointing_kwargs.selective": "keeps some operations of a block",
    },
    bounded=hf.TRAINER_BOUNDED,
    unread=(
        UncountedOption(key="packing", counted=True, absent=False,
               effect="pads short texts, so that fewer tokens are trained on"),
    ),
    title="configuration for trl sft --config",
)  # fmt: skip


COMMAND = replace(
    hf.as_script(as_shell(SFT)),
    marks=(*(f"--{key}" for key in ("max_length", "packing", "use_peft", "completion_only_loss", "assistant_only_loss",
                                    "dataset_text_field", "accelerate_config", "use_bnb_nested_quant")),
           *(f"{SCRIPT}:{name}" for name in ("sft.py", "run_sft.py", "trl sft"))),
)  # fmt: skip
"""Other scripts have the same arguments of the Trainer, and another loss."""


def _stack(facts: Facts) -> Stack:
    """Return the stack. Losses over pairs keep all logits."""
    if facts.get("pairs"):
        return hf.stack_of(facts)
    fused = FUSED_DEEPSPEED if facts.get("distributed") == "DEEPSPEED" else FUSED_HEAD
    return hf.with_attention(fused, facts)


def _facts(plan: Plan) -> Facts:
    return {**hf.trainer_facts(plan, "trl"), **accelerate.accelerate_facts(plan), "optimizer": "adamw_torch_fused"}


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        command='trl sft --config "$HERE/sft.yaml" --accelerate_config "$HERE/accelerate.yaml" '
        "--machine_rank $NODE_RANK --main_process_ip $HEAD --main_process_port $PORT",
        yours=("DATASET", "learning rate and its schedule"),
    )


TRL_SFT = TrainingSoftware(
    word="trl",
    title="TRL 1.16: supervised fine-tuning, with accelerate's FSDP2",
    stack=_stack,
    offered={**hf.OFFERED, "tp": (1,), "cp": (1,), "sp": (False,), "zero": (0, 2, 3)},
    reasons={**hf.REASONS, "tp": "trl sft loads whole models", "cp": "its packing does not go with it"},
    split_refusal=hf.fsdp_refusal,
    files=(accelerate.ACCELERATE_FILE, SFT),
    facts=_facts,
    also_read=(COMMAND,),
    resolve=accelerate.resolve,
    objections=hf.objections,
    bounds=accelerate.bounds,
    variant=accelerate.variant,
    launch=_launch,
    unknown=(
        hf.NOT_SCORED,
        hf.PACKED,
    ),
    axes=accelerate.ACCELERATE_FSDP.axes,
)  # fmt: skip
