"""Megatron-LM: the arguments of pretrain_gpt.py."""

import re
from dataclasses import replace

from meshwright.planner.accuracy.published_stacks import MEGATRON_CORE
from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.shape import ModelShape
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware

MODEL = (
    Option(key="--num-layers", fact="layers", meaning="transformer blocks"),
    Option(key="--hidden-size", fact="hidden", meaning="width of the residual stream"),
    Option(key="--ffn-hidden-size", fact="ffn", meaning="inner width of the dense MLP"),
    Option(key="--num-attention-heads", fact="heads", meaning="query heads"),
    Option(key="--group-query-attention", fact="grouped", default=False, meaning="fewer key heads than query heads"),
    Option(key="--num-query-groups", fact="key_heads", meaning="key heads"),
    Option(key="--kv-channels", fact="head_dim", meaning="width of a head"),
    Option(key="--max-position-embeddings", fact="max_positions", meaning="longest sequence"),
    Option(key="--position-embedding-type", fact="positions", default="learned_absolute", meaning="how positions enter",
           words={"rope": "rope", "learned": "learned_absolute"}),
    Option(key="--rotary-base", fact="rotary_base", meaning="base of the rotary frequencies"),
    Option(key="--normalization", fact="norm", default="LayerNorm", meaning="kind of norms",
           words={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}),
    Option(key="--norm-epsilon", fact="norm_eps", meaning="added to the variance in norms"),
    Option(key="--swiglu", fact="gated", default=False, meaning="gated MLP of three matrices"),
    Option(key="--untie-embeddings-and-output-weights", fact="untied", default=False,
           meaning="head and embedding are two matrices"),
    Option(key="--disable-bias-linear", fact="no_bias", default=False, meaning="matrices without biases"),
    Option(key="--add-qkv-bias", fact="only_qkv_bias", default=False, meaning="but those of queries, keys and values"),
    Option(key="--qk-layernorm", fact="qk_norm", default=False, meaning="norms of queries and keys"),
    Option(key="--window-size", fact="window_pair", meaning="sliding window: keys before and after a query"),
    Option(key="--vocab-size", fact="vocab", meaning="rows of the embedding, padded for tensor parallelism"),
    Option(key="--num-experts", fact="moe_experts", meaning="routed experts of a layer"),
    Option(key="--moe-router-topk", fact="moe_top_k", meaning="experts that a token visits"),
    Option(key="--moe-ffn-hidden-size", fact="moe_ffn", meaning="inner width of an expert"),
    Option(key="--moe-shared-expert-intermediate-size", fact="moe_shared_width", meaning="width of the shared expert"),
    Option(key="--moe-layer-freq", fact="moe_pattern", meaning="which layers have experts"),
    Option(key="--multi-latent-attention", fact="latent", default=False, meaning="keys and values of low rank"),
    Option(key="--q-lora-rank", fact="mla_q_rank", meaning="rank of queries"),
    Option(key="--kv-lora-rank", fact="mla_kv_rank", meaning="rank of keys and values"),
    Option(key="--qk-head-dim", fact="mla_nope_dim", meaning="width of a head without rotation"),
    Option(key="--qk-pos-emb-head-dim", fact="mla_rope_dim", meaning="rotated width of a head"),
    Option(key="--v-head-dim", fact="mla_v_dim", meaning="width of a value head"),
)  # fmt: skip
LAYOUT = (
    Option(key="--tensor-model-parallel-size", fact="tp", default=1, meaning="ranks that share every matrix"),
    Option(key="--sequence-parallel", fact="sp", default=False, meaning="norms share the sequence among them"),
    Option(key="--tp-comm-overlap", fact="tp_overlap", default=False,
           meaning="exchanges run beside products, as counted"),
    Option(key="--pipeline-model-parallel-size", fact="pp", default=1, meaning="ranks that share the layers"),
    Option(key="--num-virtual-stages-per-pipeline-rank", fact="stages_of_rank",
           meaning="interleaved schedule: stages of a rank"),
    Option(key="--context-parallel-size", fact="cp", default=1, meaning="ranks that share every sequence"),
    Option(key="--expert-model-parallel-size", fact="ep", default=1, quiet=True,
           meaning="ranks that share the experts"),
    Option(key="--expert-tensor-parallel-size", fact="expert_tp", meaning="an expert is whole on its rank"),
    Option(key="--use-distributed-optimizer", fact="sharded", default=False,
           meaning="ZeRO-1: optimizer states shared out"),
    Option(key="--overlap-grad-reduce", fact="overlap_reduce", default=False,
           meaning="gradients are summed beside the backward pass"),
    Option(key="--overlap-param-gather", fact="overlap_gather", default=False,
           meaning="parameters are gathered beside the forward pass"),
    Option(key="--micro-batch-size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
    Option(key="--global-batch-size", fact="global_batch", meaning="sequences of a step, over all ranks"),
    Option(key="--seq-length", fact="sequence", meaning="tokens of a sequence"),
    Option(key="--recompute-granularity", fact="granularity", meaning="what the backward pass makes again"),
    Option(key="--recompute-modules", fact="recompute_modules", meaning="of a layer: the attention core"),
    Option(key="--recompute-method", fact="recompute_method", meaning="whole layers, the first of each stage"),
    Option(key="--recompute-num-layers", fact="recompute_number", meaning="how many of them, or layers of a unit"),
    Option(key="--bf16", fact="bf16", default=False, meaning="parameters and activations in bfloat16"),
    Option(key="--fp16", fact="fp16", default=False, meaning="in float16, with loss scaling"),
    Option(key="--fp8-format", fact="narrow", meaning="products of layers in 8 bits",
           words={"e4m3": "e4m3", "hybrid": "hybrid"}),
    Option(key="--train-iters", fact="steps", meaning="optimizer steps: yours to choose"),
    Option(key="--lr", fact="learning_rate", meaning="learning rate: yours to choose"),
)  # fmt: skip
FIXED = {
    "--cross-entropy-loss-fusion": (True, "softmax and loss in one kernel"),
    "--attention-dropout": (0.0, "no masks are drawn"),
    "--hidden-dropout": (0.0, "no masks are drawn"),
    "--tokenizer-type": ("HuggingFaceTokenizer", "yours to choose"),
    "--tokenizer-model": ("TOKENIZER", "yours: a hub name or a folder"),
    "--data-path": ("DATA", "yours: preprocessed text"),
}
IGNORED = (
    "--lr-*", "--min-lr", "--weight-decay*", "--adam-*", "--clip-grad", "--init-method*", "--log-*", "--save*",
    "--load*",
    "--eval-*", "--split", "--tokenizer-*", "--data-*", "--train-*", "--tensorboard-*", "--wandb-*", "--ckpt-*",
    "--distributed-*", "--num-workers", "--seed", "--merge-file", "--vocab-file", "--mock-data", "--exit-*",
    "--rotary-percent",
    "--attention-dropout", "--hidden-dropout", "--nproc*", "--nnodes", "--node_rank", "--node-rank", "--master_*",
    "--rdzv*",
    "--no-load-*", "--no-save-*", "--decoupled-*", "--manual-gc*", "--empty-unused-memory-level", "--profile*",
    "--no-create-attention-mask-in-dataloader", "--no-mmap-bin-files", "--tiktoken-*", "--apply-layernorm-1p",
    "--use-mcore-models", "--use-flash-attn", "--attention-backend", "--transformer-impl", "--no-masked-softmax-fusion",
    "--no-position-embedding", "--distributed-backend", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl",
    "--calculate-per-token-loss", "--moe-router-*", "--moe-aux-*", "--moe-grouped-gemm", "--moe-token-dispatcher-type",
    "--moe-permute-fusion", "--moe-enable-deepep", "--overlap-moe-*", "--use-rope-scaling", "--rope-scaling-factor",
    "--make-vocab-size-divisible-by", "--override-opt_param-scheduler", "--no-gradient-accumulation-fusion",
    "--no-bias-*", "--no-rope-fusion", "--no-check-*", "--timing-*", "--async-*", "--use-dist-ckpt*", "--dist-ckpt*",
    "--pipeline-model-parallel-layout-note", "--gres*", "--ntasks*", "--nodes", "--job-name", "--gpus*", "--cpus*",
    "--rotary-scaling-factor", "--mscale*", "--no-rope-freq", "--disable-bias-note", "--local-ranks-filter",
    "--fp8-amax-*", "--fp8-margin", "--fp8-interval", "--fp8-recipe", "--fp8-param-gather",
    "--optimizer", "--use-checkpoint-opt_param-scheduler", "--te-rng-tracker", "--enable-experimental",
)  # fmt: skip
REFUSED = {
    "--use-megatron-fsdp": "shards with Megatron-FSDP",
    "--use-custom-fsdp": "shards with Megatron-FSDP",
    "--use-torch-fsdp2": "shards with FSDP2",
    "--optimizer-cpu-offload": "keeps optimizer states in host memory",
    "--cpu-offloading-num-layers": "keeps activations in host memory",
    "--pipeline-model-parallel-layout": "deals layers to stages by hand",
    "--decoder-first-pipeline-num-layers": "deals layers to stages by hand",
    "--decoder-last-pipeline-num-layers": "deals layers to stages by hand",
    "--account-for-embedding-in-pipeline-split": "counts the embedding as a layer of its stage",
    "--account-for-loss-in-pipeline-split": "counts the loss as a layer of its stage",
    "--mtp-num-layers": "adds layers that predict more tokens",
    "--use-precision-aware-optimizer": "keeps optimizer states in fewer bits",
    "--num-distributed-optimizer-instances": "shares optimizer states in groups of ranks",
    "--moe-layer-recompute": "makes experts again in the backward pass",
    "--spec": "takes the layers from another module",
}
MODULES = "core_attn"


def stack_of(facts: Facts) -> Stack:
    """Megatron-Core's memory and time, with what the options overlap."""
    overlapped = facts.get("tp_overlap", True) or (facts.get("tp") or 1) == 1
    stack = replace(MEGATRON_CORE, product_bytes=1.0) if facts.get("narrow") else MEGATRON_CORE
    stack = stack if overlapped else replace(stack, hides_tensor=0.0)
    return stack if facts.get("overlap_reduce", True) else replace(stack, hides_gradients=0.0)


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Megatron-Core's distributed optimizer and expert parallelism."""
    if layout.zero and layout.dp_replicate > 1:
        return "the distributed optimizer shares states among all data-parallel ranks: take layout.dp_replicate=1"
    if layout.zero == 0 and layout.dp_shard > 1:
        return "without the distributed optimizer nothing is shared: take layout.dp_shard=1"
    if shape.ffn % layout.tp or (shape.moe and layout.ep == 1 and shape.moe.ffn % layout.tp):
        return f"tp={layout.tp} does not divide the inner width of the MLP"
    if shape.mla is None and shape.kv_heads % layout.tp and layout.tp > 1:
        return f"tp={layout.tp} does not divide the {shape.kv_heads} key heads"
    if shape.moe and layout.tp > 1 and not layout.sp:
        return "experts with tensor parallelism want sequence parallelism"
    return ""


def pipeline_refusal(shape: ModelShape, layout: Layout) -> str:
    """Stages of equal layers."""
    if layout.pp > 1 and shape.layers % (layout.pp * layout.vp):
        return f"pp={layout.pp} x vp={layout.vp} stages do not divide the {shape.layers} layers"
    if layout.vp > 1 and layout.schedule != "interleaved":
        return "several stages of a rank are interleaved: take layout.schedule=interleaved"
    return ""


def _pattern(shape: ModelShape) -> str | None:
    """Which layers have experts, where the first have none."""
    dense = shape.moe.first_dense if shape.moe else 0
    return f"[0]*{dense}+[1]*{shape.layers - dense}" if dense else None


def _facts(plan: Plan) -> Facts:
    shape, layout = plan.model, plan.layout
    if shape.window_from_layer:
        raise PlanError("megatron-lm: a window from some layer on has no argument of pretrain_gpt.py")
    latent, moe = shape.mla, shape.moe
    plain_bias = shape.mlp_bias and shape.out_bias
    return {
        "grouped": shape.kv_heads < shape.heads,
        "rotary_base": int(shape.rope_theta) if shape.positions == "rope" else None,
        "key_heads": shape.kv_heads if shape.kv_heads < shape.heads else None, "gated": shape.mlp == "swiglu",
        "untied": not shape.tied, "no_bias": not plain_bias, "only_qkv_bias": shape.qkv_bias and not plain_bias,
        "window_pair": f"{shape.window - 1},0" if shape.window else None, "latent": latent is not None,
        "head_dim": None if latent else shape.head_dim,
        "moe_pattern": _pattern(shape),
        "moe_shared_width": moe.shared_experts * moe.ffn if moe and moe.shared_experts else None,
        **({f"mla_{name}": getattr(latent, name) for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")}
           if latent else {}),
        **layout_facts(plan),
        "granularity": None if layout.recompute == "none" else layout.recompute,
        "recompute_modules": MODULES if layout.recompute == "selective" else None,
        "recompute_method": None if layout.recompute != "full" else "block" if layout.recompute_layers else "uniform",
        "recompute_number": None if layout.recompute != "full" else layout.recompute_layers or 1,
        "bf16": plan.recipe.precision == "bf16", "fp16": plan.recipe.precision == "fp16",
    }  # fmt: skip


def layout_facts(plan: Plan) -> Facts:
    """What Megatron-Core's options say of a layout, whoever sets them."""
    layout = plan.layout
    return {
        "stages_of_rank": layout.vp if layout.vp > 1 else None, "expert_tp": 1 if layout.ep > 1 else None,
        "sharded": layout.zero == 1, "overlap_reduce": layout.dp * layout.cp > 1, "overlap_gather": layout.zero == 1,
        "tp_overlap": layout.sp,
    }  # fmt: skip


def resolve(facts: Facts) -> Facts:
    """Common facts of Megatron-Core's own."""
    found = dict(facts)
    found["zero"] = 1 if found.get("sharded") else 0
    found["vp"] = found.get("stages_of_rank") or 1
    found["schedule"] = "interleaved" if found["vp"] > 1 else "1f1b"
    if (found.get("ep") or 1) > 1 and (found.get("tp") or 1) > 1 and found.get("expert_tp") != 1:
        raise PlanError("experts that tensor parallelism cuts are not counted: take expert-tensor-parallel-size 1")
    kind, method, number = (found.get(name) for name in ("granularity", "recompute_method", "recompute_number"))
    found["recompute"] = kind or "none"
    if found["recompute"] not in ("none", "selective", "full"):
        raise PlanError(f"recompute-granularity {kind} is not understood: take selective or full")
    found["recompute_layers"] = (number or 0) if kind == "full" and method == "block" else 0
    modules = str(found.get("recompute_modules") or MODULES)
    if found["recompute"] == "selective" and modules != MODULES:
        raise PlanError(f"recompute-modules {modules} is not counted: take {MODULES}")
    return found


def _resolve(facts: Facts) -> Facts:
    found = resolve(facts)
    found["precision"] = "bf16" if found.get("bf16") else "fp16" if found.get("fp16") else "fp32"
    found["tied"], found["mlp"] = not found.get("untied"), "swiglu" if found.get("gated") else "gelu_tanh"
    found["kv_heads"] = found.get("key_heads") if found.get("grouped") else found.get("heads")
    found["qkv_bias"] = bool(found.get("only_qkv_bias")) or not found.get("no_bias")
    if found.get("hidden") and not found.get("ffn"):
        found["ffn"] = 4 * found["hidden"]  # its default
    if found.get("rotary_base") and found.get("positions") == "rope":
        found["rope_theta"] = found["rotary_base"]
    if found.get("moe_experts"):
        pattern = re.match(r"\(?\[0\]\*(\d+)", str(found.get("moe_pattern") or ""))
        found["moe_first_dense"] = int(pattern[1]) if pattern else 0
        found.setdefault("moe_ffn", found.get("ffn"))
        found["moe_shared_experts"] = int((found.pop("moe_shared_width", 0) or 0) // found["moe_ffn"])
    pair = str(found.get("window_pair") or "").partition(",")[0].strip()
    found["window"] = int(pair) + 1 if pair.isdecimal() else 0
    for name in ("moe_shared_width", "moe_pattern"):
        found.pop(name, None)
    return found


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        before=("export CUDA_DEVICE_MAX_CONNECTIONS=1", 'source "$HERE/arguments.sh"'),
        command='torchrun $TORCHRUN pretrain_gpt.py "${ARGUMENTS[@]}"',
        yours=("TOKENIZER", "DATA", "learning rate and its schedule"),
    )


MEGATRON_LM = TrainingSoftware(
    word="megatron-lm",
    title="Megatron-LM (core 0.16)",
    stack=stack_of,
    offered={
        "zero": (0, 1),
        "schedule": ("1f1b", "interleaved"),
        "recompute": ("none", "selective", "full"),
        "offload": ("off",),
        "cuda_graphs": ("off",),
    },
    reasons={"zero": "the distributed optimizer is ZeRO-1", "schedule": "megatron/core/pipeline_parallel/schedules.py"},
    split_refusal=split_refusal,
    pipeline_refusal=pipeline_refusal,
    files=(
        ConfigFile(
            name="arguments.sh",
            form="shell",
            options=(*MODEL, *LAYOUT),
            fixed=FIXED,
            ignored=IGNORED,
            refused=REFUSED,
            title="arguments for pretrain_gpt.py of Megatron-LM",
        ),
    ),
    facts=_facts,
    resolve=_resolve,
    launch=_launch,
    measured=("Megatron-Bridge", "Megatron-LM llama README", "Megatron-Core 0.8 table"),
    unknown=("Embedding rows that --make-vocab-size-divisible-by adds are not counted.",),
    axes={
        "micro_batch": "--micro-batch-size",
        "tp": "--tensor-model-parallel-size",
        "cp": "--context-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "ep": "--expert-model-parallel-size",
        "zero": "--use-distributed-optimizer",
        "recompute": "--recompute-granularity",
        "vp": "--num-virtual-stages-per-pipeline-rank",
        "sp": "--sequence-parallel",
        "recompute_layers": "--recompute-num-layers",
    },
)
