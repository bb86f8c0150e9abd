"""MaxText: the YAML of its pre-training, on TPUs and GPUs."""

from math import gcd, prod

from meshwright.planner.cost.stack import Stack
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware

COMPILED = Stack(
    name="maxtext",
    flash=3,
    logit_kept=6.0,
    logit_peak=10.0,
    gradient_bytes=4.0,
    sharding="fully_shard",
    shard_bytes=4.0,
    selective="products",
    host_s=1e-7,
    source="AI-Hypercomputer/maxtext configs/base.yml (fp32 weights and gradients, bf16 products), "
    "layers/nnx_decoders.py (minimal keeps products with weights). XLA compiles a step into one program: elementwise "
    "operations are fused, and the host launches once.",
)
"""No published row of it could be scored."""
MODELS = {
    "llama-3.1-8b": "llama3.1-8b", "llama-3.1-70b": "llama3.1-70b", "llama-3.1-405b": "llama3.1-405b",
    "llama-2-7b": "llama2-7b", "llama-2-13b": "llama2-13b", "llama-2-70b": "llama2-70b",
    "mistral-7b-v0.1": "mistral-7b", "qwen2.5-1.5b": "qwen2.5-1.5b", "qwen2.5-7b": "qwen2.5-7b",
    "qwen2.5-14b": "qwen2.5-14b", "qwen3-0.6b": "qwen3-0.6b", "qwen3-1.7b": "qwen3-1.7b", "qwen3-4b": "qwen3-4b",
    "qwen3-8b": "qwen3-8b", "qwen3-14b": "qwen3-14b", "qwen3-32b": "qwen3-32b",
}  # fmt: skip
"""Preset -> model_name: maxtext/configs/models."""
AXES = {"tp": "tensor", "cp": "context", "dp_shard": "fsdp", "dp_replicate": "data"}
"""Field of a layout -> axis of its mesh, innermost first."""
MEANINGS = {
    "tp": "ranks that share every matrix", "cp": "ranks that share every sequence",
    "dp_shard": "ranks that share parameters, gradients and optimizer", "dp_replicate": "replicas that hold all shards",
}  # fmt: skip
MESH = tuple(
    Option(key=f"{where}_{axis}_parallelism", fact=f"{where}_{field}", meaning=f"{MEANINGS[field]}: {side}")
    for where, side in (("ici", "within a slice or node"), ("dcn", "over them"))
    for field, axis in AXES.items()
)
ONE = (
    "sequence", "expert", "pipeline", "tensor_sequence", "fsdp_transpose", "autoregressive", "context_autoregressive",
    "diloco", "context_usp_ulysses",
)  # fmt: skip
"""Axes that are not counted."""
YAML = ConfigFile(
    name="maxtext.yml",
    form="yaml",
    options=(
        Option(key="model_name", fact="mt_model", meaning="sizes of the model"),
        Option(key="hardware", fact="hardware", meaning="tpu, or gpu with a process per node"),
        Option(key="attention", fact="attention", meaning="a kernel that never writes the weights of attention"),
        Option(key="max_target_length", fact="sequence", default=2048, meaning="tokens of a sequence"),
        Option(key="per_device_batch_size", fact="per_device", default=12.0,
               meaning="sequences of a micro-batch over devices, those of tensor and context axes too"),
        Option(key="gradient_accumulation_steps", fact="accumulation", default=1, meaning="micro-batches of a step"),
        Option(key="remat_policy", fact="recompute", default="full", meaning="what the backward pass makes again",
               words={"none": "none", "selective": "minimal", "full": "full"}),
        Option(key="steps", fact="steps", meaning="optimizer steps: yours to choose"),
        Option(key="learning_rate", fact="learning_rate", meaning="yours to choose"),
        Option(key="opt_type", fact="optimizer", default="adamw", words={"adamw": "adamw"},
               meaning="AdamW with two fp32 states"),
        *MESH,
    ),
    fixed={
        "base_config": ("base.yml", "all other options"),
        "run_name": ("meshwright", "of the output's folder"),
        "base_output_directory": ("OUTPUT", "yours: a folder or bucket"),
        "dataset_type": ("synthetic", "yours to choose"),
        "weight_dtype": ("float32", "of shards"),
        "dtype": ("bfloat16", "of products"),
        "scan_layers": (True, "one layer is compiled for all"),
        "max_segments_per_seq": (32, "documents of a packed sequence: yours to choose"),
    },
    ignored=(
        "base_*", "run_name", "dataset_*", "enable_checkpointing", "checkpoint_*", "async_checkpointing", "tokenizer_*",
        "eval_*", "log_*", "profiler*", "enable_goodput*", "reuse_example_batch", "vocab_*", "warmup_*", "adam_*",
        "learning_rate_*", "save_*", "skip_first_n_*", "hf_*", "grain_*", "tfds_*", "override_model_config",
        "metrics_*", "gcs_metrics", "enable_tensorboard", "data_shuffle_seed", "init_weights_seed",
        "logits_dot_in_fp32", "sa_*", "jax_*", "upload_*", "monitor_*", "use_iota_embed", "context_parallel_*",
        "gradient_clipping_threshold", "packing", "scan_layers", "max_segments_per_seq",
    ),
    refused={
        **{f"{where}_{axis}_parallelism": "is an axis of its mesh that is not counted"
           for where in ("ici", "dcn") for axis in ONE},
        "quantization": "makes products of 8 bits",
        "optimizer_memory_host_offload": "keeps optimizer states in host memory",
        "parameter_memory_host_offload": "keeps parameters in host memory",
        "shard_optimizer_over_data": "shares optimizer states among replicas",
        "num_vocab_tiling": "makes logits in parts, which needs less memory than is counted",
        "mu_dtype": "keeps a moment in other bits",
    },
    title="configuration for MaxText's pre-training",
)  # fmt: skip


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why FSDP with replicas cannot split so. Sharded weights are ZeRO-3."""
    sharded = layout.dp_shard * layout.cp > 1
    if sharded and layout.zero != 3:
        return f"its fsdp axis shards weights, and layout.zero={layout.zero} is no such thing: take layout.zero=3"
    if layout.cp > 1 and layout.dp_shard == 1:
        return "context parallelism without an fsdp axis is not counted: take layout.dp_shard of 2 or more"
    if layout.tp > 1 and (shape.kv_heads % layout.tp or not layout.sp):
        return f"its tensor axis cuts heads and the stream: take a tp that divides {shape.kv_heads}, and sp=true"
    return ""


def _mesh(layout: Layout, slice_devices: int) -> Facts:
    """Return the degrees of each axis: innermost axes within a slice first, the rest over slices."""
    degrees: Facts = {}
    # The innermost axes take the devices of a slice, and the outer ones what these leave.
    for field in AXES:
        degree: int = getattr(layout, field)
        inside = gcd(degree, slice_devices)
        slice_devices //= inside
        degrees |= {f"ici_{field}": inside, f"dcn_{field}": degree // inside}
    return degrees


def on_tpus(plan: Plan) -> bool:
    """Return True if a node of the cluster is a slice of TPUs."""
    return plan.cluster.device.name.startswith("TPU")


def _facts(plan: Plan) -> Facts:
    layout, name = plan.layout, plan.model.name
    if name not in MODELS:
        raise PlanError(f"maxtext has no configuration of {name} here: take one of {', '.join(MODELS)}")
    tpu = on_tpus(plan)
    micro = layout.micro_batch_of(plan.recipe.global_batch)
    return {
        **_mesh(layout, plan.cluster.devices_per_node),
        "mt_model": MODELS[name], "hardware": "tpu" if tpu else "gpu",
        # Each platform has its own fused kernel, and the fallback of either writes all scores.
        "attention": "flash" if tpu else "cudnn_flash_te",
        "optimizer": "adamw", "per_device": micro / (layout.tp * layout.cp),
    }  # fmt: skip


def _resolve(facts: Facts) -> Facts:
    resolved = {**facts, "precision": "bf16", "zero": 3}
    for field, axis in AXES.items():
        sizes = [resolved.get(f"{where}_{field}", 1) for where in ("ici", "dcn")]
        if any(not isinstance(size, int) or size < 1 for size in sizes):
            raise PlanError(f"ici_ or dcn_{axis}_parallelism={sizes} is filled in by MaxText: state the number")
        resolved[field] = prod(sizes)
    # Its defaults fill these axes with whatever devices there are, so the file alone does not tell.
    if "ici_dp_shard" not in resolved or not {"dcn_dp_replicate", "dcn_dp_shard"} & resolved.keys():
        raise PlanError("ici_fsdp_parallelism and dcn_data_parallelism are filled in by MaxText: state the numbers")
    # MaxText divides a batch by all devices, and ranks of tensor and context axes share its sequences.
    micro = resolved["per_device"] * resolved["tp"] * resolved["cp"]
    if micro != int(micro) or micro < 1:
        raise PlanError(f"per_device_batch_size={resolved['per_device']} gives {micro:g} sequences per replica")
    return {**resolved, "micro_batch": int(micro), "sp": resolved["tp"] > 1}


def shape_named(facts: Facts) -> ModelShape | None:
    """Return the model of a model_name."""
    return next(
        (presets.model(name) for name, config_name in MODELS.items() if config_name == facts.get("mt_model")), None
    )


def _launch(plan: Plan) -> LaunchCommand:
    gpus = ("export NNODES NODE_RANK JAX_COORDINATOR_IP=$HEAD JAX_COORDINATOR_PORT=$PORT",)
    return LaunchCommand(
        before=("# run this on every host of a slice: they find each other",) if on_tpus(plan) else gpus,
        command='python3 -m maxtext.trainers.pre_train.train "$HERE/maxtext.yml"',
        yours=("OUTPUT", "dataset_type and its options", "learning rate and its schedule"),
    )


MAXTEXT = TrainingSoftware(
    word="maxtext",
    title="MaxText 0.2",
    stack=lambda facts: COMPILED,
    offered={
        "pp": (1,), "vp": (1,), "ep": (1,), "zero": (0, 3), "schedule": ("1f1b",), "offload": ("off",),
        "recompute": ("none", "selective", "full"), "cuda_graphs": ("auto", "off"), "recompute_layers": (0,),
    },
    reasons={"pp": "its pipeline is not counted", "ep": "its experts are not counted", "zero": "its fsdp axis"},
    split_refusal=split_refusal,
    files=(YAML,),
    facts=_facts,
    resolve=_resolve,
    shape=shape_named,
    launch=_launch,
    unknown=(
        "No published run of MaxText could be scored: times may be off by tens of percent, and on TPUs no product was "
        "measured.",
        "What XLA fuses and moves is its own choice: its memory may be off, too.",
        "context_parallel_strategy=all_gather is counted as an exchange of keys and values around a ring.",
    ),
    axes={"tp": "ici_tensor_parallelism", "cp": "ici_context_parallelism", "dp_shard": "ici_fsdp_parallelism",
          "dp_replicate": "ici_data_parallelism", "micro_batch": "per_device_batch_size", "recompute": "remat_policy"},
)  # fmt: skip
