"""nanotron: the YAML of run_train.py."""

from dataclasses import replace
from typing import Any

from meshwright.planner.accuracy.published_stacks import NANOTRON as AS_PUBLISHED
from meshwright.planner.accuracy.published_stacks import NANOTRON_GATHERED, NANOTRON_GATHERED_PIPELINE
from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware

LLAMA = "model.model_config."
MODEL = (
    Option(key=f"{LLAMA}hidden_size", fact="hidden", default=4096, meaning="width of the residual stream"),
    Option(key=f"{LLAMA}intermediate_size", fact="ffn", default=11008, meaning="inner width of the MLP"),
    Option(key=f"{LLAMA}num_hidden_layers", fact="layers", default=32, meaning="transformer blocks"),
    Option(key=f"{LLAMA}num_attention_heads", fact="heads", default=32, meaning="query heads"),
    Option(key=f"{LLAMA}num_key_value_heads", fact="kv_heads", meaning="key heads"),
    Option(key=f"{LLAMA}max_position_embeddings", fact="max_positions", default=2048, meaning="longest sequence"),
    Option(key=f"{LLAMA}rms_norm_eps", fact="norm_eps", default=1e-6, meaning="added to the mean square in norms"),
    Option(key=f"{LLAMA}rope_theta", fact="rope_theta", default=10000.0, meaning="base of the rotary frequencies"),
    Option(key=f"{LLAMA}tie_word_embeddings", fact="tied", default=False, meaning="head and embedding are one matrix"),
    Option(key=f"{LLAMA}vocab_size", fact="vocab", default=32000, meaning="rows of the embedding"),
)
LAYOUT = (
    Option(key="parallelism.dp", fact="dp", meaning="replicas of the model"),
    Option(key="parallelism.pp", fact="pp", default=1, meaning="ranks that share the layers"),
    Option(key="parallelism.tp", fact="tp", default=1, meaning="ranks that share every matrix"),
    Option(key="parallelism.pp_engine", fact="schedule", default="afab", words={"1f1b": "1f1b", "afab": "afab"},
           meaning="order of forward and backward passes"),
    Option(key="parallelism.tp_mode", fact="sp", words={True: "REDUCE_SCATTER", False: "ALL_REDUCE"},
           default="ALL_REDUCE", meaning="REDUCE_SCATTER: norms share the sequence"),
    Option(key="parallelism.tp_linear_async_communication", fact="asynchronous", default=False,
           meaning="exchanges overlap with products"),
    Option(key="parallelism.tp_recompute_allgather", fact="regathered", default=True,
           meaning="gathered inputs are not kept for the backward pass"),
    Option(key="parallelism.recompute_layer", fact="recompute", words={"full": True, "none": False}, default=False,
           meaning="the backward pass makes blocks again"),
    Option(key="optimizer.zero_stage", fact="zero", default=0, meaning="1 shares optimizer states out"),
    Option(key="optimizer.optimizer_factory.name", fact="optimizer", words={"adamw": "adamW"},
           meaning="AdamW with two fp32 states"),
    Option(key="optimizer.accumulate_grad_in_fp32", fact="wide_sums", default=True,
           meaning="fp32 sums in addition to 16-bit gradients"),
    Option(key="optimizer.learning_rate_scheduler.learning_rate", fact="learning_rate", meaning="yours to choose"),
    Option(key="tokens.sequence_length", fact="sequence", meaning="tokens of a sequence"),
    Option(key="tokens.micro_batch_size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
    Option(key="tokens.batch_accumulation_per_replica", fact="accumulation", default=1,
           meaning="micro-batches of a step"),
    Option(key="tokens.train_steps", fact="steps", meaning="optimizer steps: yours to choose"),
)  # fmt: skip
FIXED: dict[str, tuple[Any, str]] = {
    f"{LLAMA}is_llama_config": (True, "family"),
    f"{LLAMA}hidden_act": ("silu", "gated MLP"),
    "model.dtype": ("bfloat16", "of parameters and products"),
    "model.init_method.std": (0.02, "of random weights"),
    "general.project": ("meshwright", "name of the run"),
    "general.seed": (42, ""),
    "parallelism.context_parallel_size": (1, "sequences are whole"),
    "optimizer.optimizer_factory.name": ("adamW", ""),
    "optimizer.optimizer_factory.adam_beta1": (0.9, ""),
    "optimizer.optimizer_factory.adam_beta2": (0.95, ""),
    "optimizer.optimizer_factory.adam_eps": (1e-8, ""),
    "optimizer.optimizer_factory.torch_adam_is_fused": (True, "one kernel for many tensors"),
    "optimizer.weight_decay": (0.1, "yours to choose"),
    "optimizer.clip_grad": (1.0, ""),
    "optimizer.learning_rate_scheduler.lr_warmup_steps": (100, "yours to choose"),
    "optimizer.learning_rate_scheduler.lr_warmup_style": ("linear", ""),
    "optimizer.learning_rate_scheduler.lr_decay_style": ("cosine", ""),
    "optimizer.learning_rate_scheduler.min_decay_lr": (0.0, ""),
    "tokenizer.tokenizer_name_or_path": ("TOKENIZER", "yours"),
    "checkpoints.checkpoints_path": ("checkpoints", "where they go"),
    "checkpoints.checkpoint_interval": (1000, "steps"),
    "data_stages": ([{"name": "train", "start_training_step": 1, "data": {
        "dataset": {"hf_dataset_or_datasets": "DATASET", "text_column_name": "text"}, "seed": 42}}], "yours"),
}  # fmt: skip
IGNORED = (
    "checkpoints*", "data_stages*", "general*", "lighteval*", "logging*", "profiler*", "tokenizer*", "s3_upload*",
    "metrics_logging*", "optimizer.*", "tokens.*", "model.init_method*", "model.ddp_bucket_cap_mb",
    "model.make_vocab_size_divisible_by",
    *(f"{LLAMA}{name}" for name in (
        "bos_token_id", "eos_token_id", "hidden_act", "initializer_range", "pad_token_id", "pretraining_tp",
        "rope_scaling", "rope_interleaved", "use_cache", "_attn_implementation", "z_loss*", "rope_scaling.*",
        "_fused_rotary_emb", "_fused_rms_norm", "_use_qkv_packed", "_use_doc_masking",
    )),
)  # fmt: skip
REFUSED = {
    f"{LLAMA}is_qwen2_config": "takes another model's code, on which no published row was run",
    f"{LLAMA}is_starcoder2_config": "takes another model's code, on which no published row was run",
    f"{LLAMA}attention_bias": "adds biases to the Llama model",
    "parallelism.moe_layer_recompute": "makes experts again in the backward pass",
}
NARROW: dict[str, Any] = {"gradient_bytes": 2.0, "gradient_exchange_bytes": 2.0, "accumulates": False}
"""Settings without fp32 sums in addition to the gradients."""


def _stack(facts: Facts) -> Stack:
    stack = AS_PUBLISHED
    if not facts.get("regathered", True):
        stack = NANOTRON_GATHERED_PIPELINE if (facts.get("pp") or 1) > 1 else NANOTRON_GATHERED
    return stack if facts.get("wide_sums", True) else replace(stack, **NARROW)


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why ZeRO-1 over all replicas, or tensor parallelism as in the published runs, cannot split so."""
    if layout.zero and layout.dp_replicate > 1:
        return "its ZeRO shares states among all replicas: take layout.dp_replicate=1"
    if layout.zero == 0 and layout.dp_shard > 1:
        return "without ZeRO nothing is shared: take layout.dp_shard=1"
    if layout.tp > 1 and not layout.sp:
        return "published runs had tp_mode=REDUCE_SCATTER: take layout.sp=true"
    if layout.tp > 1 and shape.kv_heads % layout.tp:
        return f"tp={layout.tp} does not divide the {shape.kv_heads} key heads"
    return ""


def pipeline_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why there cannot be so many stages. Stages are cut by cost, so any number up to the layers is possible."""
    return "" if layout.pp <= shape.layers else f"pp={layout.pp} is more than {shape.layers} layers"


def _facts(plan: Plan) -> Facts:
    shape = plan.model
    if shape.unbuilt is not None:
        raise PlanError(f"nanotron is counted with its Llama model, which has no {shape.unbuilt.named()[0]}")
    usual = (shape.mlp, shape.norm, shape.positions) == ("swiglu", "rmsnorm", "rope")
    if not usual or shape.moe or shape.mla or shape.qkv_bias or shape.qk_norm or shape.window:
        raise PlanError(f"nanotron trains Llama models, and {shape.name} is not one: take a Llama")
    # Its configuration has no width of heads, and computes it as hidden / heads.
    if shape.head_dim * shape.heads != shape.hidden:
        raise PlanError(f"nanotron's heads share the hidden size out, and those of {shape.name} do not")
    return {"asynchronous": plan.layout.tp > 1, "regathered": True, "wide_sums": True}


def _resolve(facts: Facts) -> Facts:
    resolved = {**facts, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "precision": "bf16"}
    resolved["kv_heads"] = resolved.get("kv_heads") or resolved.get("heads")
    if resolved.get("zero") not in (0, 1):
        raise PlanError(f"optimizer.zero_stage={resolved.get('zero')} is not understood: take 0 or 1")
    dp, shared = resolved.get("dp"), resolved.get("zero") == 1
    return {**resolved, "dp_shard": dp if shared else 1, "dp_replicate": 1 if shared else dp}


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        before=("export CUDA_DEVICE_MAX_CONNECTIONS=1",),
        command='torchrun $TORCHRUN run_train.py --config-file "$HERE/nanotron.yaml"',
        yours=(
            "TOKENIZER",
            "DATASET",
            "learning rate and its schedule",
            "run_train.py of nanotron, next to these files",
        ),
    )


NANOTRON = TrainingSoftware(
    word="nanotron",
    title="nanotron (April 2026), its Llama model",
    stack=_stack,
    offered={
        "cp": (1,), "ep": (1,), "vp": (1,), "zero": (0, 1), "schedule": ("1f1b", "afab"), "recompute": ("none", "full"),
        "offload": ("off",), "cuda_graphs": ("auto", "off"), "recompute_layers": (0,),
    },
    reasons={
        "cp": "no published run had it", "ep": "its Llama model has no experts", "vp": "a rank has one stage",
        "zero": "optim/zero.py shares optimizer states", "schedule": "parallel/pipeline_parallel/engine.py",
        "recompute": "recompute_layer",
    },
    split_refusal=split_refusal,
    pipeline_refusal=pipeline_refusal,
    files=(
        ConfigFile(
            name="nanotron.yaml", form="yaml", options=(*MODEL, *LAYOUT), fixed=FIXED, ignored=IGNORED,
            refused=REFUSED, title="configuration for run_train.py of nanotron",
        ),
    ),
    facts=_facts,
    resolve=_resolve,
    launch=_launch,
    measured=("Ultra-Scale grid", "Ultra-Scale curves"),
    unknown=("Step times of the grid are far off: rely on its memory, and measure its speed.",),
    axes={"micro_batch": "tokens.micro_batch_size", "tp": "parallelism.tp", "pp": "parallelism.pp",
          "zero": "optimizer.zero_stage", "recompute": "parallelism.recompute_layer", "dp_shard": "parallelism.dp",
          "dp_replicate": "parallelism.dp", "schedule": "parallelism.pp_engine", "sp": "parallelism.tp_mode"},
)  # fmt: skip
