"""Common parts of trainers over transformers: their models' memory and time, Trainer's arguments, PEFT's adapters."""

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.plan_facts import hub_name

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
ADAPTER_OPTIONS = (
    Option(key="lora_alpha", fact="lora_alpha", meaning="factor of adapters, times their rank"),
    Option(key="lora_target_modules", fact="lora_targets", also=("lora_target",), meaning="matrices with adapters"),
    Option(key="lora_dropout", fact="lora_dropout", meaning="share of their input that is set to 0"),
    Option(key="lora_modules_to_save", fact="whole_matrices", also=("additional_target",),
           meaning="matrices that are trained whole in addition"),
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
    # 8 is the default of PEFT: peft/tuners/lora/config.py, LoraConfig.
    rank = facts.get("lora_rank") or 8
    whole_matrices = {WHOLE[name] for name in _whole(facts) if name in WHOLE}
    return {"whole": ",".join(sorted(whole_matrices)), "lora": {
        "rank": rank, "alpha": float(facts.get("lora_alpha") or 2 * rank), "targets": _targets(facts) or BY_DEFAULT,
        "base": ("nf4-double" if nested else "nf4") if four else base, "dora": _on(facts, "dora"),
        "dropout": float(facts.get("lora_dropout") or 0.0),
    }}  # fmt: skip


def adapter_objections(facts: Facts) -> Iterator[str]:
    """Yield kinds of tuning that are neither adapters nor all weights."""
    kind = str(facts.get("adapter"))
    if kind not in (*KINDS, *OFF, FROZEN):
        yield f"adapter={kind} trains other parameters than low-rank adapters, which is not counted: take lora"
    coded = _on(facts, "base_4bit") or _on(facts, "base_8bit") or facts.get("base_bits")
    if coded and not is_adapted(facts):
        yield "matrices of 4 or 8 bits are not trained: name an adapter in addition to load_in_4bit or load_in_8bit"
    unknown = [] if not is_adapted(facts) or _targets(facts) == "all" else _unknown(facts)
    if unknown:
        yield f"adapters of {', '.join(unknown)} are not counted: take names of {', '.join(MATRICES)}"
    if is_adapted(facts) and (others := [name for name in _whole(facts) if name not in WHOLE]):
        yield (
            f"{', '.join(others)} are trained whole in addition to adapters, which needs more memory than is counted: "
            f"take names of {', '.join(WHOLE)}, or leave them out"
        )


def _whole(facts: Facts) -> list[str]:
    """Return the names of matrices that are trained whole, without their modules."""
    whole_word = facts.get("whole_matrices")
    listed = map(str, whole_word) if isinstance(whole_word, list) else re.split(r"[,\s]+", str(whole_word or ""))
    return [name.rpartition(".")[2] for name in listed if name and name.lower() not in ("none", "null")]


def _unknown(facts: Facts) -> list[str]:
    """Return names of adapted matrices that no model here has. The last part of a path counts."""
    target_word = facts.get("lora_targets")
    listed = map(str, target_word) if isinstance(target_word, list) else re.split(r"[,\s]+", str(target_word or ""))
    words = [re.split(r"\W+", name.strip("$)")) for name in listed if name]
    return [parts[-1] for parts in words if not any(part in MATRICES for part in parts)]


def _targets(facts: Facts) -> str:
    target_word = facts.get("lora_targets")
    if _on(facts, "lora_every") or target_word in EVERY or target_word in [[every] for every in EVERY]:
        return "all"
    words = re.findall(
        r"\w+", " ".join(map(str, target_word)) if isinstance(target_word, list) else str(target_word or "")
    )
    return ",".join(dict.fromkeys(MATRICES[word] for word in words if word in MATRICES))


def _on(facts: Facts, name: str) -> bool:
    # Files hold booleans, and options of scripts hold words.
    return str(facts.get(name) or False).lower() == "true"


FSDP = Stack(
    name="transformers-fsdp",
    passes=1.75,
    norm_passes=10.0,
    rope_passes=5.0,
    norm_kept=10.0,
    activation_kept=4.0,
    logit_kept=6.0,
    logit_peak=14.0,
    gradient_bytes=4.0,
    sharding="fully_shard",
    shard_bytes=4.0,
    host_s=1e-5,
    source="huggingface/transformers models/llama/modeling_llama.py (norm, rotation and activation are eager), "
    "loss/loss_utils.py (logits are widened to fp32; the answer holds those of 16 bits); huggingface/accelerate "
    "utils/fsdp_utils.py (shards are fp32). Passes as of torchtitan without compilation.",
)
"""No published row of it could be scored."""
DEEPSPEED = replace(
    FSDP,
    name="transformers-deepspeed",
    gradient_bytes=2.0,
    sharding="flat",
    shard_bytes=0.0,
    source=f"{FSDP.source} deepspeedai/DeepSpeed runtime/zero/stage_1_and_2.py and stage3.py (16-bit gradients, fp32 "
    "masters in flat buffers)",
)
"""No published row of it could be scored either."""
EAGER_SCORES = 4.0
"""Bytes per weight: eager_attention_forward of modeling_llama.py keeps the softmax in fp32 and a copy in 16 bits."""


def stack_of(facts: Facts) -> Stack:
    """Return the stack of DeepSpeed or FSDP, with the attention that the file names."""
    return with_attention(DEEPSPEED if facts.get("distributed") == "DEEPSPEED" else FSDP, facts)


def with_attention(stack: Stack, facts: Facts) -> Stack:
    """Return the stack with stored attention weights if the file selects transformers' eager attention."""
    written = facts.get("attention_kernel") == "eager" or str(facts.get("flash_word")).lower() == "disabled"
    if not written and not is_on(facts.get("writes_scores")):
        return stack
    return replace(stack, attention="unfused", score_kept=EAGER_SCORES)


PREFERENCE_OPTIONS = (
    Option(key="beta", fact="preference_beta", meaning="of a loss over pairs of answers"),
    Option(key="precompute_ref_log_probs", fact="asked_before", meaning="the frozen copy is asked before the run"),
    Option(key="gamma_beta_ratio", fact="margin", also=("simpo_gamma", "gamma"), meaning="SimPO's, without a copy"),
)
TRAINER = (
    Option(key="per_device_train_batch_size", fact="micro_batch", default=8, meaning="sequences of a micro-batch"),
    Option(key="gradient_accumulation_steps", fact="accumulation", default=1, meaning="micro-batches of a step"),
    Option(key="bf16", fact="bf16", default=False, meaning="products in bfloat16"),
    Option(key="fp16", fact="fp16", default=False, meaning="in float16, with loss scaling", quiet=True),
    *PREFERENCE_OPTIONS,
    Option(key="fsdp", fact="fsdp_words", meaning="the Trainer's own way to shard"),
    Option(key="attn_implementation", fact="attention_kernel", meaning="of attention"),
    Option(key="learning_rate", fact="learning_rate", meaning="yours to choose"),
    Option(key="max_steps", fact="steps", meaning="optimizer steps: yours to choose"),
)  # fmt: skip
TRAINER_IGNORED = (
    "output_dir", "dataset_*", "eval_*", "do_*", "save_*", "logging_*", "lr_scheduler_*", "warmup_*",
    "weight_decay", "adam_*",
    "max_grad_norm", "num_train_epochs", "report_to", "seed", "push_to_hub", "hub_*", "run_name",
    "overwrite_output_dir",
    "dataloader_*", "remove_unused_columns", "ddp_*", "tf32", "train_file", "validation_file", "tokenizer_name",
    "bf16_full_eval", "gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.use_reentrant",
    "activation_checkpointing_kwargs*",
    "per_device_eval_batch_size", "trust_remote_code",
    "torch_dtype", "dtype",
    "preprocessing_*", "max_train_samples", "streaming", "chat_template*",
    "completion_only_loss",
    "assistant_only_loss", "eos_token", "pad_token", "packing", "packing_strategy", "pad_to_multiple_of",
    "dataset_text_field",
    "model_revision", "project", "trackio*", "max_steps", "include_*", "load_best_model_at_end",
    "metric_for_best_model",
    "disable_tqdm", "skip_memory_metrics", "evaluation_strategy", "local_rank", "fsdp_config", "fsdp_config.*",
    "fsdp_transformer_layer_cls_to_wrap", "use_fast_tokenizer", "cache_dir", "benchmarks", "callbacks", "system_prompt",
    "wandb_*", "overwrite_cache", "max_prompt_length", "ref_model_name_or_path", "label_smoothing",
    "model_type", "low_cpu_mem_usage", "ignore_data_skip", "use_flash_attention_2",
)  # fmt: skip
PACKED = (
    "With packing, a document attends only to itself. Attention is counted over whole sequences, so times are too long."
)
NOT_SCORED = "No published run of transformers' models could be scored: times may be off by tens of percent."
ADAMW = ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
"""Names of AdamW with two fp32 states: transformers OptimizerNames. Others keep other states."""
SMALLER = re.compile(
    r"8bit|4bit|8_bit|fp8|paged|anyprecision|adafactor|adagrad|rmsprop|sgd|lion|lomo|galore|apollo|muon|schedule_free|came|mini"
)
"""Pattern of optimizers whose states are fewer, have fewer bits, or move to host memory."""
BY_BLOCK = "TRANSFORMER_BASED_WRAP"
"""FSDP's units: one block each."""
OTHER_LOSSES = {
    **dict.fromkeys(
        ("reward_funcs", "reward_weights", "num_generations", "max_completion_length", "reward_model_path",
         "num_ppo_epochs", "reward_model", "vllm_mode", "response_length", "missing_eos_penalty"),
        "samples answers and rewards them",
    ),
    **dict.fromkeys(("desirable_weight", "undesirable_weight", "center_rewards_coefficient", "sync_ref_model"),
                    "rates answers, or changes the frozen copy"),
    **dict.fromkeys(("teacher_model_name_or_path", "lmbda"), "learns from a second model"),
}  # fmt: skip
"""Keys of TRL's other trainers: trl/trainer/*_config.py."""
ON_HOST = "in host memory, which needs less memory and more time"
"""Ending of sentences about offloading."""
OTHER_KERNEL = "takes another kernel, which needs less memory or time"
NO_LOGITS = "never holds all logits, which needs less memory"
TRAINER_BOUNDED = {
    "use_liger_kernel": OTHER_KERNEL,
    "activation_offloading": f"keeps activations {ON_HOST}",
    "torch_compile": "compiles the model, which takes less time",
}
OWN_ADAPTERS = dict.fromkeys(
    ("use_peft", "use_lora", "lora_enable", "lora_r", "lora_rank", "lora_alpha", "q_lora", "use_qlora", "lora", "qlora",
     "load_in_4bit", "load_in_8bit", "bits", "peft_path", "peft_type"),
    "trains adapters in a way of its own program",
)  # fmt: skip
OWN_PARTS = dict.fromkeys(
    (
        "vision_tower",
        "mm_projector_lr",
        "mm_projector_type",
        "image_folder",
        "tune_mm_mlp_adapter",
        "freeze_backbone",
        "freeze_vision_tower",
        "mm_vision_select_layer",
        "tune_vision",
        "max_pixels",
        "train_modules",
        "vision_model",
    ),
    "is of a model of images",
)
"""Keys of scripts that have the Trainer's arguments in addition to their own."""
RUN_CLM = ConfigFile(
    name="run_clm.json",
    form="json",
    options=(
        Option(key="model_name_or_path", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(
            key="block_size",
            fact="sequence",
            meaning="tokens of a sequence",
            also=("model_max_length", "max_seq_length", "max_seq_len", "max_length"),
        ),
        *TRAINER,
        Option(
            key="gradient_checkpointing",
            fact="checkpointing",
            default=False,
            also=("activation_checkpointing",),
            meaning="the backward pass makes blocks again (with FSDP its own switch does)",
        ),
    ),
    fixed={
        "output_dir": ("runs/out", "where checkpoints go"),
        "do_train": (True, ""),
        "dataset_name": ("DATASET", "yours"),
    },
    ignored=TRAINER_IGNORED,
    refused=OTHER_LOSSES,
    bounded=TRAINER_BOUNDED,
    title="arguments of transformers' examples/pytorch/language-modeling/run_clm.py",
)
OFFERED = {
    "pp": (1,), "vp": (1,), "ep": (1,), "schedule": ("1f1b",), "recompute": ("none", "full"), "offload": ("off",),
    "cuda_graphs": ("auto", "off"), "recompute_layers": (0,),
}  # fmt: skip
REASONS = {
    "pp": "its models are not cut into pipeline stages", "ep": "its experts are not spread over ranks",
    "recompute": "gradient checkpointing wraps whole blocks",
}  # fmt: skip


def name_on_hub(plan: Plan, word: str) -> str:
    """Return the model's name for these trainers. Raises PlanError if it has none on the hub."""
    if name := hub_name(plan.model):
        return name
    if plan.init not in ("", "random"):
        return plan.init
    raise PlanError(
        f"{word} needs a name on the Hugging Face hub, and {plan.model.name} has none here: take a preset that has one"
    )


def trainer_facts(plan: Plan, word: str) -> Facts:
    """Return the facts that the Trainer's arguments state in addition to the common ones."""
    if plan.model.lora is not None:
        raise PlanError(f"--for {word} writes full training: leave --tune lora out")
    precision = plan.recipe.precision
    return {"bf16": precision == "bf16", "fp16": precision == "fp16", "hub": name_on_hub(plan, word)}


def resolve_trainer(facts: Facts) -> Facts:
    """Return precision, recomputation and adapters from the switches. Raises PlanError for an unknown word."""
    resolved = {**facts, **adapter_facts(facts), **preference_facts(facts)}
    resolved["precision"] = _precision(resolved)
    checkpoints = resolved.get("checkpointing") or resolved.get("fsdp_checkpointing")
    resolved["recompute"] = "full" if checkpoints and str(checkpoints).lower() != "false" else "none"
    return resolved


PREFERENCES = {"dpo": True, "sigmoid": True, "hinge": True, "ipo": True, "kto_pair": True, "dpop": True,
               "orpo": False, "simpo": False, "cpo": False}  # fmt: skip
"""Losses over pairs of answers -> True if they need a frozen copy of the model."""


def preference_facts(facts: Facts) -> Facts:
    """Return `pairs` and `reference` of a loss over pairs of answers, whatever word a trainer uses."""
    words = [facts.get(name) for name in ("preference", "pair_loss", "stage", "rl")]
    word = next((str(name) for name in words if str(name) in PREFERENCES), "")
    if not word and facts.get("preference_beta") is None:
        return {}
    # With a margin no reference is asked, and one that was asked beforehand is not kept.
    free = facts.get("margin") is not None or is_on(facts.get("asked_before"))
    return {"pairs": True, "reference": PREFERENCES.get(word, True) and not free}


STAGES = {
    "kto": "rates answers, and holds a frozen copy of the model",
    "rm": "trains a model that rewards answers",
    "ppo": "samples answers, and rewards them",
}
"""LLaMA-Factory's trainers other than that of the next token."""


def objections(facts: Facts) -> Iterator[str]:
    """Yield settings that need more than is counted, or that these trainers do not have."""
    optimizer = str(facts.get("optimizer") or ADAMW[0])
    if optimizer not in ADAMW and not SMALLER.search(optimizer.lower()):
        yield f"optimizer {optimizer} is not counted: take one of {', '.join(ADAMW)}"
    if facts.get("trains") is not None and not is_on(facts["trains"]):
        yield "do_train is off, or left out, so that nothing is trained"
    stage = str(facts.get("stage") or "sft")
    if stage not in ("sft", "pt", "dpo"):
        yield f"stage={stage} {STAGES.get(stage, 'is a loss of its own')}, which is not counted: take sft, pt or dpo"
    if str(facts.get("wrap") or BY_BLOCK) != BY_BLOCK:
        yield f"auto_wrap_policy={facts['wrap']} gathers other units than blocks, not counted: take {BY_BLOCK}"
    yield from adapter_objections(facts)


def smaller_states(optimizer: str) -> Iterator[str]:
    """Yield that an optimizer saves memory, if it does. Empty = none is named."""
    if SMALLER.search(optimizer.lower()):
        yield f"optimizer {optimizer} keeps smaller states than AdamW in fp32, which needs less memory: not counted."


def bounds(facts: Facts) -> Iterator[str]:
    """Yield uncounted settings that save memory or time."""
    if pairs := preference_facts(facts):
        copy = ", plus a frozen copy of the model" * pairs["reference"]
        yield f"Answers of a pair are two full sequences{copy}: shorter ones need less memory and time: not counted."
        if pairs["reference"] and is_adapted(facts):
            yield "Adapters are switched off in place of a frozen copy, which needs less memory: not counted."
    if facts.get("adapter") == FROZEN:
        yield "finetuning_type=freeze trains some layers only, which needs less memory: not counted."
    optimizer = str(facts.get("optimizer") or ADAMW[0])
    if optimizer not in ADAMW:
        yield from smaller_states(optimizer)
    if is_on(facts.get("offload_params")):
        yield f"offload_params=true keeps parameters, gradients and optimizer states {ON_HOST}: not counted."
    if str(facts.get("checkpointing")).startswith(("offload", "unsloth")):
        yield f"gradient_checkpointing={facts['checkpointing']} keeps inputs of blocks {ON_HOST}: not counted."
    if facts.get("mixed_precision") == "fp8":
        yield "mixed_precision=fp8 makes products of 8 bits, which takes less time: not counted."


def as_script(file: ConfigFile) -> ConfigFile:
    """Return the file as arguments of a script, behind those of the launcher.

    The model may be called `--model_name`, as in TRL's scripts, or `--model`.
    """
    options = (replace(option, also=(*option.also, "--model_name", "--model")) if option.fact == "hub" else option
               for option in file.options)  # fmt: skip
    return replace(file, options=(*options, *LAUNCHER), ignored=(*file.ignored, *LAUNCHER_IGNORED))


LAUNCHER = (
    Option(key="--nnodes", fact="launcher_nodes", meaning="nodes of torchrun", also=("--num_nodes",)),
    Option(key="--nproc_per_node", fact="node_devices", meaning="GPUs of a node",
           also=("--nproc-per-node", "--num_gpus")),
)  # fmt: skip
"""Options of torchrun and deepspeed before the script."""
LAUNCHER_KEYS = frozenset(key for option in LAUNCHER for key in (option.key, *option.also))
"""Keys that do not identify a trainer, since programs of all trainers follow them."""
LAUNCHER_IGNORED = (
    "--node_rank", "--node-rank", "--master_*", "--master-*", "--rdzv*", "--standalone", "--max_restarts",
    "--max-restarts",
)  # fmt: skip


def count_devices(facts: Facts) -> Facts:
    """Return `devices` of all nodes if the launcher states a number for one node."""
    nodes, per_node = facts.get("launcher_nodes") or 1, facts.get("node_devices")
    if facts.get("devices") is None and isinstance(nodes, int) and isinstance(per_node, int):
        return {"devices": nodes * per_node}
    return {}


def is_on(switch: object) -> bool:
    """Return True if a file switches it on, as a YAML boolean or a word."""
    return str(switch or False).lower() not in ("false", "none", "no", "")


def _precision(facts: Facts) -> str:
    """Return the precision by the Trainer's switches, else by accelerate's file, else bf16.

    Source: transformers, TrainingArguments.__post_init__; accelerate, Accelerator.__init__.
    """
    word = facts.get("mixed_precision")
    if str(facts.get("bf16")).lower() == "true":
        return "bf16"
    for name in ("fp16", "bf16"):
        if str(facts.get(name, False)).lower() in ("true", "auto"):
            return name
    if word is None:
        return "fp32" if "bf16" in facts else "bf16"
    if _precision_word(word) not in MIXED:
        raise PlanError(f"mixed_precision={word} is not understood: take {', '.join(MIXED)}")
    return MIXED[_precision_word(word)]


def _precision_word(word: object) -> str:
    """Return the word. YAML 1.1 reads a bare `no` as false, and so does accelerate."""
    return "no" if word is False else str(word).lower()


MIXED = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""mixed_precision of accelerate -> recipe.precision: utils/dataclasses.py, PrecisionType."""


def fsdp_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why FSDP2, with or without replicas, or plain data parallelism cannot split so."""
    sharded = layout.dp_shard * layout.cp > 1
    if layout.zero == 1:
        return "FSDP2 shards gradients and parameters, or nothing: take layout.zero=3, 2 or 0"
    if layout.zero == 0 and (layout.dp_shard > 1 or layout.cp > 1 or layout.tp > 1):
        return "without FSDP there is plain data parallelism only: take layout.zero=3, or replicas alone"
    if layout.zero and layout.dp_shard == 1 and layout.dp_replicate > 1:
        return "FSDP2 shards over ranks of data parallelism: take layout.dp_shard of 2 or more"
    return "" if sharded or not layout.zero else "layout.zero shards over ranks, and there is one"
