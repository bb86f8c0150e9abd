"""Megatron-LM's arguments of a model, in both directions: from a shape, and to one."""

import re

from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.stacks.declaration.hub_models import likely_preset
from meshwright.stacks.declaration.option import Facts, Option

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
    """Return the facts of experts beside their sizes."""
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
        model["positions"], model["unrotated"] = "rope", True
    model["tied"], model["mlp"] = not model.get("untied"), "swiglu" if model.get("gated") else "gelu_tanh"
    grouped = model.get("grouped") and not model.get("latent")
    model["kv_heads"] = (model.get("key_heads") or 1) if grouped else model.get("heads")
    model["qkv_bias"] = bool(model.get("only_qkv_bias")) or not model.get("no_bias")
    if model.get("hidden") and not model.get("ffn"):
        wide = 4 * model["hidden"]
        model["ffn"] = int(wide * 2 / 3 / 64) * 64 if model.get("gated") else wide
    if model.get("rotary_base") and model.get("positions") == "rope":
        model["rope_theta"] = model["rotary_base"]
    pair = str(model.get("window_pair") or "").partition(",")[0].strip()
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
