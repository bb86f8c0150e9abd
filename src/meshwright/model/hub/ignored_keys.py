"""Keys of a config.json that change neither the sizes of a model nor what its blocks compute, with the reason."""

import re
from collections.abc import Iterable, Mapping

IGNORED: Mapping[str, tuple[str, ...]] = {
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
    "layers that predict further tokens, which stand beside the model": (
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
"""Reason -> keys."""
PATTERNS = re.compile(r"_.*|.*_token_id|.*_token_ids|.*_token_index")
"""Private keys, and the ids of marks."""
_PLAIN = frozenset(key for keys in IGNORED.values() for key in keys)


def unknown_keys(config: Mapping[str, object], understood: Iterable[str]) -> dict[str, object]:
    """Keys and values of a config that nobody reads and that are on no list here. null, false and empty values switch
    off what they are for."""
    known = _PLAIN | set(understood)
    return {
        key: value
        for key, value in config.items()
        if key not in known and not PATTERNS.fullmatch(key) and value not in (None, False, [], {}, "")
    }
