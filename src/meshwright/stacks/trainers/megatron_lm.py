"""Megatron-LM: the arguments of pretrain_gpt.py, those of a model written and read.

Arguments without a fact of a plan are ignored, refused, or a bound.
"""

import re
from dataclasses import replace

from meshwright.planner.accuracy.published_stacks import COUNTS_S, MEGATRON_CORE, MEGATRON_DEEPSPEED
from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption
from meshwright.stacks.declaration.plan_facts import likely_preset
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers.hugging_face import ON_HOST

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
           words={"rope": "rope", "learned": "learned_absolute", "alibi": "alibi"}),
    Option(key="--rotary-base", fact="rotary_base", meaning="base of the rotary frequencies"),
    Option(key="--use-rope-scaling", fact="stretched", default=False,
           meaning="frequencies stretched as Llama 3.1's"),
    Option(key="--rope-scaling-factor", fact="stretch", meaning="by so much"),
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
    Option(key="--vocab-size", fact="vocab", meaning="rows of the embedding, padded for tensor parallelism",
           also=("--padded-vocab-size",)),
    Option(key="--tokenizer-type", fact="tokenizer_kind", meaning="whose vocabulary it is"),
    Option(key="--tokenizer-model", fact="tokenizer", meaning="a hub name or a folder",
           also=("--tokenizer-name-or-path",)),
    Option(key="--merge-file", fact="merges", meaning="of a vocabulary of byte pairs"),
    Option(key="--num-experts", fact="moe_experts", meaning="routed experts of a layer"),
    Option(key="--moe-router-topk", fact="moe_top_k", default=2, meaning="experts that a token visits"),
    Option(key="--moe-router-score-function", fact="moe_scoring", default="softmax", quiet=True,
           meaning="how logits of the router become scores"),
    Option(key="--moe-router-pre-softmax", fact="moe_normalize_top_k", words={True: False, False: True}, default=False,
           meaning="scores of the chosen experts are not divided by their sum"),
    Option(key="--moe-router-num-groups", fact="moe_groups", default=1, quiet=True, meaning="groups of experts"),
    Option(key="--moe-router-group-topk", fact="moe_top_groups", default=1, quiet=True,
           meaning="groups that a token may choose from"),
    Option(key="--moe-router-topk-scaling-factor", fact="moe_routed_scale", default=1.0, quiet=True,
           meaning="factor on the sum of the experts"),
    Option(key="--moe-router-enable-expert-bias", fact="moe_correction_bias", default=False,
           meaning="a number for each expert that balances them"),
    Option(key="--moe-router-dtype", fact="router_dtype", meaning="of the router's scores"),
    Option(key="--moe-grouped-gemm", fact="grouped_products", default=False, meaning="experts of a rank in one kernel"),
    Option(key="--moe-ffn-hidden-size", fact="moe_ffn", meaning="inner width of an expert"),
    Option(key="--moe-shared-expert-intermediate-size", fact="moe_shared_width", meaning="width of the shared expert"),
    Option(key="--moe-layer-freq", fact="moe_pattern", meaning="which layers have experts"),
    Option(key="--multi-latent-attention", fact="latent", default=False, meaning="keys and values of low rank"),
    Option(key="--q-lora-rank", fact="mla_q_rank", meaning="rank of queries"),
    Option(key="--kv-lora-rank", fact="mla_kv_rank", meaning="rank of keys and values"),
    Option(key="--qk-head-dim", fact="mla_nope_dim", meaning="width of a head without rotation"),
    Option(key="--qk-pos-emb-head-dim", fact="mla_rope_dim", meaning="rotated width of a head"),
    Option(key="--v-head-dim", fact="mla_v_dim", meaning="width of a value head"),
    Option(key="--rotary-scaling-factor", fact="yarn", meaning="YaRN: frequencies stretched by so much"),
    Option(key="--mscale", fact="yarn_mscale", meaning="and scores scaled"),
    Option(key="--mscale-all-dim", fact="yarn_all_dim", meaning="in all dimensions"),
)  # fmt: skip


VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "bigscience/tokenizer": 250680}
"""Kind or name of a tokenizer -> rows of the embedding: megatron/training/tokenizer, and BLOOM's."""


def model_facts(shape: ModelShape, layout: Layout) -> Facts:
    """Return the facts of a shape. Raises PlanError if pretrain_gpt.py has no arguments for it here."""
    if shape.unbuilt is not None:
        raise PlanError(f"megatron-lm: no argument is written here for {', '.join(shape.unbuilt.named())}")
    if shape.window_from_layer:
        raise PlanError("megatron-lm: a window from some layer on has no argument of pretrain_gpt.py")
    latent = shape.mla
    plain_bias = shape.mlp_bias and shape.out_bias
    return {
        "grouped": shape.kv_heads < shape.heads,
        "key_heads": shape.kv_heads if shape.kv_heads < shape.heads else None, "gated": shape.mlp == "swiglu",
        "untied": not shape.tied, "no_bias": not plain_bias, "only_qkv_bias": shape.qkv_bias and not plain_bias,
        "window_pair": f"{shape.window - 1},0" if shape.window else None, "latent": latent is not None,
        "head_dim": None if latent else shape.head_dim, "qk_norm": shape.qk_norm or latent is not None,
        **_positions(shape), **_experts(shape, layout),
        **({f"mla_{name}": getattr(latent, name) for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")}
           if latent else {}),
    }  # fmt: skip


def _positions(shape: ModelShape) -> Facts:
    """Return base and scaling of the rotary frequencies."""
    scaling = shape.rope_scaling
    positions: Facts = {"rotary_base": int(shape.rope_theta) if shape.positions == "rope" else None}
    if scaling is not None and scaling.kind == "llama3":
        positions |= {"stretched": True, "stretch": scaling.factor}
    if scaling is not None and scaling.kind == "yarn":
        all_dim = scaling.mscale_all_dim or None
        positions |= {"yarn": scaling.factor, "yarn_mscale": scaling.mscale or None, "yarn_all_dim": all_dim}
    return positions


def _experts(shape: ModelShape, layout: Layout) -> Facts:
    """Return the facts of experts other than their sizes."""
    # Megatron-LM defaults to one product per expert, and to gathering all tokens, so both are stated.
    if shape.moe is None:
        return {}
    dense, spread = shape.moe.first_dense, layout.ep > 1
    return {
        "moe_pattern": f"[0]*{dense}+[1]*{shape.layers - dense}" if dense else None,
        "moe_shared_width": shape.moe.shared_experts * shape.moe.ffn or None, "router_dtype": "fp32",
        "grouped_products": True, "dispatcher": "flex" if spread else "alltoall",
        "dispatcher_backend": "deepep" if spread else None,
    }  # fmt: skip


def model_of(facts: Facts) -> Facts:
    """Return the model's facts, with Megatron-LM's defaults. Raises PlanError if it is not counted."""
    model = _latent(facts)
    if not model.get("vocab") and (rows := _vocabulary(model)):
        model["vocab"] = rows
    if model.get("positions") == "alibi":
        # ALiBi has neither a table of positions nor rotations, which costs what unrotated layers cost.
        model["positions"], model["unrotated"] = "rope", True
    model["tied"], model["mlp"] = not model.get("untied"), "swiglu" if model.get("gated") else "gelu_tanh"
    grouped = model.get("grouped") and not model.get("latent")
    model["kv_heads"] = (model.get("key_heads") or 1) if grouped else model.get("heads")
    model["qkv_bias"] = bool(model.get("only_qkv_bias")) or not model.get("no_bias")
    if model.get("hidden") and not model.get("ffn"):
        wide = 4 * model["hidden"]
        # megatron/training/arguments.py: gated MLPs get two thirds of 4 x hidden, in multiples of 64.
        model["ffn"] = int(wide * 2 / 3 / 64) * 64 if model.get("gated") else wide
    if model.get("rotary_base") and model.get("positions") == "rope":
        model["rope_theta"] = model["rotary_base"]
    pair = str(model.get("window_pair") or "").partition(",")[0].strip()
    # Megatron-LM counts keys before the query, and a window here includes its own.
    model["window"] = int(pair) + 1 if pair.isdecimal() else 0
    width, pattern = model.pop("moe_shared_width", None), model.pop("moe_pattern", None)
    return {**model, **_experts_of(model, width, pattern)} if model.get("moe_experts") else model


def _vocabulary(facts: Facts) -> int | None:
    """Return the vocabulary size by the tokenizer's kind or name, or by a model of that name."""
    kind, name = str(facts.get("tokenizer_kind") or ""), str(facts.get("tokenizer") or "")
    # Byte pairs without a kind are GPT-2's.
    if not kind and facts.get("merges"):
        kind = "GPT2BPETokenizer"
    rows = VOCABULARIES.get(kind) or VOCABULARIES.get(name)
    shape = likely_preset(name) if rows is None and name else None
    return shape.vocab if shape else rows


def _experts_of(facts: Facts, shared_width: int | None, pattern: object) -> Facts:
    width = facts.get("moe_ffn") or facts.get("ffn") or 1
    shared, rest = divmod(shared_width or 0, width)
    if rest:
        raise PlanError(f"moe-shared-expert-intermediate-size {shared_width} is no multiple of an expert's {width}")
    dense = first_dense(pattern, int(facts.get("layers") or 0))
    return {"moe_ffn": width, "moe_shared_experts": shared, "moe_first_dense": dense}


def first_dense(pattern: object, layers: int) -> int:
    """Return the number of dense first layers in --moe-layer-freq. Raises PlanError if dense layers follow experts."""
    if pattern is None or str(pattern) == "1":
        return 0
    match = re.fullmatch(r"(\[0\](?:\*(\d+))?\+)?\[1\](?:\*(\d+))?", str(pattern).strip("()"))
    dense = int(match[2] or 1) if match and match[1] else 0
    if match is None or dense + int(match[3] or 1) != layers:
        raise PlanError(f"moe-layer-freq {pattern} is not counted: take [0]*N+[1]*M, the first layers dense")
    return dense


def _latent(facts: Facts) -> Facts:
    """Return latent attention with its default widths and norms. Other attention has none of these facts."""
    plain = {name: value for name, value in facts.items() if not name.startswith("mla_")}
    if not facts.get("latent"):
        return plain
    usual = {"mla_q_rank": 0, "mla_kv_rank": 32, "mla_nope_dim": 128, "mla_rope_dim": 64, "mla_v_dim": 128}
    return {**usual, **facts, "head_dim": None, "qk_norm": False}


IGNORED = (
    "--lr-*", "--min-lr", "--weight-decay*", "--adam-*", "--clip-grad", "--init-method*", "--log-*", "--save*",
    "--load*",
    "--eval-*", "--split", "--tokenizer-*", "--data-*", "--train-*", "--tensorboard-*", "--wandb-*", "--ckpt-*",
    "--distributed-*", "--num-workers", "--seed", "--merge-file", "--vocab-file", "--mock-data", "--exit-*",
    "--rotary-percent",
    "--node_rank", "--node-rank", "--master_*",
    "--rdzv*",
    "--no-load-*", "--no-save-*", "--decoupled-*", "--manual-gc*", "--empty-unused-memory-level", "--profile*",
    "--no-create-attention-mask-in-dataloader", "--no-mmap-bin-files", "--tiktoken-*", "--apply-layernorm-1p",
    "--use-mcore-models", "--attention-backend", "--deepspeed_config", "--deepspeed-config", "--ds-*",
    "--no-pipeline-parallel", "--deepspeed-activation-checkpointing", "--rampup-batch-size", "--loss-scale*",
    "--embed-layernorm", "--initial-loss-scale", "--hysteresis", "--min-loss-scale", "--loss-on-targets-only",
    "--kill-switch-path", "--codecarbon-dir", "--partition-activations", "--synchronize-each-layer",
    "--contigious-checkpointing", "--pad-vocab-size-to", "--skip-train-*", "--sync-tp-*", "--checkpoint-num-layers",
    "--use-rotary-position-embeddings", "--contiguous-checkpointing", "--memory-centric-*", "--position-embedding-*",
    "--force", "--include", "--hostfile", "--launcher", "--num_gpus", "--num_nodes", "--num-gpus", "--num-nodes",
    "--max_restarts", "--tee", "--log_dir", "--role", "--redirects", "--module",
    "--valid-data", "--finetune", "--moe-shared-expert-overlap", "--no-async-*", "--inference-*",
    "--transformer-impl", "--no-masked-softmax-fusion",
    "--no-position-embedding", "--distributed-backend", "--cross-entropy-fusion-impl",
    "--calculate-per-token-loss", "--moe-router-*", "--moe-aux-*",
    "--moe-permute-fusion", "--moe-enable-deepep", "--overlap-moe-*",
    "--make-vocab-size-divisible-by", "--override-opt_param-scheduler", "--no-gradient-accumulation-fusion",
    "--no-bias-*", "--no-rope-fusion", "--no-check-*", "--timing-*", "--async-*", "--use-dist-ckpt*", "--dist-ckpt*",
    "--pipeline-model-parallel-layout-note", "--gres*", "--ntasks*", "--nodes", "--job-name", "--gpus*", "--cpus*",
    "--no-rope-freq", "--disable-bias-note", "--local-ranks-filter",
    "--fp8-amax-*", "--fp8-margin", "--fp8-interval", "--fp8-recipe", "--fp8-param-gather",
    "--use-checkpoint-opt_param-scheduler", "--te-rng-tracker", "--enable-experimental",
)  # fmt: skip
REFUSED = {
    "--use-megatron-fsdp": "shards with Megatron-FSDP",
    "--use-custom-fsdp": "shards with Megatron-FSDP",
    "--use-torch-fsdp2": "shards with FSDP2",
    "--pipeline-model-parallel-layout": "deals layers to stages by hand",
    "--decoder-first-pipeline-num-layers": "deals layers to stages by hand",
    "--decoder-last-pipeline-num-layers": "deals layers to stages by hand",
    "--account-for-embedding-in-pipeline-split": "counts the embedding as a layer of its stage",
    "--account-for-loss-in-pipeline-split": "counts the loss as a layer of its stage",
    "--mtp-num-layers": "adds layers that predict more tokens",
    "--num-distributed-optimizer-instances": "shares optimizer states in groups of ranks",
    "--spec": "takes the layers from another module",
    "--window-attn-skip-freq": "lets some layers see all before a token",
    "--softmax-type": "adds a trained number to every softmax",
    "--fp4-format": "makes products of 4 bits",
    "--moe-expert-capacity-factor": "drops tokens of full experts",
    "--hybrid-override-pattern": "has layers without attention",
    "--hybrid-attention-ratio": "has layers without attention",
    "--is-hybrid-model": "has layers without attention",
    "--experimental-attention-variant": "has another attention",
    "--attention-output-gate": "has another attention",
    "--linear-attention-type": "has another attention",
    "--heterogeneous-layers-config-path": "has layers that differ",
    "--qk-l2-norm": "has norms without a weight",
    "--squared-relu": "has another activation",
    "--kd-alpha-ce": "learns from a second model",
    "--load-teacher": "learns from a second model",
    "--kd": "learns from a second model",
    "--mos": "learns from a second model",
    "--create-moe-param-group": "spreads experts by DeepSpeed",
    "--ds-sequence-parallel-size": "shares sequences by Ulysses",
    "--lora-rank": "trains adapters",
    **dict.fromkeys(
        (
            "--bert-no-binary-head",
            "--mask-prob",
            "--task",
            "--decoder-seq-length",
            "--encoder-num-layers",
            "--vocab-extra-ids",
            "--retro-workdir",
        ),
        "is of another model than GPT",
    ),
    **dict.fromkeys(
        (
            "--img-h",
            "--language-model-type",
            "--vision-model-type",
            "--freeze-ViT",
            "--freeze-LM",
            "--image-tag-type",
            "--patch-dim",
        ),
        "is of a model of images",
    ),
    **dict.fromkeys(
        (
            "--export-quant-cfg",
            "--export-legacy-megatron",
            "--export-te-mcore-model",
            "--calib-size",
            "--prompts",
            "--num-tokens-to-generate",
            "--model-type",
            "--loader",
            "--saver",
            "--port",
        ),
        "is of a program that trains nothing",
    ),
}
BOUNDED = {
    "--optimizer-cpu-offload": f"keeps optimizer states {ON_HOST}",
    "--cpu-offloading-num-layers": f"keeps activations {ON_HOST}",
    "--use-precision-aware-optimizer": "keeps optimizer states in fewer bits, which needs less memory",
    "--moe-layer-recompute": "makes experts again in the backward pass, which needs less memory and more time",
    "--fine-grained-activation-offloading": f"keeps activations {ON_HOST}",
    "--enable-cuda-graph": "replays launches, which takes less time",
    "--cuda-graph-impl": "replays launches, which takes less time",
}


LAYOUT = (
    Option(key="--tensor-model-parallel-size", fact="tp", default=1, meaning="ranks that share every matrix"),
    Option(key="--sequence-parallel", fact="sp", default=False, meaning="norms share the sequence among them"),
    Option(key="--tp-comm-overlap", fact="tp_overlap", default=False,
           meaning="exchanges overlap with products, as counted"),
    Option(key="--pipeline-model-parallel-size", fact="pp", default=1, meaning="ranks that share the layers"),
    Option(key="--num-virtual-stages-per-pipeline-rank", fact="stages_of_rank",
           meaning="interleaved schedule: stages of a rank"),
    Option(key="--num-layers-per-virtual-pipeline-stage", fact="stage_depth", meaning="the same, by the layers of one"),
    Option(key="--microbatch-group-size-per-virtual-pipeline-stage", fact="round",
           meaning="micro-batches that a stage takes in a row"),
    Option(key="--context-parallel-size", fact="cp", default=1, meaning="ranks that share every sequence"),
    Option(key="--expert-model-parallel-size", fact="ep", default=1, quiet=True,
           meaning="ranks that share the experts"),
    Option(key="--expert-tensor-parallel-size", fact="expert_tp", meaning="an expert is whole on its rank"),
    Option(key="--moe-token-dispatcher-type", fact="dispatcher", meaning="how tokens travel to experts"),
    Option(key="--moe-flex-dispatcher-backend", fact="dispatcher_backend", meaning="DeepEP, as counted: a package"),
    Option(key="--use-distributed-optimizer", fact="sharded", default=False,
           meaning="ZeRO-1: optimizer states shared out"),
    Option(key="--overlap-grad-reduce", fact="overlap_reduce", default=False,
           meaning="gradients are summed during the backward pass"),
    Option(key="--grad-reduce-in-bf16", fact="narrow_sums", default=False, meaning="gradients travel in 16 bits"),
    Option(key="--overlap-param-gather", fact="overlap_gather", default=False,
           meaning="parameters are gathered during the forward pass"),
    Option(key="--micro-batch-size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
    Option(key="--global-batch-size", fact="global_batch", meaning="sequences of a step, over all ranks"),
    Option(key="--seq-length", fact="sequence", meaning="tokens of a sequence"),
    Option(key="--recompute-granularity", fact="granularity", meaning="what the backward pass makes again"),
    Option(key="--checkpoint-activations", fact="checkpoints", default=False, quiet=True,
           meaning="every layer, in Megatron-DeepSpeed"),
    Option(key="--deepspeed", fact="deepspeed", default=False, quiet=True, meaning="engine of Megatron-DeepSpeed"),
    Option(key="--nnodes", fact="node_word", meaning="nodes of torchrun", also=("--num_nodes", "--num-nodes")),
    Option(key="--nproc_per_node", fact="node_devices", meaning="GPUs of a node",
           also=("--nproc-per-node", "--num_gpus", "--num-gpus")),
    Option(key="--zero-stage", fact="zero_stage", meaning="of its ZeRO"),
    Option(key="--use-flash-attn", fact="flash", default=False, quiet=True, meaning="kernel of its attention",
           also=("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton", "--use-flash-attn-builder")),
    Option(key="--recompute-activations", fact="selective", default=False, meaning="the same as selective"),
    Option(key="--recompute-modules", fact="recompute_modules", meaning="of a layer: the attention core"),
    Option(key="--recompute-method", fact="recompute_method", meaning="whole layers, the first of each stage"),
    Option(key="--recompute-num-layers", fact="recompute_number", meaning="how many of them, or layers of a unit"),
    Option(key="--bf16", fact="bf16", default=False, meaning="parameters and activations in bfloat16"),
    Option(key="--fp16", fact="fp16", default=False, meaning="in float16, with loss scaling"),
    Option(key="--fp8-format", fact="narrow", meaning="products of layers in 8 bits",
           words={"e4m3": "e4m3", "hybrid": "hybrid"}),
    Option(key="--hidden-dropout", fact="hidden_dropout", default=0.1, meaning="no masks are drawn and kept"),
    Option(key="--optimizer", fact="optimizer", words={"adam": "adam"}, default="adam",
           meaning="AdamW with two fp32 states"),
    Option(key="--train-iters", fact="steps", meaning="optimizer steps: yours to choose"),
    Option(key="--lr", fact="learning_rate", meaning="learning rate: yours to choose"),
)  # fmt: skip
FIXED = {
    "--cross-entropy-loss-fusion": (True, "softmax and loss in one kernel"),
    "--attention-dropout": (0.0, "no masks are drawn"),
    "--tokenizer-type": ("HuggingFaceTokenizer", "yours to choose"),
    "--tokenizer-model": ("TOKENIZER", "yours: a hub name or a folder"),
    "--data-path": ("DATA", "yours: preprocessed text"),
}
UNREAD = (
    UncountedOption(key="--cross-entropy-loss-fusion", counted=True, absent=False,
                    effect="takes softmax and loss apart, with copies of the logits in fp32"),
    UncountedOption(key="--attention-dropout", counted=0.0, absent=0.1,
                    effect="draws masks inside the attention kernel"),
)  # fmt: skip
"""Defaults of megatron/training/arguments.py and of TransformerConfig."""
MODULES = "core_attn"


def stack_of(facts: Facts) -> Stack:
    """Return Megatron-Core's memory and time, with the overlaps that the options select."""
    if facts.get("deepspeed"):
        return replace(MEGATRON_DEEPSPEED, attention="flash" if facts.get("flash") else "fused-softmax")
    overlapped = facts.get("tp_overlap", True) or (facts.get("tp") or 1) == 1
    stack = replace(MEGATRON_CORE, product_bytes=1.0) if facts.get("narrow") else MEGATRON_CORE
    # In bf16 Megatron-LM sums and exchanges gradients in fp32, unless an option says otherwise.
    narrow = facts.get("narrow_sums") or facts.get("precision") == "fp16"
    stack = replace(stack, gradient_exchange_bytes=2.0 if narrow else 4.0)
    stack = stack if overlapped else replace(stack, hides_tensor=0.0)
    stack = replace(stack, dropout=float(facts.get("hidden_dropout") or 0.0) > 0)
    # This dispatcher sends the counts of tokens to the host, which waits for them in each layer.
    if facts.get("dispatcher") == "alltoall" and (facts.get("ep") or 1) > 1:
        stack = replace(stack, counts_s=COUNTS_S, routes_once=False)
    return stack if facts.get("overlap_reduce", True) else replace(stack, hides_gradients=0.0)


def split_refusal(shape: ModelShape, layout: Layout) -> str:
    """Return why Megatron-Core's distributed optimizer or expert parallelism cannot split so."""
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
    """Return why stages of equal layers are impossible."""
    if layout.pp > 1 and shape.layers % (layout.pp * layout.vp):
        return f"pp={layout.pp} x vp={layout.vp} stages do not divide the {shape.layers} layers"
    if layout.vp > 1 and layout.schedule != "interleaved":
        return "several stages of a rank are interleaved: take layout.schedule=interleaved"
    return ""


def _facts(plan: Plan) -> Facts:
    layout = plan.layout
    return {
        **model_facts(plan.model, layout), **layout_facts(plan),
        "granularity": None if layout.recompute == "none" else layout.recompute,
        "recompute_modules": MODULES if layout.recompute == "selective" else None,
        "recompute_method": None if layout.recompute != "full" else "block" if layout.recompute_layers else "uniform",
        "recompute_number": None if layout.recompute != "full" else layout.recompute_layers or 1,
        "bf16": plan.recipe.precision == "bf16", "fp16": plan.recipe.precision == "fp16", "hidden_dropout": 0.0,
    }  # fmt: skip


def layout_facts(plan: Plan) -> Facts:
    """Return what Megatron-Core's options state of a layout, whichever program sets them."""
    layout = plan.layout
    times = layout.micro_batches(plan.recipe.global_batch)
    return {
        "round": _group_size(times, layout.pp) if layout.vp > 1 and times % layout.pp else None,
        "stages_of_rank": layout.vp if layout.vp > 1 else None, "expert_tp": 1 if layout.ep > 1 else None,
        "sharded": layout.zero == 1, "overlap_reduce": layout.dp * layout.cp > 1, "overlap_gather": layout.zero == 1,
        "tp_overlap": layout.sp,
    }  # fmt: skip


def _group_size(times: int, ranks: int) -> int:
    """Return the number of micro-batches that a stage takes in a row."""
    # Megatron-Core refuses groups smaller than the ranks, the last one too:
    # megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    return next((size for size in range(ranks, times) if not 0 < times % size < ranks), times)


def resolve(facts: Facts) -> Facts:
    """Return common facts from Megatron-Core's own."""
    resolved = dict(facts)
    if isinstance(nodes := resolved.get("node_word"), int):
        resolved["nodes"] = nodes
    if isinstance(resolved.get("node_devices"), int) and isinstance(nodes := resolved.get("nodes") or 1, int):
        resolved["devices"] = resolved["node_devices"] * nodes
    resolved["zero"] = 1 if resolved.get("sharded") else 0
    if resolved.get("deepspeed"):
        resolved["zero"] = resolved.get("zero_stage") or 0
        if resolved["zero"] not in (0, 1):
            raise PlanError(
                f"zero-stage {resolved['zero']} of DeepSpeed is not counted together with Megatron's: take 0 or 1"
            )
    resolved["granularity"] = "full" if resolved.get("checkpoints") else resolved.get("granularity")
    resolved["vp"] = resolved.get("stages_of_rank") or _stages(resolved)
    resolved["schedule"] = "interleaved" if resolved["vp"] > 1 else "1f1b"
    if (resolved.get("ep") or 1) > 1 and (resolved.get("tp") or 1) > 1 and resolved.get("expert_tp") != 1:
        raise PlanError("experts that tensor parallelism cuts are not counted: take expert-tensor-parallel-size 1")
    kind, method, number = (resolved.get(name) for name in ("granularity", "recompute_method", "recompute_number"))
    kind = "selective" if resolved.get("selective") else kind
    resolved["recompute"] = kind or "none"
    if resolved["recompute"] not in ("none", "selective", "full"):
        raise PlanError(f"recompute-granularity {kind} is not understood: take selective or full")
    resolved["recompute_layers"] = (number or 0) if kind == "full" and method == "block" else 0
    modules = str(resolved.get("recompute_modules") or MODULES)
    if resolved["recompute"] == "selective" and modules != MODULES:
        raise PlanError(f"recompute-modules {modules} is not counted: take {MODULES}")
    return resolved


def _stages(facts: Facts) -> int:
    """Return the stages per rank, from the layers of each."""
    depth = facts.get("stage_depth")
    if not depth:
        return 1
    stages, rest = divmod(int(facts.get("layers") or 0), int(facts.get("pp") or 1) * int(depth))
    if rest or not stages:
        raise PlanError(f"num-layers-per-virtual-pipeline-stage {depth} does not divide the layers of a pipeline rank")
    return stages


def _resolve(facts: Facts) -> Facts:
    resolved = model_of(resolve(facts))
    spread = resolved.get("moe_experts") and (resolved.get("ep") or 1) > 1
    if spread and resolved.get("dispatcher") not in ("alltoall", "flex"):
        raise PlanError("moe-token-dispatcher-type allgather, the default, is not counted: take alltoall or flex")
    return {**resolved, "precision": "bf16" if resolved.get("bf16") else "fp16" if resolved.get("fp16") else "fp32"}


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        # A single launch queue keeps exchanges ahead of the products that they overlap with; Megatron-LM demands it.
        before=("export CUDA_DEVICE_MAX_CONNECTIONS=1", 'source "$HERE/arguments.sh"'),
        command='torchrun $TORCHRUN "${MEGATRON:?folder of pretrain_gpt.py}/pretrain_gpt.py" "${ARGUMENTS[@]}"',
        yours=("MEGATRON (its folder, exported)", "TOKENIZER", "DATA", "learning rate and its schedule"),
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
        "cuda_graphs": ("auto", "off"),
    },
    reasons={"zero": "the distributed optimizer is ZeRO-1", "schedule": "megatron/core/pipeline_parallel/schedules.py"},
    split_refusal=split_refusal,
    pipeline_refusal=pipeline_refusal,
    full_rounds=True,
    files=(
        ConfigFile(
            name="arguments.sh",
            form="shell",
            options=(*MODEL, *LAYOUT),
            fixed=FIXED,
            ignored=IGNORED,
            refused=REFUSED,
            bounded=BOUNDED,
            unread=UNREAD,
            marks=("--num-layers", "--hidden-size", "--tensor-model-parallel-size", "--seq-length"),
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
