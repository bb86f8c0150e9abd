"""Families that are planned but not trained: how their config.json becomes a shape with unbuilt parts.

Each reads the keys that it understands; planned_config judges the others. Defaults are those of the family's class in
transformers, since published configs omit keys at their defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.formats.hub.entries import Entries
from meshwright.spec.model.shape import MoEShape
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFamily:
    """Reader of one model_type."""

    parts: Callable[[Entries], Fields]
    """Fields of the shape beyond the usual sizes, including `unbuilt`."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of absent keys."""
    eps_key: str = "rms_norm_eps"
    activations: tuple[str, ...] = ("silu",)
    """Supported values of hidden_act or hidden_activation."""
    read: tuple[str, ...] = ()
    """Understood keys that change no count: scales, caps and thresholds."""


def _full_every(entries: Entries, key: str, absent: int, other: str = "sliding_attention", kinds: object = None) -> int:
    """Return n: every n-th layer has full attention, by layer_types (or `kinds`) or the length of a pattern."""
    types = kinds or entries.raw("layer_types", None)
    layers, known = entries.integer("num_hidden_layers"), {"full_attention", other}
    interval = entries.maybe_integer(key, absent) or absent
    if types is None:
        return interval
    if not isinstance(types, list) or len(types) != layers or {*types} - known:
        unknown = sorted({*map(str, types)} - known) if isinstance(types, list) else []
        raise entries.fail(
            f"layer_types holds {', '.join(unknown) or 'another number of layers'}, which is not known here"
        )
    every = types.index("full_attention") + 1 if "full_attention" in types else layers + 1
    for layer, kind in enumerate(types):
        if (kind == "full_attention") != ((layer + 1) % every == 0):
            raise entries.fail(
                f"layer_types: layer {layer} is {kind}, but every {every}th layer must be full_attention"
            )
    return every


def _gemma(entries: Entries, every: int, **parts: Any) -> Fields:
    unbuilt = UnbuiltParts(
        norms="both", full_every=_full_every(entries, "sliding_window_pattern", every), activation="gelu",
        scaled_embedding=True, centred_norm=True, **parts,
    )  # fmt: skip
    return {"unbuilt": unbuilt, "window": entries.maybe_integer("sliding_window", 4096) or 0, **_bias(entries)}


def _bias(entries: Entries) -> Fields:
    bias = entries.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def _gemma1(entries: Entries) -> Fields:
    unbuilt = UnbuiltParts(activation="gelu", scaled_embedding=True, centred_norm=True)
    return {"unbuilt": unbuilt, **_bias(entries)}


def _olmo3(entries: Entries) -> Fields:
    unbuilt = replace(_OLMO, full_every=_full_every(entries, "sliding_window_pattern", 4))
    return {"unbuilt": unbuilt, "window": entries.maybe_integer("sliding_window", 4096) or 0, **_bias(entries)}


def _smollm3(entries: Entries) -> Fields:
    entries.allow("layer_types", (["full_attention"] * entries.integer("num_hidden_layers"), None))
    unbuilt = UnbuiltParts(unrotated_every=_unrotated_every(entries))
    return {"unbuilt": unbuilt, "mlp_bias": entries.flag("mlp_bias", False), **_bias(entries)}


def _unrotated_every(entries: Entries) -> int:
    layers, every = entries.integer("num_hidden_layers"), entries.integer("no_rope_layer_interval", 4)
    rotated = entries.raw("no_rope_layers", None)
    if rotated and rotated != [int((layer + 1) % every != 0) for layer in range(layers)]:
        raise entries.fail(f"no_rope_layers={rotated!r}: only every {every}th layer without positions")
    return every


def _granite(entries: Entries) -> Fields:
    unbuilt = UnbuiltParts(scaled_embedding=True)
    return {"unbuilt": unbuilt, "mlp_bias": entries.flag("mlp_bias", False), **_bias(entries)}


def _qwen2_moe(entries: Entries) -> Fields:
    entries.allow("use_sliding_window", (False, None))
    moe = _experts_beside_a_gate(entries, 60, 4, ffn=1408, shared=5632, normalize=False)
    return {"moe": moe, "unbuilt": UnbuiltParts(shared_gate=True), "qkv_bias": entries.flag("qkv_bias", True)}


def _phi3(entries: Entries) -> Fields:
    """Read Phi-3 with LongRoPE or Phi-4-mini with partly rotary heads. The engine supports all others."""
    rope = entries.inner("rope_scaling") or entries.inner("rope_parameters")
    inner = rope.values if rope else {}
    share = entries.number("partial_rotary_factor", inner.get("partial_rotary_factor") or 1.0)
    unbuilt = UnbuiltParts(
        rotary_share=share, long_rope=inner.get("rope_type", inner.get("type")) in ("longrope", "su")
    )
    plain = unbuilt == UnbuiltParts()
    return {
        "family": "phi3", "unbuilt": None if plain else unbuilt,
        "window": entries.maybe_integer("sliding_window", None) or 0,
    }  # fmt: skip


def _gpt_oss(entries: Entries) -> Fields:
    moe = MoEShape(
        experts=entries.integer("num_local_experts"), top_k=entries.integer("num_experts_per_tok"),
        ffn=entries.integer("intermediate_size"),
    )  # fmt: skip
    unbuilt = UnbuiltParts(
        full_every=_full_every(entries, "sliding_window_pattern", 2), activation="clamped", sinks=True,
        router_bias=True, expert_bias=True,
    )  # fmt: skip
    bias = entries.flag("attention_bias", True)
    window = entries.maybe_integer("sliding_window", 128) or 0
    return {"moe": moe, "unbuilt": unbuilt, "window": window, "qkv_bias": bias, "out_bias": bias}


def _llama4(entries: Entries) -> Fields:
    layers, step = entries.integer("num_hidden_layers"), entries.integer("interleave_moe_layer_step", 1)
    routed = entries.raw("moe_layers", None)
    if routed is not None and routed != list(range(step - 1, layers, step)):
        raise entries.fail(f"moe_layers={routed!r}: only every {step}th layer, as interleave_moe_layer_step says")
    every = _unrotated_every(entries)
    kinds = ["chunked_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if entries.raw("layer_types", None) not in (None, kinds):
        raise entries.fail(f"layer_types: only every {every}th layer full_attention, the others chunked_attention")
    moe = MoEShape(
        experts=entries.integer("num_local_experts"), top_k=entries.integer("num_experts_per_tok"),
        ffn=entries.integer("intermediate_size"), shared_experts=1, scoring="sigmoid", normalize_top_k=False,
    )  # fmt: skip
    unbuilt = UnbuiltParts(
        routed_every=step, unrotated_every=every, chunk=entries.maybe_integer("attention_chunk_size", 8192) or 0,
        qk_norm="heads" if entries.flag("use_qk_norm", True) else "", other_router=True,
    )  # fmt: skip
    return {"moe": moe, "unbuilt": unbuilt, "ffn": entries.integer("intermediate_size_mlp"), **_bias(entries)}


def _nemotron(entries: Entries) -> Fields:
    share = entries.number("partial_rotary_factor", 0.5)
    unbuilt = UnbuiltParts(activation="relu2", centred_norm=True, rotary_share=share)
    shape = {"norm": "layernorm", "mlp": "gelu", "mlp_bias": entries.flag("mlp_bias", False)}
    return {"unbuilt": unbuilt, **shape, **_bias(entries)}


def _glm4_moe(entries: Entries) -> Fields:
    moe = MoEShape(
        experts=entries.integer("n_routed_experts"), top_k=entries.integer("num_experts_per_tok"),
        ffn=entries.integer("moe_intermediate_size"), shared_experts=entries.integer("n_shared_experts", 1),
        first_dense=entries.integer("first_k_dense_replace", 1), scoring="sigmoid",
        normalize_top_k=entries.flag("norm_topk_prob", True), groups=entries.integer("n_group", 1),
        top_groups=entries.integer("topk_group", 1), routed_scale=entries.number("routed_scaling_factor", 1.0),
        correction_bias=True,
    )  # fmt: skip
    unbuilt = UnbuiltParts(rotary_share=entries.number("partial_rotary_factor", 0.5))
    bias, norm = entries.flag("attention_bias", False), entries.flag("use_qk_norm", False)
    return {"moe": moe, "unbuilt": unbuilt, "qkv_bias": bias, "qk_norm": norm}


def _minimax_m2(entries: Entries) -> Fields:
    entries.allow("use_qk_norm", (True,))
    entries.allow("qk_norm_type", ("per_layer",))
    entries.allow("scoring_func", ("sigmoid",))
    types = entries.raw("attn_type_list", None)
    if isinstance(types, list) and 0 in types:
        raise entries.fail(f"attn_type_list={types!r}: MiniMax-M2 has no layers of lightning attention (0)")
    moe = MoEShape(
        experts=entries.integer("num_local_experts"), top_k=entries.integer("num_experts_per_tok"),
        ffn=entries.integer("intermediate_size"), scoring="sigmoid",
        correction_bias=entries.flag("use_routing_bias", True),
        shared_experts=1 if entries.maybe_integer("shared_intermediate_size", 0) else 0,
    )  # fmt: skip
    width, dims = entries.integer("head_dim", 128), entries.maybe_integer("rotary_dim", None)
    share = dims / width if dims else entries.number("partial_rotary_factor", 0.5)
    return {"moe": moe, "unbuilt": UnbuiltParts(qk_norm="width", rotary_share=share)}


def _rotary_share(entries: Entries, absent: float) -> float:
    rope = entries.inner("rope_parameters") or entries.inner("rope_scaling")
    inner = rope.values.get("partial_rotary_factor") if rope else None
    return entries.number("partial_rotary_factor", inner or absent)


def _gated_delta(entries: Entries) -> Fields:
    """Read Qwen3-Next and Qwen3.5: gated DeltaNet in all but every n-th layer, gated attention in the others."""
    entries.allow("attn_output_gate", (True,))
    linear = LinearAttention(
        full_every=_full_every(entries, "full_attention_interval", 4, "linear_attention"),
        key_heads=entries.integer("linear_num_key_heads", 16),
        value_heads=entries.integer("linear_num_value_heads", 32),
        key_dim=entries.integer("linear_key_head_dim", 128), value_dim=entries.integer("linear_value_head_dim", 128),
        taps=entries.integer("linear_conv_kernel_dim", 4),
    )  # fmt: skip
    parts = UnbuiltParts(
        linear=linear, gated_attention=True, centred_norm=True, rotary_share=_rotary_share(entries, 0.25)
    )
    return {"unbuilt": parts, "qk_norm": True, **_bias(entries)}


def _gated_delta_moe(entries: Entries) -> Fields:
    """Read the same families with experts."""
    dense = _gated_delta(entries)
    moe = _experts_beside_a_gate(entries, 512, 10, ffn=512, shared=512, normalize=True)
    parts = replace(dense["unbuilt"], shared_gate=bool(moe.shared_experts))
    return {**dense, "moe": moe, "ffn": entries.integer("intermediate_size", moe.ffn), "unbuilt": parts}


def _experts_beside_a_gate(
    entries: Entries, experts: int, top_k: int, *, ffn: int, shared: int, normalize: bool
) -> MoEShape:
    """Read routed experts and one gated shared expert in every layer. Arguments are defaults of absent keys."""
    entries.allow("decoder_sparse_step", (1,))
    entries.allow("mlp_only_layers", ([], None))
    ffn, shared = (
        entries.integer("moe_intermediate_size", ffn),
        entries.integer("shared_expert_intermediate_size", shared),
    )
    if shared % ffn:
        raise entries.fail(f"shared_expert_intermediate_size={shared} is not a multiple of moe_intermediate_size={ffn}")
    return MoEShape(
        experts=entries.integer("num_experts", experts), top_k=entries.integer("num_experts_per_tok", top_k), ffn=ffn,
        shared_experts=shared // ffn, normalize_top_k=entries.flag("norm_topk_prob", normalize),
    )  # fmt: skip


def _minimax_01(entries: Entries) -> Fields:
    """Read lightning attention in all but every n-th layer. The first release lists kinds as 0 and 1."""
    entries.allow("postnorm", (True,))
    entries.allow("shared_intermediate_size", (0, None))
    types = entries.raw("attn_type_list", None) or ()
    kinds = (
        ["full_attention" if has_softmax else "linear_attention" for has_softmax in types]
        if isinstance(types, list)
        else None
    )
    heads = entries.integer("num_attention_heads")
    width = entries.maybe_integer("head_dim") or entries.integer("hidden_size") // heads
    dims = entries.maybe_integer("rotary_dim", None)
    linear = LinearAttention(
        full_every=_full_every(entries, "full_attention_interval", 8, "linear_attention", kinds), rule="decay",
        key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, chunk=entries.integer("block_size", 256),
    )  # fmt: skip
    moe = MoEShape(
        experts=entries.integer("num_local_experts", 8), top_k=entries.integer("num_experts_per_tok", 2),
        ffn=entries.integer("intermediate_size"),
    )  # fmt: skip
    share = dims / width if dims else _rotary_share(entries, 1.0)
    return {"moe": moe, "unbuilt": UnbuiltParts(norms="stream", linear=linear, rotary_share=share)}


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_GELU = ("gelu_pytorch_tanh",)
_UNUSED = ("sliding_window", "max_window_layers")
_OLMO = UnbuiltParts(norms="after", qk_norm="width")
_QWEN_NEXT = {"rms_norm_eps": 1e-6, "head_dim": 256, "max_position_embeddings": 32768}
_QWEN_35 = ("mamba_ssm_dtype",)
_FACTORS = (
    "full_attn", "linear_attn", "mlp", "layernorm_full_attention", "layernorm_linear_attention", "layernorm_mlp",
)  # fmt: skip
_MINIMAX_01 = PlannedFamily(
    parts=_minimax_01, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    read=("attn_type_list", "rotary_dim", "partial_rotary_factor", "shared_moe_mode", "layer_types",
          *(f"{factor}_{end}" for factor in _FACTORS for end in ("alpha_factor", "beta_factor", "alpha", "beta"))),
)  # fmt: skip
PLANNED: Mapping[str, PlannedFamily] = {
    "gemma2": PlannedFamily(
        parts=lambda entries: _gemma(entries, 2, soft_caps=True), activations=_GELU,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256},
        read=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": PlannedFamily(
        parts=lambda entries: {**_gemma(entries, 6), "qk_norm": True}, activations=_GELU,
        defaults={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256, "vocab_size": 262208,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        },
        read=("query_pre_attn_scalar", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma": PlannedFamily(
        parts=_gemma1, activations=(*_GELU, "gelu"),  # its class computes the tanh form for both
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256},
    ),
    "smollm3": PlannedFamily(
        parts=_smollm3, defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, read=_UNUSED
    ),
    "granite": PlannedFamily(
        parts=_granite, defaults={"rms_norm_eps": 1e-6},
        read=("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    ),
    "qwen2_moe": PlannedFamily(parts=_qwen2_moe, defaults={"rms_norm_eps": 1e-6}, read=(*_UNUSED, "layer_types")),
    "olmo3": PlannedFamily(parts=_olmo3, defaults={"rms_norm_eps": 1e-5}),
    "olmo2": PlannedFamily(parts=lambda entries: {"unbuilt": _OLMO, **_bias(entries)}, defaults={"rms_norm_eps": 1e-5}),
    "phi3": PlannedFamily(
        parts=_phi3, defaults={"rms_norm_eps": 1e-5},
        read=("original_max_position_embeddings", "full_attn_mod", "interpolate_factor")
    ),
    "gpt_oss": PlannedFamily(
        parts=_gpt_oss, defaults={"rms_norm_eps": 1e-5, "head_dim": 64, "max_position_embeddings": 131072},
        read=("swiglu_limit", "swiglu_alpha", "experts_per_token"),
    ),
    "llama4_text": PlannedFamily(
        parts=_llama4, defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
        read=("attn_scale", "floor_scale", "attn_temperature_tuning"),
    ),
    "nemotron": PlannedFamily(
        parts=_nemotron, eps_key="norm_eps", activations=("relu2",), defaults={"norm_eps": 1e-5},
    ),
    "glm4_moe": PlannedFamily(parts=_glm4_moe, defaults={"rms_norm_eps": 1e-5, "head_dim": 128}),
    "qwen3_next": PlannedFamily(parts=_gated_delta_moe, defaults=_QWEN_NEXT),
    "qwen3_5_text": PlannedFamily(parts=_gated_delta, defaults=_QWEN_NEXT, read=_QWEN_35),
    "qwen3_5_moe_text": PlannedFamily(
        parts=_gated_delta_moe, read=_QWEN_35,
        defaults={**_QWEN_NEXT, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},
    ),
    "minimax": _MINIMAX_01,
    "minimax_text_01": _MINIMAX_01,
    "minimax_m1": _MINIMAX_01,
    "minimax_m2": PlannedFamily(
        parts=_minimax_m2, defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
        read=("rotary_dim", "partial_rotary_factor", "shared_intermediate_size", "qk_norm_type", "attn_type_list"),
    ),
}  # fmt: skip
WRAPPERS = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Models of text and images. Their language model, in text_config, is planned."""
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Names under which another family's layout is published."""
READ = (*_ROPE, "text_config", "vision_config")
