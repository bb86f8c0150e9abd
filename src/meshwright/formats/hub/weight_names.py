"""Names of weights by family, as data, used in both directions.

A row pairs a module of ours with one of theirs. `*` is the layer, `@` the expert, and .weight or .bias follow along.

Tensors that hold the same numbers in another order have a Transform, a pair of inverse functions: `export` maps ours to
theirs, `restore` the other way. Both work on meta tensors, so the sizes of a file's tensors follow from the model's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Pair `export(ours, shape)` and `restore(theirs, rows, shape)`, with rows the sizes of dim 0 of our tensors."""

    export: Callable[[Sequence[Tensor], ModelShape], Sequence[Tensor]]
    restore: Callable[[Sequence[Tensor], Sequence[int], ModelShape], Sequence[Tensor]]


SAME = Transform(export=lambda ours, shape: ours, restore=lambda theirs, rows, shape: theirs)

STACKED = Transform(
    export=lambda ours, shape: ours[0].unbind(0), restore=lambda theirs, rows, shape: [torch.stack(list(theirs))]
)
"""One tensor of ours with a leading dim of experts (X, out, in) <-> X tensors of theirs."""


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


CONV1D = Transform(
    export=lambda ours, shape: [_transpose(torch.cat(list(ours)))],
    restore=lambda theirs, rows, shape: torch.split(_transpose(theirs[0]), list(rows)),
)
"""GPT-2 stores weights as (in, out), and several projections side by side. Biases likewise."""


def _fuse(ours: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    # Three are queries, keys and values, of which the first two are rotated. Two are gate and up.
    turned = [ROTARY.export([rows], shape)[0] for rows in ours[:2]] if len(ours) == 3 else list(ours[:2])
    return [torch.cat([*turned, *ours[2:]])]


def _unfuse(theirs: Sequence[Tensor], rows: Sequence[int], shape: ModelShape) -> Sequence[Tensor]:
    parts = list(theirs[0].split(list(rows)))
    return [ROTARY.restore([part], (), shape)[0] for part in parts[:2]] + parts[2:] if len(rows) == 3 else parts


FUSED = Transform(export=_fuse, restore=_unfuse)
"""Rows of several matrices below each other: queries, keys and values, or gate and up (Phi-3)."""
JOINED = (CONV1D, FUSED)
"""Transforms that make one matrix of several."""
TURNED = "are stored transposed or fused"
"""Description of both, in messages of formats that cannot hold them."""


def _regroup(tensor: Tensor, shape: ModelShape, sizes: tuple[int, int]) -> Tensor:
    """Reorder the rows of every head, seen as a table of `sizes`, to the order of the transposed table."""
    if not shape.rope_interleaved:
        return tensor
    return tensor.reshape(-1, *sizes, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)


ROTARY = Transform(
    export=lambda ours, shape: [_regroup(ours[0], shape, (shape.head_dim // 2, 2))],
    restore=lambda theirs, rows, shape: [_regroup(theirs[0], shape, (2, shape.head_dim // 2))],
)
"""Rows of queries and keys. Where our rotary pairs are neighbours, theirs are halves of the head.

One permutation of the query and key dims leaves attention scores unchanged, so nothing else differs.
"""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Our modules (one, or several that they fuse), their pattern, and the transform between them."""

    ours: tuple[str, ...]
    theirs: str
    transform: Transform


def weight_rows(pairs: Mapping[str, str], transform: Transform = SAME) -> tuple[WeightRow, ...]:
    """Build rows from our modules (several joined by +) and theirs, all under one transform."""
    return tuple(WeightRow(tuple(ours.split(" + ")), theirs, transform) for ours, theirs in pairs.items())


_OUTER = weight_rows({"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
_NORMS = weight_rows(
    {
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    }
)
_ATTENTION = weight_rows(
    {
        "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
        "layers.*.attention.k": "model.layers.*.self_attn.k_proj",
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    },
    ROTARY,
) + weight_rows(
    {
        "layers.*.attention.v": "model.layers.*.self_attn.v_proj",
        "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    }
)
_LATENT = weight_rows(
    {
        "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
        "layers.*.attention.q_down": "model.layers.*.self_attn.q_a_proj",
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_a_layernorm",
        "layers.*.attention.q_up": "model.layers.*.self_attn.q_b_proj",
        "layers.*.attention.kv_down": "model.layers.*.self_attn.kv_a_proj_with_mqa",
        "layers.*.attention.kv_norm": "model.layers.*.self_attn.kv_a_layernorm",
        "layers.*.attention.kv_up": "model.layers.*.self_attn.kv_b_proj",
        "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    }
)
_DENSE = weight_rows(
    {
        "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
        "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
        "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    }
)
_ROUTED = weight_rows({"layers.*.mlp.router": "model.layers.*.mlp.gate"}) + weight_rows(
    {
        "layers.*.mlp.experts.gate": "model.layers.*.mlp.experts.@.gate_proj.weight",
        "layers.*.mlp.experts.up": "model.layers.*.mlp.experts.@.up_proj.weight",
        "layers.*.mlp.experts.down": "model.layers.*.mlp.experts.@.down_proj.weight",
    },
    STACKED,
)
_SHARED = weight_rows(
    {
        "layers.*.mlp.router.correction_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        "layers.*.mlp.shared.gate": "model.layers.*.mlp.shared_experts.gate_proj",
        "layers.*.mlp.shared.up": "model.layers.*.mlp.shared_experts.up_proj",
        "layers.*.mlp.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
    }
)
_BLOCK_SPARSE = weight_rows({"layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate"}) + weight_rows(
    {
        "layers.*.mlp.experts.gate": "model.layers.*.block_sparse_moe.experts.@.w1.weight",
        "layers.*.mlp.experts.up": "model.layers.*.block_sparse_moe.experts.@.w3.weight",
        "layers.*.mlp.experts.down": "model.layers.*.block_sparse_moe.experts.@.w2.weight",
    },
    STACKED,
)
_GPT2 = weight_rows(
    {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.*.attention_norm": "transformer.h.*.ln_1",
        "layers.*.mlp_norm": "transformer.h.*.ln_2",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
) + weight_rows(
    {
        "layers.*.attention.q + layers.*.attention.k + layers.*.attention.v": "transformer.h.*.attn.c_attn",
        "layers.*.attention.o": "transformer.h.*.attn.c_proj",
        "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
        "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
    },
    CONV1D,
)

_PHI3 = weight_rows(
    {
        "layers.*.attention.q + layers.*.attention.k + layers.*.attention.v": "model.layers.*.self_attn.qkv_proj",
        "layers.*.mlp.gate + layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj",
    },
    FUSED,
) + weight_rows(
    {
        "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
        "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    }
)

_PLAIN = _OUTER + _NORMS + _ATTENTION + _DENSE
ROWS: Mapping[str, tuple[WeightRow, ...]] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN + _ROUTED,
    "mixtral": _OUTER + _NORMS + _ATTENTION + _BLOCK_SPARSE,
    "deepseek_v3": _OUTER + _NORMS + _LATENT + _DENSE + _ROUTED + _SHARED,
    "gpt2": _GPT2,
    "phi3": _OUTER + _NORMS + _PHI3,
}

PREFIX = {"gpt2": "transformer."}
"""Prefix of the names of a model's body (default `model.`). Directories of a bare body lack it."""

IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Tables in older directories that follow from the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Tensors of ours and of theirs that hold the same numbers, with the sizes of both."""

    ours: dict[str, tuple[int, ...]]
    theirs: dict[str, tuple[int, ...]]
    transform: Transform


def bindings(
    shape: ModelShape, named: Sequence[WeightRow] | None = None, where: str = "a Hugging Face directory"
) -> list[Binding]:
    """Bind every tensor of a shape to those of its family's files, in the order of the forward pass.

    `named` has the names in another kind of file, which `where` describes. Raises HubError when a tensor has no name.
    """
    sizes = tensor_sizes(shape)
    rows = {row.ours[0]: row for row in (ROWS[shape.family] if named is None else named)}
    followers = {module for row in rows.values() for module in row.ours[1:]}
    bound = []
    for name in sizes:
        module, layer, leaf = _split_name(name)
        if module in followers:
            continue
        if module not in rows:
            raise HubError(f"{where} of family {shape.family} has no place for {name}")
        bound.append(_bind(rows[module], layer, leaf, sizes, shape))
    return bound


def tensor_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and size of every parameter except adapters, and of the routers' correction biases."""
    sizes = {}
    for parameter in parameters(shape.base):
        sizes[parameter.name] = parameter.shape
        if parameter.group == "router" and shape.moe is not None and shape.moe.correction_bias:
            sizes[parameter.name.removesuffix("weight") + "correction_bias"] = (shape.moe.experts,)
    return sizes


def _split_name(name: str) -> tuple[str, str, str]:
    """Split a name: layers.3.mlp.up.weight -> (layers.*.mlp.up, 3, .weight)."""
    leaf = next((leaf for leaf in (".weight", ".bias") if name.endswith(leaf)), "")
    match = re.match(r"layers\.(\d+)\.", name)
    layer = match.group(1) if match else ""
    module = name.removesuffix(leaf)
    return (module.replace(f"layers.{layer}.", "layers.*.", 1) if layer else module), layer, leaf


def _bind(row: WeightRow, layer: str, leaf: str, sizes: Mapping[str, tuple[int, ...]], shape: ModelShape) -> Binding:
    ours = {name: sizes[name] for name in (module.replace("*", layer) + leaf for module in row.ours)}
    # Sizes of theirs follow from the transform itself, on tensors without numbers.
    meta: list[Tensor] = [torch.empty(size, device="meta") for size in ours.values()]
    theirs = row.transform.export(meta, shape)
    pattern = row.theirs.replace("*", layer) + leaf
    names = [pattern.replace("@", str(expert)) for expert in range(len(theirs))]
    return Binding(
        ours=ours,
        theirs={name: tuple(tensor.shape) for name, tensor in zip(names, theirs, strict=True)},
        transform=row.transform,
    )
