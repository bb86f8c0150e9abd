"""Conversion between a shape and the keys of a GGUF file, by llama.cpp's architectures.

header.py parses the keys of a file; this module maps them to a shape, and back. An architecture decides the names of
tensors, and the order of rows of queries and keys.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.gguf.header import GGUFHeader, StoredBlocks, Value, int_or, required_value
from meshwright.formats.hub.config import unwritable
from meshwright.formats.hub.weight_names import ROTARY, Binding, Transform, WeightRow, bindings, weight_rows
from meshwright.model.attention import frequencies
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.shape import LARGEST, MOST_LAYERS, ModelShape, MoEShape, RopeScaling

FREQUENCIES = "rope_freqs.weight"
"""Divisors of the angle of each pair, written for Llama-3's scaling."""
ROUTERS = "ffn_gate_inp.weight"
OURS = "meshwright."
"""Prefix of our keys, which llama.cpp does not read. They hold what its keys do not."""
LLAMA3 = ("factor", "original_positions", "low_frequency_factor", "high_frequency_factor")
USUAL_LLAMA3 = {"original_positions": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
"""Numbers of every published model with that scaling. Files have the resulting factors, not these numbers."""
CHANGE_THE_MODEL = (
    "attention.scale", "attention.sliding_window", "attention.logit_softcapping", "final_logit_softcapping",
    "logit_scale", "residual_scale", "embedding_scale", "expert_shared_count", "expert_group_count",
    "expert_weights_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "attention.clamp_kqv", "nextn_predict_layers",
    "rope.scale_linear",
)  # fmt: skip
"""Keys that would change the model if they are neither 0 nor 1."""
GREATEST_ERROR = 1e-5
"""Largest relative error of frequency factors that follow from the usual numbers."""


def _regrouped(tensor: Tensor, shape: ModelShape, sizes: tuple[int, int]) -> Tensor:
    if shape.rope_interleaved:
        return tensor
    return tensor.reshape(-1, *sizes, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)


NEIGHBOURS = Transform(
    export=lambda ours, shape: [_regrouped(ours[0], shape, (2, shape.head_dim // 2))],
    restore=lambda theirs, rows, shape: [_regrouped(theirs[0], shape, (shape.head_dim // 2, 2))],
)
"""Rows of queries and keys of `llama`, whose rotary pairs are neighbours. Ours are halves of a head."""
FUSED = Transform(
    export=lambda ours, shape: [torch.cat(list(ours))],
    restore=lambda theirs, rows, shape: torch.split(theirs[0], list(rows)),
)
"""Several projections below each other."""

_OUTER = weight_rows({"embed": "token_embd", "norm": "output_norm", "head": "output"})
_BLOCK = weight_rows(
    {
        "layers.*.attention_norm": "blk.*.attn_norm",
        "layers.*.mlp_norm": "blk.*.ffn_norm",
        "layers.*.attention.v": "blk.*.attn_v",
        "layers.*.attention.o": "blk.*.attn_output",
        "layers.*.mlp.gate": "blk.*.ffn_gate",
        "layers.*.mlp.up": "blk.*.ffn_up",
        "layers.*.mlp.down": "blk.*.ffn_down",
        "layers.*.mlp.router": "blk.*.ffn_gate_inp",
        "layers.*.mlp.experts.gate": "blk.*.ffn_gate_exps.weight",
        "layers.*.mlp.experts.up": "blk.*.ffn_up_exps.weight",
        "layers.*.mlp.experts.down": "blk.*.ffn_down_exps.weight",
    }
)
_HEADS = {"layers.*.attention.q": "blk.*.attn_q", "layers.*.attention.k": "blk.*.attn_k"}
_NORMED = {"layers.*.attention.q_norm": "blk.*.attn_q_norm", "layers.*.attention.k_norm": "blk.*.attn_k_norm"}
_LLAMA = _OUTER + _BLOCK + weight_rows(_HEADS, NEIGHBOURS)
_QWEN = _OUTER + _BLOCK + weight_rows(_HEADS | _NORMED, ROTARY)
_GPT2 = (
    _OUTER
    + _BLOCK
    + weight_rows({"positions": "position_embd"})
    + weight_rows({"layers.*.attention.q + layers.*.attention.k + layers.*.attention.v": "blk.*.attn_qkv"}, FUSED)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture that is written and read."""

    name: str
    """Value of the key general.architecture."""
    families: tuple[str, ...]
    """Our families that it holds. A file that names none is read as the first."""
    rows: tuple[WeightRow, ...]
    scalings: tuple[str, ...] = ("linear", "yarn")
    """Scalings of rotary frequencies that llama.cpp applies in it."""


ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama", families=("llama", "mistral", "mixtral"), rows=_LLAMA, scalings=("linear", "yarn", "llama3")
        ),
        Architecture(name="qwen2", families=("qwen2",), rows=_QWEN),
        Architecture(name="qwen3", families=("qwen3",), rows=_QWEN),
        Architecture(name="qwen3moe", families=("qwen3_moe",), rows=_QWEN),
        Architecture(name="gpt2", families=("gpt2",), rows=_GPT2, scalings=()),
    )
}


def architecture_of(shape: ModelShape) -> Architecture:
    """Return the architecture of a shape that `ungguffable` accepts."""
    return next(architecture for architecture in ARCHITECTURES.values() if shape.family in architecture.families)


def ungguffable(shape: ModelShape) -> str:
    """Return why llama.cpp cannot compute the shape as we do, as a sentence. Empty = it can."""
    supported = [family for architecture in ARCHITECTURES.values() for family in architecture.families]
    if shape.family not in supported:
        return f"a GGUF file cannot hold family {shape.family} (supported: {', '.join(supported)})"
    unwritable_reason = unwritable(shape)
    unsupported_part = "" if unwritable_reason else _unsupported_part(shape)
    return f"{unsupported_part}: take a Hugging Face directory" if unsupported_part else unwritable_reason


def _unsupported_part(shape: ModelShape) -> str:
    """Return the first part of the shape that llama.cpp's code of the architecture lacks. Empty = none."""
    architecture, scaling, moe = architecture_of(shape), shape.rope_scaling, shape.moe
    start = f"llama.cpp's {architecture.name} has no"
    if scaling is not None and shape.positions == "rope":
        if scaling.kind not in architecture.scalings:
            return f"{start} model.rope_scaling.kind={scaling.kind}"
        if scaling.mscale or scaling.mscale_all_dim:
            return f"{start} model.rope_scaling.mscale"
    if shape.family in ("qwen2", "gpt2") and shape.heads * shape.head_dim != shape.hidden:
        return f"{start} model.head_dim={shape.head_dim} with {shape.heads} heads of {shape.hidden}"
    if shape.family in ("qwen3", "qwen3_moe") and (shape.out_bias or shape.qkv_bias):
        return f"{start} biases of attention (model.out_bias, model.qkv_bias)"
    if moe is not None and moe.first_dense:
        return f"{start} dense layers among routed ones (model.moe.first_dense={moe.first_dense})"
    if moe is not None and not moe.normalize_top_k:
        return f"{start} scores of experts that do not sum to 1 (model.moe.normalize_top_k=false)"
    if shape.family == "gpt2" and shape.mlp != "gelu_tanh":
        return f"{start} model.mlp={shape.mlp}"
    return ""


def gguf_bindings(shape: ModelShape, architecture: Architecture) -> list[Binding]:
    """Bind every tensor of the shape to those of a file."""
    return bindings(shape, architecture.rows, "a GGUF file")


def context_of(shape: ModelShape) -> int:
    """Return the longest sequence that needs no sliding window, which llama.cpp lacks in these architectures."""
    windowed = shape.window and shape.window_from_layer < shape.layers
    return min(shape.max_positions, shape.window) if windowed else shape.max_positions


def shape_keys(shape: ModelShape) -> dict[str, Value]:
    """Return all keys but general.* and the tokenizer, for a shape that llama.cpp supports."""
    architecture = architecture_of(shape)
    keys_of_shape: dict[str, Value] = {
        "vocab_size": shape.vocab,
        "context_length": context_of(shape),
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.moe.ffn if shape.moe and shape.family == "mixtral" else shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        _eps_key(architecture): float(shape.norm_eps),
    }
    if shape.positions == "rope":
        keys_of_shape |= {
            "rope.dimension_count": shape.head_dim,
            "rope.freq_base": float(shape.rope_theta),
            **_scaling_keys(shape),
        }
    if shape.moe is not None:
        keys_of_shape |= {"expert_count": shape.moe.experts, "expert_used_count": shape.moe.top_k}
        keys_of_shape |= {} if shape.family == "mixtral" else {"expert_feed_forward_length": shape.moe.ffn}
    keys: dict[str, Value] = {f"{architecture.name}.{name}": value for name, value in keys_of_shape.items()}
    # llama.cpp has one architecture for several families, and derives Llama-3's factors from a tensor.
    keys[OURS + "family"] = shape.family
    if shape.rope_scaling is not None and shape.rope_scaling.kind == "llama3":
        keys |= {f"{OURS}rope.{name}": float(getattr(shape.rope_scaling, name)) for name in LLAMA3}
    return keys


def _eps_key(architecture: Architecture) -> str:
    return "attention.layer_norm_epsilon" if architecture.name == "gpt2" else "attention.layer_norm_rms_epsilon"


def _scaling_keys(shape: ModelShape) -> dict[str, Value]:
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind == "llama3":
        return {}
    keys: dict[str, Value] = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": scaling.original_positions,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
    return keys


def frequency_factors(shape: ModelShape) -> Tensor | None:
    """Return the divisor of each angle (E/2,) fp32. None = no tensor of the file holds it."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    return frequencies(replace(shape, rope_scaling=None)) / frequencies(shape)


def shape_of(header: GGUFHeader) -> ModelShape:
    """Read the shape of a file. Raises HubError for an unsupported architecture or key."""
    supported = ", ".join(ARCHITECTURES)
    name = required_value(header, "general.architecture", lambda value: isinstance(value, str), f"one of {supported}")
    if name not in ARCHITECTURES:
        raise HubError(f"{header.file}: architecture {name} is not supported (supported: {supported})")
    keys = _Keys(header, ARCHITECTURES[name])
    keys.check_other_keys()
    try:
        shape = _read_shape(keys)
        return replace(shape, rope_scaling=_read_scaling(keys, shape)) if shape.positions == "rope" else shape
    except PlanError as error:
        raise HubError(f"{header.file}: {error}") from error


class _Keys:
    """Keys of an architecture."""

    def __init__(self, header: GGUFHeader, architecture: Architecture) -> None:
        self.header, self.architecture = header, architecture

    def full_name(self, key: str) -> str:
        return f"{self.architecture.name}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.full_name(key) in self.header.keys

    def integer(self, key: str, absent: int | None = None) -> int:
        if absent is not None and key not in self:
            return absent
        most = MOST_LAYERS if key == "block_count" else LARGEST
        number = required_value(
            self.header,
            self.full_name(key),
            lambda value: 0 < int_or(value, 0) < most,
            f"a whole number from 1 to {most - 1}",
        )
        return int(number)

    def number(self, key: str, absent: float | None = None) -> float:
        if absent is not None and key not in self:
            return absent
        return _shortest(float(required_value(self.header, self.full_name(key), _is_positive, "a number above 0")))

    def check_other_keys(self) -> None:
        for key in CHANGE_THE_MODEL:
            setting = self.header.keys.get(self.full_name(key), 0)
            # Files state such keys also where they change nothing: 0 is off, and a factor of 1 is none.
            if setting not in (0, 1):
                raise HubError(f"{self.header.file}: {self.full_name(key)}={str(setting)[:40]} is not supported")
        if self.header.keys.get(self.full_name("attention.causal"), True) is not True:
            raise HubError(
                f"{self.header.file}: {self.full_name('attention.causal')} is false: it is not a causal language model"
            )

    def stored(self, name: str) -> StoredBlocks | None:
        return self.header.tensors.get(name)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same number in 32 bits: 1e-05, not 9.99999974e-06."""
    # Files hold fp32, and plans the decimals of a config: 1e-05 must come back as 1e-05.
    raw = struct.pack("<f", value)
    return next((x for digits in range(1, 9) if struct.pack("<f", x := float(f"{value:.{digits}g}")) == raw), value)


def _read_shape(keys: _Keys) -> ModelShape:
    architecture, embedding = keys.architecture, keys.stored("token_embd.weight")
    if embedding is None:
        raise HubError(f"{keys.header.file} has no tensor token_embd.weight: it is not a complete model")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise HubError(
                f"{keys.header.file}: {keys.full_name(key)}={keys.integer(key)} differs from a head's {head_dim}"
            )
    fields: dict[str, Any] = {
        # Rows of the embedding, since the key vocab_size is optional and may leave padding out.
        "family": _read_family(keys), "vocab": embedding.size[0], "layers": keys.integer("block_count"),
        "hidden": hidden, "heads": heads, "head_dim": head_dim,
        "kv_heads": keys.integer("attention.head_count_kv", heads),
        "ffn": keys.integer("feed_forward_length"), "max_positions": keys.integer("context_length"),
        "norm_eps": keys.number(_eps_key(architecture)), "tied": keys.stored("output.weight") is None,
        "qkv_bias": any(keys.stored(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv")),
        "out_bias": keys.stored("blk.0.attn_output.bias") is not None,
        "mlp_bias": keys.stored("blk.0.ffn_up.bias") is not None,
        "qk_norm": keys.stored("blk.0.attn_q_norm.weight") is not None,
    }  # fmt: skip
    name = keys.header.keys.get("general.name")
    fields["name"] = name if isinstance(name, str) and name else keys.header.file.stem
    if architecture.name == "gpt2":
        return ModelShape(**fields, norm="layernorm", positions="learned", mlp="gelu_tanh")
    return ModelShape(**fields, rope_theta=keys.number("rope.freq_base", 10000.0), moe=_read_experts(keys))


def _read_family(keys: _Keys) -> str:
    """Return the family that we have written, or the usual one."""
    families, written_family = keys.architecture.families, keys.header.keys.get(OURS + "family")
    if isinstance(written_family, str) and written_family in families:
        return written_family
    return "mixtral" if keys.architecture.name == "llama" and "expert_count" in keys else families[0]


def _read_experts(keys: _Keys) -> MoEShape | None:
    if not int_or(keys.header.keys.get(keys.full_name("expert_count")), 0):
        return None
    return MoEShape(
        experts=keys.integer("expert_count"),
        top_k=keys.integer("expert_used_count"),
        ffn=keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
    )


def _read_scaling(keys: _Keys, shape: ModelShape) -> RopeScaling | None:
    # The tensor decides: files of Llama 3 have no key for the kind of scaling.
    if keys.stored(FREQUENCIES) is not None:
        return _read_llama3(keys, shape)
    kind = keys.header.keys.get(keys.full_name("rope.scaling.type"), "none")
    if kind == "none" or (kind == "linear" and "rope.scaling.factor" not in keys):
        return None
    if kind not in ("linear", "yarn"):
        raise HubError(f"{keys.header.file}: {keys.full_name('rope.scaling.type')}={kind!r} is not supported")
    factor, positions = keys.number("rope.scaling.factor"), shape.max_positions
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_positions=max(1, round(positions / max(1.0, factor))))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=keys.integer("rope.scaling.original_context_length", positions),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _read_llama3(keys: _Keys, shape: ModelShape) -> RopeScaling:
    """Return the numbers behind the frequency factors: our own keys, or those of all published models."""
    tensor = keys.stored(FREQUENCIES)
    assert tensor is not None
    if tensor.size != (shape.head_dim // 2,) or tensor.kind.name != "F32":
        raise HubError(f"{keys.header.file}: {FREQUENCIES} is {list(tensor.size)} {tensor.kind.name}, not F32 of pairs")
    factors = tensor.read().view(torch.float32)
    written: Mapping[str, Any] = {name: keys.header.keys.get(f"{OURS}rope.{name}") for name in LLAMA3}
    parameters = (
        written if all(map(_is_positive, written.values())) else {"factor": float(factors.max()), **USUAL_LLAMA3}
    )
    numbers: dict[str, Any] = {name: _shortest(float(value)) for name, value in parameters.items()}
    scaling = RopeScaling(kind="llama3", **numbers | {"original_positions": int(parameters["original_positions"])})
    # The usual numbers are a guess for files of others, so the factors must follow from them.
    expected = frequency_factors(replace(shape, rope_scaling=scaling))
    assert expected is not None
    if not torch.allclose(factors, expected, rtol=GREATEST_ERROR, atol=0):
        raise HubError(
            f"{keys.header.file}: {FREQUENCIES} does not follow from Llama-3's scaling, and no other is supported"
        )
    return scaling
