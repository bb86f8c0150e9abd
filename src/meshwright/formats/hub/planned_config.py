"""Strict reader of a config.json for planning, also of families that the engine does not train.

A key that no reader understands, and that is not listed as harmless, is refused: it could change the sizes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.formats.hub.config import CODED, shape_from_config, written_keys
from meshwright.formats.hub.entries import Entries
from meshwright.formats.hub.families import FAMILIES
from meshwright.formats.hub.planned_families import ALIASES, PLANNED, READ, WRAPPERS, PlannedFamily
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.shape import MOST_LAYERS, ModelShape

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
"""Keys that change neither the sizes of a model nor the arithmetic of its blocks: reason -> keys."""
HARMLESS_PATTERN = re.compile(r"_.*|.*_token_id|.*_token_ids|.*_token_index")
"""Private keys, and the ids of marks."""
_HARMLESS_KEYS = frozenset(key for keys in HARMLESS.values() for key in keys)


class _TrackedConfig(dict[str, object]):
    """Config that records which of its keys were read."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value like dict.get, and record the key."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def is_planned(config: Mapping[str, object]) -> bool:
    """Return True if a config is of a family that can be planned but not trained. Some of phi3 are."""
    kind = _model_type(config)
    return kind in WRAPPERS or (kind in PLANNED and (kind not in FAMILIES or bool(planned_shape(config).plan_only)))


def planned_shape(config: Mapping[str, object]) -> ModelShape:
    """Return the shape of a config, with parts that the engine lacks (`ModelShape.plan_only` names them).

    Raises HubError for an unknown family or key that could change the shape, and as shape_from_config does.
    """
    kind = _model_type(config)
    if kind in WRAPPERS:
        return planned_shape(_text_config(config, WRAPPERS[kind]))
    if kind in ALIASES:
        config = {**config, "model_type": ALIASES[kind], "architectures": [FAMILIES[ALIASES[kind]].architecture]}
    if kind not in FAMILIES and kind not in PLANNED and kind not in ALIASES:
        known = ", ".join((*FAMILIES, *(name for name in PLANNED if name not in FAMILIES), *WRAPPERS, *ALIASES))
        raise HubError(f"config.json: model_type={kind!r} is not known to the planner (known: {known})")
    tracked = _TrackedConfig(config)
    family = PLANNED.get(str(kind))
    shape = _read_shape(tracked, family) if family else None
    if shape is None or not shape.plan_only:
        shape = shape_from_config(tracked)
        tracked.asked |= written_keys(shape)  # such as the length of windows, which is not read where there are none
    unknown = _unknown_keys(config, {*tracked.asked, *READ, *(family.read if family else ())})
    for key, setting in unknown.items():
        raise HubError(
            f"config.json: {key}={repr(setting)[:60]} is not known and could change the shape: remove the key "
            "if it does not"
        )
    return shape


def _unknown_keys(config: Mapping[str, object], understood: Iterable[str]) -> dict[str, object]:
    """Return entries that no reader handles and that are not harmless, except null, false and empty ones."""
    known = _HARMLESS_KEYS | set(understood)
    return {
        key: value
        for key, value in config.items()
        if key not in known and not HARMLESS_PATTERN.fullmatch(key) and value not in (None, False, [], {}, "")
    }


def _model_type(config: Mapping[str, object]) -> object:
    kind = config.get("model_type")
    return kind.removeprefix(CODED) if isinstance(kind, str) else kind


def _text_config(config: Mapping[str, object], kind: str) -> dict[str, object]:
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise HubError(f"config.json: text_config={inner!r} must be an object: the language model is described there")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**outer, **inner, "model_type": kind}


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
        self.asked = config.asked


def _rope_theta(entries: Entries) -> float:
    """Return theta of the layers with full attention, where kinds of layers have their own."""
    inner = entries.values.get("rope_parameters")
    if isinstance(inner, dict):
        inner = inner.get("full_attention", inner)
        if "rope_theta" in inner:
            return float(inner["rope_theta"])
    return entries.number("rope_theta", 10000.0)
