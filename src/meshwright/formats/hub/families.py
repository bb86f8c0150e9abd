"""Families of Hugging Face directories, as data: how each spells the fields of a shape in its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.formats.hub import parts
from meshwright.formats.hub.parts import ConfigPart

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
        parts=(parts.heads(), parts.rope(), parts.ATTENTION_BIAS, parts.MLP_BIAS),
    ),
    "mistral": HubFamily(
        architecture="MistralForCausalLM",
        parts=(parts.heads(kv_heads=8), parts.rope(), parts.plain_window(absent=4096)),
    ),
    "mixtral": HubFamily(
        architecture="MixtralForCausalLM",
        eps=1e-5,
        parts=(parts.heads(kv_heads=8), parts.rope(1e6), parts.plain_window(absent=None), parts.MIXTRAL),
    ),
    "qwen2": HubFamily(
        architecture="Qwen2ForCausalLM",
        fixed={"qkv_bias": True},
        parts=(parts.heads(kv_heads=32), parts.rope(), parts.LAYERED_WINDOW),
    ),
    "qwen3": HubFamily(
        architecture="Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        parts=(parts.heads(kv_heads=32, head_dim=128), parts.rope(), parts.ATTENTION_BIAS, parts.LAYERED_WINDOW),
    ),
    "qwen3_moe": HubFamily(
        architecture="Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        parts=(parts.heads(kv_heads=4), parts.rope(), parts.ATTENTION_BIAS, parts.SWITCHED_WINDOW, parts.QWEN_MOE),
    ),
    "deepseek_v3": HubFamily(
        architecture="DeepseekV3ForCausalLM",
        parts=(parts.rope(), parts.ATTENTION_BIAS, parts.MLA, parts.DEEPSEEK_MOE),
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
        parts=(parts.GELU, parts.INNER),
    ),
    "phi3": HubFamily(
        architecture="Phi3ForCausalLM",
        eps=1e-5,
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        marks=("bos_token_id", "eos_token_id", "pad_token_id"),
        parts=(parts.heads(), parts.rope(), parts.plain_window(absent=None)),
    ),
}
