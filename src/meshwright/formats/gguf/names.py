"""llama.cpp's architectures: their names of tensors, and the order of rows of queries and keys."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.formats.hub.config import unwritable
from meshwright.formats.hub.transforms import ROTARY, Transform
from meshwright.formats.hub.weight_names import Binding, WeightRow, bindings, weight_rows
from meshwright.spec.model.shape import ModelShape

FREQUENCIES = "rope_freqs.weight"
"""Divisors of the angle of each pair, written for Llama-3's scaling."""
ROUTERS = "ffn_gate_inp.weight"


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
    + weight_rows(
        {"layers.*.attention.q + layers.*.attention.k + layers.*.attention.v": "blk.*.attn_qkv"}, FUSED
    )
)  # fmt: skip


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
    known = [family for architecture in ARCHITECTURES.values() for family in architecture.families]
    if shape.family not in known:
        return f"a GGUF file cannot hold family {shape.family} (supported: {', '.join(known)})"
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
