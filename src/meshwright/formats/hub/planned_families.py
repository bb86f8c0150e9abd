"""Strict reader of a config.json for planning, also of families that the engine does not train.

A key that no reader understands, and that is not listed as harmless, is refused: it could change the sizes. Families
that are not trained become shapes with unbuilt parts. Defaults are those of the family's class in transformers, since
published configs omit keys at their defaults.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.formats.hub.config import CODED, shape_from_config, written_keys
from meshwright.formats.hub.families import FAMILIES, Entries
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.shape import MOST_LAYERS, ModelShape, MoEShape
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
    layers, kinds_here = entries.integer("num_hidden_layers"), {"full_attention", other}
    interval = entries.maybe_integer(key, absent) or absent
    if types is None:
        return interval
    if not isinstance(types, list) or len(types) != layers or {*types} - kinds_here:
        unknown = sorted({*map(str, types)} - kinds_here) if isinstance(types, list) else []
        raise entries.fail(
            f"layer_types holds {', '.join(unknown) or 'another number of layers'}, which is not known here"
        )
    # Without any full layer the interval lies past the last one.
    interval_of_full = types.index("full_attention") + 1 if "full_attention" in types else layers + 1
    for layer, kind in enumerate(types):
        if (kind == "full_attention") != ((layer + 1) % interval_of_full == 0):
            raise entries.fail(
                f"layer_types: layer {layer} is {kind}, but every {interval_of_full}th layer must be full_attention"
            )
    return interval_of_full


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
    # A shared expert is counted in units of the routed ones.
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
        # Its class computes the tanh form for both.
        parts=_gemma1, activations=(*_GELU, "gelu"),
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


SIZES = {
    "vocab": "vocab_size", "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
OPTIONAL = ("kv_heads", "head_dim")
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "names and versions": (
        "architectures", "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype", "name_or_path",
        "unsloth_fixed", "unsloth_version", "model_name", "tokenizer_class", "bos_token", "eos_token",
        "is_llama_config", "transformers.js_config", "license", "language", "output_past",
    ),
    "where and how a program runs it": (
        "use_cache", "cache_implementation", "tie_word_embeddings", "attn_implementation", "gradient_checkpointing",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "pretraining_tp",
        "chunk_size_feed_forward", "for_llm_compressor", "use_return_dict", "ep_size", "torchscript", "use_flash_attn",
        "hybrid_cache", "quantization_config", "compression_config", "dual_chunk_attention_config",
    ),
    "first weights and training": (
        "initializer_range", "initializer_factor", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
        "router_jitter_noise", "router_z_loss_coef", "initial_context_length", "mtp_loss_weight", "attention_dropout",
        "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "embedding_dropout",
        "residual_dropout", "mlp_dropout", "neftune_noise_alpha",
    ),
    "a length of text that the family's class reads under max_position_embeddings": (
        "max_sequence_length", "model_max_length", "seq_length",
    ),
    "layers that predict further tokens, which are added to the model": (
        "num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
    "what answers look like": (
        "task_specific_params", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "prefix",
        "max_length", "min_length", "temperature", "top_p", "top_k", "typical_p", "do_sample", "num_beams",
        "num_beam_groups", "diversity_penalty", "repetition_penalty", "length_penalty", "encoder_no_repeat_ngram_size",
        "no_repeat_ngram_size", "num_return_sequences", "early_stopping", "remove_invalid_values", "bad_words_ids",
        "begin_suppress_tokens", "suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id",
    ),
    "a head that is no part of a language model": (
        "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "classifier_dropout",
    ),
}  # fmt: skip
"""Keys that change neither the sizes of a model nor the arithmetic of its blocks: reason -> keys."""
HARMLESS_PATTERN = re.compile(r"_.*|.*_token_id|.*_token_ids|.*_token_index")
"""Private keys, and the ids of marks."""
_HARMLESS_KEYS = frozenset(key for keys in HARMLESS.values() for key in keys)


class _TrackedConfig(dict[str, object]):
    """Config that records which of its keys were read."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value like dict.get, and record the key."""
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


def is_planned(config: Mapping[str, object]) -> bool:
    """Return True if a config is of a family that can be planned but not trained. Some of phi3 are."""
    model_type = _model_type(config)
    return model_type in WRAPPERS or (
        model_type in PLANNED and (model_type not in FAMILIES or bool(planned_shape(config).plan_only))
    )


def planned_shape(config: Mapping[str, object]) -> ModelShape:
    """Return the shape of a config, with parts that the engine lacks (`ModelShape.plan_only` names them).

    Raises HubError for an unknown family, for an unknown key that could change the shape, and wherever
    shape_from_config does.
    """
    model_type = _model_type(config)
    if model_type in WRAPPERS:
        return planned_shape(_text_config(config, WRAPPERS[model_type]))
    if model_type in ALIASES:
        config = {
            **config,
            "model_type": ALIASES[model_type],
            "architectures": [FAMILIES[ALIASES[model_type]].architecture],
        }
    if model_type not in FAMILIES and model_type not in PLANNED and model_type not in ALIASES:
        known = ", ".join((*FAMILIES, *(name for name in PLANNED if name not in FAMILIES), *WRAPPERS, *ALIASES))
        raise HubError(f"config.json: model_type={model_type!r} is not known to the planner (known: {known})")
    tracked = _TrackedConfig(config)
    family = PLANNED.get(str(model_type))
    shape = _read_shape(tracked, family) if family else None
    if shape is None or not shape.plan_only:
        shape = shape_from_config(tracked)
        # Keys that shape_from_config skips for this shape, such as window lengths without windows.
        tracked.keys_read |= written_keys(shape)
    unknown = _unknown_keys(config, {*tracked.keys_read, *READ, *(family.read if family else ())})
    for key, setting in unknown.items():
        raise HubError(
            f"config.json: {key}={repr(setting)[:60]} is not known and could change the shape: remove the key "
            "if it does not"
        )
    return shape


def _unknown_keys(config: Mapping[str, object], understood: Iterable[str]) -> dict[str, object]:
    """Return entries that no reader handles and that are not harmless, except null, false and empty ones."""
    handled = _HARMLESS_KEYS | set(understood)
    return {
        key: value
        for key, value in config.items()
        if key not in handled and not HARMLESS_PATTERN.fullmatch(key) and value not in (None, False, [], {}, "")
    }


def _model_type(config: Mapping[str, object]) -> object:
    model_type = config.get("model_type")
    return model_type.removeprefix(CODED) if isinstance(model_type, str) else model_type


def _text_config(config: Mapping[str, object], model_type: str) -> dict[str, object]:
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise HubError(f"config.json: text_config={inner!r} must be an object: the language model is described there")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**outer, **inner, "model_type": model_type}


def _read_shape(read: _TrackedConfig, family: PlannedFamily) -> ModelShape:
    entries = Entries(_ConfigWithDefaults(read, family.defaults))
    for key in ("hidden_act", "hidden_activation"):
        entries.allow(key, (*family.activations, None))
    sizes: dict[str, Any] = {}
    for name, key in SIZES.items():
        sizes[name] = (entries.maybe_integer(key) or 0) if name in OPTIONAL else entries.integer(key)
    if sizes["layers"] > MOST_LAYERS:
        raise entries.fail(f"num_hidden_layers={sizes['layers']} must be at most {MOST_LAYERS}")
    sizes["norm_eps"] = entries.number(family.eps_key)
    sizes["tied"] = entries.flag("tie_word_embeddings", False)
    sizes["rope_theta"] = _rope_theta(entries)
    try:
        return ModelShape(name=str(read.get("model_type")), **{**sizes, **family.parts(entries)})
    except PlanError as error:
        raise error if isinstance(error, HubError) else entries.fail(str(error)) from error


class _ConfigWithDefaults(_TrackedConfig):
    """Config with defaults for absent keys. Reads are recorded in the original."""

    def __init__(self, config: _TrackedConfig, defaults: Mapping[str, object]) -> None:
        super().__init__({**defaults, **config})
        self.keys_read = config.keys_read


def _rope_theta(entries: Entries) -> float:
    """Return theta of the layers with full attention, where kinds of layers have their own."""
    inner = entries.values.get("rope_parameters")
    if isinstance(inner, dict):
        inner = inner.get("full_attention", inner)
        if "rope_theta" in inner:
            return float(inner["rope_theta"])
    return entries.number("rope_theta", 10000.0)
