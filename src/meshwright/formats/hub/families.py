"""Families of Hugging Face directories, as data: how each spells the fields of a shape in its config.json.

Parts that are more than a renamed key are functions, one that reads and one that writes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape, RopeScaling, temperature

_REQUIRED = object()


class Entries:
    """Entries of one config. `absent` is the value that a reader assumes for a missing key."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, what: str) -> HubError:
        """Return the error to raise about this file."""
        return HubError(f"{self.where}: {what}")

    def raw(self, key: str, absent: object = _REQUIRED) -> object:
        """Return the value as JSON gave it."""
        value = self.values.get(key, absent)
        if value is _REQUIRED:
            raise self.fail(f"{key} is missing")
        return value

    def maybe_integer(self, key: str, absent: object = None) -> int | None:
        """Return a whole number of 0 or more, or None for null."""
        number = self.raw(key, absent)
        # Some writers put 32.0 for 32.
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if number is None:
            return None
        # JSON's true is an int for Python.
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise self.fail(f"{key}={number!r} must be a whole number of 0 or more")
        return number

    def integer(self, key: str, absent: object = _REQUIRED) -> int:
        """Return a whole number of 0 or more."""
        value = self.maybe_integer(key, absent)
        if value is None:
            raise self.fail(f"{key}=null must be a whole number")
        return value

    def number(self, key: str, absent: object = _REQUIRED) -> float:
        """Return a finite number of 0 or more."""
        value = self.raw(key, absent)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self.fail(f"{key}={value!r} must be a finite number of 0 or more")
        return float(value)

    def flag(self, key: str, absent: object = _REQUIRED) -> bool:
        """Return true or false. null counts as false."""
        value = self.raw(key, absent)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{key}={value!r} must be true or false")
        return value

    def text(self, key: str, absent: object = _REQUIRED) -> str:
        """Return a string."""
        value = self.raw(key, absent)
        if not isinstance(value, str):
            raise self.fail(f"{key}={value!r} must be a string")
        return value

    def inner(self, key: str) -> "Entries | None":
        """Return a nested object, or None if it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key}={value!r} must be an object")
        return Entries(value, f"{self.where}, {key}")

    def allow(self, key: str, supported: tuple[object, ...]) -> None:
        """Raise HubError if the value of a key is not supported. An absent key is allowed."""
        value = self.values.get(key, supported[0])
        if value not in supported:
            allowed = ", ".join(repr(option) for option in supported if option is not None) or "to leave it out"
            raise self.fail(f"{key}={value!r} is not supported (supported: {allowed})")


Fields = dict[str, object]
ROPE_KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPart:
    """Pair of functions: `read` returns fields of the shape, `write` keys of the config."""

    read: Callable[[Entries], Fields]
    write: Callable[[ModelShape], Fields]


def rope(theta: float = 10000.0) -> ConfigPart:
    """Return the part of rotary positions. `theta` is the family's default."""
    return ConfigPart(read=lambda entries: _read_rope(entries, theta=theta), write=_write_rope)


def _read_rope(entries: Entries, *, theta: float) -> Fields:
    """Read rope_theta and rope_scaling of the shape. `theta` is the default of the family."""
    inner = entries.inner("rope_scaling") or entries.inner("rope_parameters") or Entries({}, entries.where)
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise inner.fail("rotary settings per kind of layer are not supported (give one for all layers)")
    stated = inner if "rope_theta" in inner else entries
    for part in (entries, inner):
        part.allow("partial_rotary_factor", (1.0, None))
    return {"rope_theta": stated.number("rope_theta", theta), "rope_scaling": _read_rope_scaling(entries, inner)}


def _read_rope_scaling(entries: Entries, inner: Entries) -> RopeScaling | None:
    kind = inner.text("rope_type", inner.values.get("type", "default"))
    if kind == "default":
        inner.allow("mrope_section", (None,))
        return None
    # It only changes positions beyond max_position_embeddings.
    if kind == "dynamic":
        return None
    if kind not in ROPE_KINDS:
        raise inner.fail(f"rope scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    positions = entries.integer("max_position_embeddings")
    if kind == "linear":
        factor = inner.number("factor")
        return RopeScaling(kind="linear", factor=factor, original_positions=max(1, round(positions / max(1.0, factor))))
    # Also read outside of the rotary settings, where transformers gives it priority.
    inside = inner.maybe_integer("original_max_position_embeddings")
    original = entries.maybe_integer("original_max_position_embeddings") or inside or positions
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=inner.number("factor"),
            original_positions=original,
            low_frequency_factor=inner.number("low_freq_factor"),
            high_frequency_factor=inner.number("high_freq_factor"),
        )
    return _read_yarn(inner, original, positions, latent="kv_lora_rank" in entries)


def _read_yarn(inner: Entries, original: int, positions: int, *, latent: bool) -> RopeScaling:
    """Read YaRN's settings. mscale counts only together with mscale_all_dim.

    Otherwise the attention factor is the paper's 0.1 ln(factor) + 1. A stated factor becomes a quotient of both
    mscales. With latent attention mscale_all_dim scales scores too, so a stated factor is refused.
    """
    inner.allow("truncate", (True, None))
    factor = positions / max(1, original) if inner.raw("factor", None) is None else inner.number("factor")
    all_dim = inner.number("mscale_all_dim", 0.0)
    mscale = inner.number("mscale", 0.0) if all_dim else 0.0
    if inner.raw("attention_factor", None) is not None:
        # A stated factor that equals the formula needs no words of its own.
        implied = temperature(factor, mscale or 1.0) / (temperature(factor, all_dim) if mscale else 1.0)
        stated = inner.number("attention_factor")
        if not math.isclose(stated, implied, rel_tol=1e-6):
            # Beyond this range the quotient of mscales is not exact.
            if latent or factor <= 1 or not 0.01 <= stated <= 100:
                raise inner.fail(f"attention_factor={stated:g} is not supported, only {implied:.6g}")
            mscale, all_dim = _mscales(stated, factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=inner.number("beta_fast") if inner.values.get("beta_fast") else 32.0,
        beta_slow=inner.number("beta_slow") if inner.values.get("beta_slow") else 1.0,
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _mscales(attention: float, factor: float) -> tuple[float, float]:
    """Return an mscale and mscale_all_dim whose temperatures have this quotient."""
    # Above 1 for both, since an mscale of 0 would count as not stated.
    below = max(1.0, 1.0 / attention) + 0.1
    unit = temperature(factor, 1.0) - 1.0
    return (attention * below - 1.0) / unit, (below - 1.0) / unit


def _write_rope(shape: ModelShape) -> Fields:
    """Write both spellings at once: a v4 reader that met only rope_parameters would silently take theta = 10000."""
    scaling = _write_rope_scaling(shape.rope_scaling) if shape.rope_scaling else {}
    kind = scaling.get("rope_type", "default")
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": {**scaling, "type": kind} if scaling else None,
        "rope_parameters": {**scaling, "rope_theta": shape.rope_theta, "rope_type": kind},
    }


def _write_rope_scaling(scaling: RopeScaling) -> Fields:
    config: Fields = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        config["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        config["low_freq_factor"] = scaling.low_frequency_factor
        config["high_freq_factor"] = scaling.high_frequency_factor
    if scaling.kind == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        config |= {"mscale": scaling.mscale} if scaling.mscale else {}
        config |= {"mscale_all_dim": scaling.mscale_all_dim} if scaling.mscale_all_dim else {}
    return config


def heads(kv_heads: int | None = None, head_dim: int | None = None) -> ConfigPart:
    """Return the part of key heads and head width. null stands for heads, and for hidden / heads."""
    return ConfigPart(
        read=lambda entries: {
            "kv_heads": entries.maybe_integer("num_key_value_heads", kv_heads) or 0,
            "head_dim": entries.maybe_integer("head_dim", head_dim) or 0,
        },
        write=lambda shape: {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim},
    )


def _read_bias(entries: Entries) -> Fields:
    bias = entries.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


ATTENTION_BIAS = ConfigPart(read=_read_bias, write=lambda shape: {"attention_bias": shape.qkv_bias})
MLP_BIAS = ConfigPart(
    read=lambda entries: {"mlp_bias": entries.flag("mlp_bias", False)}, write=lambda shape: {"mlp_bias": shape.mlp_bias}
)


def plain_window(absent: int | None) -> ConfigPart:
    """Return the part of sliding_window in every layer, null for none (Mistral, Mixtral). `absent` is its default."""
    return ConfigPart(
        read=lambda entries: {"window": entries.maybe_integer("sliding_window", absent) or 0},
        write=lambda shape: {"sliding_window": shape.window or None},
    )


def _read_switched_window(entries: Entries) -> Fields:
    # Qwen3-MoE writes it, but transformers reads it only for other families.
    entries.raw("max_window_layers", None)
    on = entries.flag("use_sliding_window", False)
    return {"window": (entries.maybe_integer("sliding_window", 4096) or 0) if on else 0}


def _read_layered_window(entries: Entries) -> Fields:
    fields, types = _read_switched_window(entries), entries.raw("layer_types", None)
    # Without a window the kinds of layers mean nothing.
    if not fields["window"]:
        return fields
    layers, first = entries.integer("num_hidden_layers"), entries.integer("max_window_layers", 28)
    if types is not None:
        # max_window_layers can say only at which layer the kind changes, once.
        full = types.count("full_attention") if isinstance(types, list) else 0
        if types != ["full_attention"] * full + ["sliding_attention"] * (layers - full):
            raise entries.fail("layer_types must be full_attention for the first layers, then sliding_attention")
        first = full
    return {**fields, "window_from_layer": first} if first < layers else {"window": 0}


def _write_window(shape: ModelShape) -> Fields:
    return {"use_sliding_window": shape.window > 0, "sliding_window": shape.window or None}


SWITCHED_WINDOW = ConfigPart(read=_read_switched_window, write=_write_window)
LAYERED_WINDOW = ConfigPart(
    read=_read_layered_window,
    write=lambda shape: {
        **_write_window(shape),
        "max_window_layers": shape.window_from_layer if shape.window else shape.layers,
    },
)


def _read_inner(entries: Entries) -> Fields:
    # n_ctx is an older name of n_positions.
    entries.allow("n_ctx", (entries.integer("n_positions"), None))
    return {"ffn": entries.maybe_integer("n_inner") or 4 * entries.integer("n_embd")}


def _read_gelu(entries: Entries) -> Fields:
    names = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
    entries.allow("activation_function", tuple(names))
    return {"mlp": names[entries.text("activation_function", "gelu_new")]}


GELU = ConfigPart(
    read=_read_gelu, write=lambda shape: {"activation_function": "gelu" if shape.mlp == "gelu" else "gelu_new"}
)


INNER = ConfigPart(
    read=_read_inner,
    write=lambda shape: {"n_inner": shape.ffn},
)


def _read_mixtral(entries: Entries) -> Fields:
    """Read the experts. Softmax over the chosen ones equals softmax over all, normalized over the chosen."""
    moe = MoEShape(
        experts=entries.integer("num_local_experts", 8),
        top_k=entries.integer("num_experts_per_tok", 2),
        ffn=entries.integer("intermediate_size"),
    )
    return {"moe": moe}


def _write_mixtral(shape: ModelShape) -> Fields:
    if shape.moe is None:
        return {}
    return {
        "num_local_experts": shape.moe.experts,
        "num_experts_per_tok": shape.moe.top_k,
        "intermediate_size": shape.moe.ffn,
    }


MIXTRAL = ConfigPart(read=_read_mixtral, write=_write_mixtral)


def _first_dense(entries: Entries) -> int:
    """Return the number of leading dense layers of a Qwen3-MoE. Raises HubError for dense layers elsewhere."""
    layers, step = entries.integer("num_hidden_layers"), max(1, entries.integer("decoder_sparse_step", 1))
    listed = entries.raw("mlp_only_layers", None) or []
    if not isinstance(listed, list):
        raise entries.fail(f"mlp_only_layers={listed!r} must be a list of layers")
    routed = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
    first = routed.index(True) if any(routed) else layers
    if not all(routed[first:]):
        raise entries.fail(
            f"decoder_sparse_step={step} and mlp_only_layers={listed} put dense layers behind routed ones, "
            "which is not supported (supported: dense layers first)"
        )
    return first


def _read_qwen_moe(entries: Entries) -> Fields:
    # Qwen3-Coder states it. The family always has it.
    entries.allow("use_qk_norm", (True, None))
    entries.allow("shared_expert_intermediate_size", (0, None))
    first = _first_dense(entries)
    if first >= entries.integer("num_hidden_layers"):
        return {}
    moe = MoEShape(
        experts=entries.integer("num_experts", entries.integer("num_local_experts", 128)),
        top_k=entries.integer("num_experts_per_tok", 8),
        ffn=entries.integer("moe_intermediate_size", 768),
        first_dense=first,
        normalize_top_k=entries.flag("norm_topk_prob", False),
    )
    return {"moe": moe}


def _write_qwen_moe(shape: ModelShape) -> Fields:
    # The family has no key for no experts at all, but each layer may be listed as dense.
    if shape.moe is None:
        return {"mlp_only_layers": list(range(shape.layers))}
    return {
        "num_experts": shape.moe.experts,
        # Both names: releases of transformers read one or the other.
        "num_local_experts": shape.moe.experts,
        "num_experts_per_tok": shape.moe.top_k,
        "moe_intermediate_size": shape.moe.ffn,
        "norm_topk_prob": shape.moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(shape.moe.first_dense)),
    }


QWEN_MOE = ConfigPart(read=_read_qwen_moe, write=_write_qwen_moe)


def _read_deepseek_moe(entries: Entries) -> Fields:
    entries.allow("moe_layer_freq", (1, None))
    entries.allow("scoring_func", ("sigmoid",))
    entries.allow("topk_method", ("noaux_tc",))
    first = entries.integer("first_k_dense_replace", 3)
    if first >= entries.integer("num_hidden_layers"):
        return {}
    moe = MoEShape(
        experts=entries.integer("n_routed_experts"),
        top_k=entries.integer("num_experts_per_tok", 8),
        ffn=entries.integer("moe_intermediate_size"),
        shared_experts=entries.maybe_integer("n_shared_experts", 1) or 0,
        first_dense=first,
        scoring="sigmoid",
        normalize_top_k=entries.flag("norm_topk_prob", True),
        groups=entries.maybe_integer("n_group", 8) or 1,
        top_groups=entries.maybe_integer("topk_group", 4) or 1,
        routed_scale=entries.number("routed_scaling_factor", 2.5),
        correction_bias=True,
    )
    return {"moe": moe}


def _write_deepseek_moe(shape: ModelShape) -> Fields:
    moe = shape.moe
    if moe is None:
        return {"first_k_dense_replace": shape.layers}
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.normalize_top_k,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.routed_scale,
        "num_nextn_predict_layers": 0,
    }


DEEPSEEK_MOE = ConfigPart(read=_read_deepseek_moe, write=_write_deepseek_moe)


def _read_mla(entries: Entries) -> Fields:
    heads = entries.integer("num_attention_heads")
    if (entries.maybe_integer("num_key_value_heads") or heads) != heads:
        raise entries.fail("num_key_value_heads must equal num_attention_heads: latent attention has no key groups")
    mla = MLAShape(
        q_rank=entries.maybe_integer("q_lora_rank", 1536) or 0,
        kv_rank=entries.integer("kv_lora_rank"),
        nope_dim=entries.integer("qk_nope_head_dim"),
        rope_dim=entries.integer("qk_rope_head_dim"),
        v_dim=entries.integer("v_head_dim"),
    )
    # transformers writes qk_head_dim, and ignores it when reading.
    entries.allow("qk_head_dim", (mla.nope_dim + mla.rope_dim, None))
    return {
        "mla": mla,
        "rope_interleaved": entries.flag("rope_interleave", True),
    }


def _write_mla(shape: ModelShape) -> Fields:
    mla = shape.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "qk_head_dim": mla.nope_dim + mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "head_dim": mla.rope_dim,
        "num_key_value_heads": shape.heads,
        "rope_interleave": shape.rope_interleaved,
    }


MLA = ConfigPart(read=_read_mla, write=_write_mla)


_USUAL = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
_GPT2 = {
    "vocab": "vocab_size",
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "max_positions": "n_positions",
}
_SILU = {"hidden_act": ("silu", "swish")}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFamily:
    """Spelling of one model_type. `eps` and `tied` are its defaults for absent keys."""

    architecture: str
    sizes: Mapping[str, str] = field(default_factory=lambda: _USUAL)
    """Required whole numbers: field of the shape -> key."""
    eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    tied: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of the shape that no config of this family can change."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: _SILU)
    """Keys that support only these values. The first is written."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    marks: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    """Keys whose absence transformers reads as ids of the family's original vocabulary."""
    parts: tuple[ConfigPart, ...] = ()


FAMILIES: Mapping[str, HubFamily] = {
    "llama": HubFamily(
        architecture="LlamaForCausalLM",
        parts=(heads(), rope(), ATTENTION_BIAS, MLP_BIAS),
    ),
    "mistral": HubFamily(
        architecture="MistralForCausalLM",
        parts=(heads(kv_heads=8), rope(), plain_window(absent=4096)),
    ),
    "mixtral": HubFamily(
        architecture="MixtralForCausalLM",
        eps=1e-5,
        parts=(heads(kv_heads=8), rope(1e6), plain_window(absent=None), MIXTRAL),
    ),
    "qwen2": HubFamily(
        architecture="Qwen2ForCausalLM",
        fixed={"qkv_bias": True},
        parts=(heads(kv_heads=32), rope(), LAYERED_WINDOW),
    ),
    "qwen3": HubFamily(
        architecture="Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        parts=(heads(kv_heads=32, head_dim=128), rope(), ATTENTION_BIAS, LAYERED_WINDOW),
    ),
    "qwen3_moe": HubFamily(
        architecture="Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        parts=(heads(kv_heads=4), rope(), ATTENTION_BIAS, SWITCHED_WINDOW, QWEN_MOE),
    ),
    "deepseek_v3": HubFamily(
        architecture="DeepseekV3ForCausalLM",
        parts=(rope(), ATTENTION_BIAS, MLA, DEEPSEEK_MOE),
    ),
    "gpt2": HubFamily(
        architecture="GPT2LMHeadModel",
        sizes=_GPT2,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        tied=True,
        fixed={
            "norm": "layernorm",
            "positions": "learned",
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        parts=(GELU, INNER),
    ),
    "phi3": HubFamily(
        architecture="Phi3ForCausalLM",
        eps=1e-5,
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        marks=("bos_token_id", "eos_token_id", "pad_token_id"),
        parts=(heads(), rope(), plain_window(absent=None)),
    ),
}
