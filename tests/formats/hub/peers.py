"""Tiny random models of transformers, one a variant that the hub supports: configs as data, and how they are made."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.model import Transformer

VOCAB = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-yarn-mscales": (
        "llama",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8.0}},
    ),
    "llama-yarn-attention": ("llama", {"rope_parameters": {**_YARN, "attention_factor": 1.7}}),
    "qwen2-yarn-less-attention": ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 0.4}}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3-window": ("phi3", {"sliding_window": 5, "pad_token_id": 0}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-dense-first": (
        "qwen3_moe",
        {
            **_EXPERTS,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek": ("deepseek_v3", _DEEPSEEK),
    "deepseek-whole-queries": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-yarn-biases": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-halves": (
        "deepseek_v3",
        {**_DEEPSEEK, "rope_interleave": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-untied-gelu": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40}),
}


def peer(name: str, seed: int = 0) -> Any:
    """The model of transformers, in eval mode, every weight random: norms, biases and corrections too."""
    import transformers

    family, options = PEERS[name]
    sizes = _GPT2 if family == "gpt2" else _SIZES
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    shake(dict(model.named_parameters()) | corrections(dict(model.named_buffers())), seed)
    return model


def corrections(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The routers' correction biases, by either's name."""
    return {name: buffer for name, buffer in buffers.items() if name.endswith("correction_bias")}


def shake(tensors: dict[str, Tensor], seed: int) -> None:
    """Fill tensors with noise strong enough that a swapped or unread one shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in sorted(tensors):
            noise = torch.randn(tensors[name].shape, generator=generator)
            tensors[name].copy_(noise * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0))


def tensors_of(model: Transformer) -> dict[str, Tensor]:
    """Everything a directory holds of our model, by our names."""
    return dict(model.named_parameters()) | corrections(dict(model.named_buffers()))


def tokens(seed: int = 1) -> Tensor:
    """Two sequences, longer than every window above."""
    return torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(seed))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def names_in(folder: Path) -> set[str]:
    """Names of all files of a directory."""
    return {path.name for path in folder.iterdir()}
