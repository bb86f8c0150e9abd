"""Inventory: every parameter of a shape, with its logical dims and, per dim, the mesh axis that shards it.

Readers are the model (its parameters), the planner (bytes on a rank), the engine (slice of a rank), the checkpoint
(resharding) and the dry run (owner of a storage). Dim letters: docs/notation.md. Axis rule: `tp` splits heads, ffn
and vocab. `ep` splits experts. `""` = whole on every tp rank. ZeRO's cut of the rest follows `boxes.sharded_dim`.

Engine and planner also learn here which tp ranks hold the same part of a parameter (`tp_holders`), and which have only
a part of its gradient (`tp_parts`). `held.list_common` applies both to a rank. `Parameter.matrices` are those for Muon.

FLOP per token are counted here too, for the trainer's MFU and the planner. A multiply-add is 2 FLOP. Every weight
matrix except the input embedding meets each token once in the forward pass (2 FLOP per weight) and twice in the
backward pass, a frozen one once. Attention multiplies each query with every key that it may see, and the weights with
the values. Norms, activations and softmax (below 1 %) are omitted, as in every published MFU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeVar

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts

T = TypeVar("T")
HIDDEN = ("attention", "mlp", "expert")
"""Groups whose matrices lie between hidden states, which Muon orthogonalizes. An embedding and a head have a row per
token, a router one per expert: these rows are independent vectors, and AdamW updates them."""
PREDICTOR = "predictors."
"""Name prefix of the modules that predict further tokens. They follow the last layer."""
ADAPTER_DIM = "J"
"""Dim letter of the rank of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor: `shape[i]` elements along the dim with letter `dims[i]`, split by mesh axis `axes[i]`."""

    name: str
    dims: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    group: str
    """embedding, attention, mlp, router, expert, norm or head."""
    layer: int = -1
    """Layer, counted from 0. -1 = outside the layers."""
    inside: bool = False
    """Used within attention, an MLP or a mixture of experts. A tp rank there computes with its own heads, columns or
    experts only, or adds the bias for all."""
    trained: bool = True
    """It has a gradient and optimizer states. False = frozen, under adapters."""
    scheme: str = ""
    """Name in spec/model/quantization_schemes.py of a frozen matrix that is held as codes and scales. Empty = plain
    numbers."""
    adapts: str = ""
    """Name of the matrix that this part of an adapter belongs to. Empty = not an adapter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay applies: to matrices only."""
        return len(self.shape) > 1 and not self.name.endswith("_bias")

    @property
    def matrices(self) -> tuple[int, int, int] | None:
        """(number, rows, columns) of the matrices that Muon orthogonalizes one by one.

        These are the parameter itself, or each expert of a stack. None = not a hidden matrix, or a thin one of an
        adapter.
        """
        if self.group not in HIDDEN or len(self.shape) < 2 or self.adapts or self.name.endswith("_bias"):
            return None
        return prod(self.shape[:-2]), self.shape[-2], self.shape[-1]


@lru_cache(maxsize=64)
def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Return every parameter in forward order, adapters behind their matrices. A tied head is not listed again."""
    if shape.lora is None:
        return _parameters(shape)
    listed: list[Parameter] = []
    whole = shape.unbuilt.whole.split(",") if shape.unbuilt else ()
    for parameter in _parameters(shape.base):
        # Only hidden matrices are quantized: embeddings, head and routers stay plain numbers.
        codes = shape.lora.scheme is not None and parameter.matrices is not None
        listed.append(replace(parameter, trained=False, scheme=shape.lora.base if codes else ""))
        if parameter.inside and parameter.matrices is not None and shape.lora.adapts(parameter.name):
            listed += _adapter(parameter, shape.lora)
        if parameter.group in whole and parameter.decays:
            listed.append(replace(parameter, name=parameter.name.replace(".weight", ".whole.weight")))
        if parameter.group == "embedding" and shape.tied and "head" in whole:
            listed.append(replace(parameter, name="head.whole.weight", group="head"))
    return tuple(listed)


def _adapter(matrix: Parameter, lora: LoRAShape) -> Iterator[Parameter]:
    """Yield A, B and, with DoRA, the row lengths of the adapter of a matrix or of a stack of matrices.

    A is split like the inputs of the matrix and B like its outputs, so each rank's sum is its part of the whole.
    """
    (*stack, out, into), (*axes, by_out, by_in) = matrix.shape, matrix.axes
    *stacked, rows, columns = list(matrix.dims)
    prefix = adapter_prefix(matrix.name)
    sizes: list[tuple[str, list[str], list[int], list[str]]] = [
        ("a", [*stacked, ADAPTER_DIM, columns], [*stack, lora.rank, into], [*axes, "", by_in]),
        ("b", [*stacked, rows, ADAPTER_DIM], [*stack, out, lora.rank], [*axes, by_out, ""]),
    ]
    if lora.dora:
        sizes.append(("magnitude", [rows], [out], [by_out]))
    for name, dims, shape, split in sizes:
        yield replace(
            matrix, name=prefix + name, dims="".join(dims), shape=tuple(shape), axes=tuple(split), adapts=matrix.name
        )


def adapter_prefix(name: str) -> str:
    """Return the name prefix of an adapter's parts, on a layer's weight or a stack of experts."""
    return name.removesuffix(".weight") + (".lora." if name.endswith(".weight") else "_lora.")


def adapter_parts(name: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the parts a, b and magnitude of a matrix's adapter that exist among the tensors."""
    named = {part: adapter_prefix(name) + part for part in ("a", "b", "magnitude")}
    return {part: tensors[full] for part, full in named.items() if full in tensors}


def _parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    listed = list(_embedding(shape))
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        listed += _norm(shape, prefix + "attention_norm", layer)
        if shape.unbuilt is not None and shape.unbuilt.block_norms == 4:
            listed += [
                *_norm(shape, prefix + "attention_out_norm", layer),
                *_norm(shape, prefix + "mlp_out_norm", layer),
            ]
        attention = _linear_attention if shape.linear_of(layer) else _mla if shape.mla else _attention
        listed += attention(shape, prefix + "attention.", layer)
        listed += _norm(shape, prefix + "mlp_norm", layer)
        if shape.is_moe_layer(layer):
            listed += _moe(shape, prefix + "mlp.", layer)
        else:
            listed += _mlp(shape, prefix + "mlp.", layer, shape.ffn, shape.mlp_bias)
    listed += _norm(shape, "norm", -1)
    if not shape.tied:
        listed.append(_matrix("head.weight", "VD", (shape.vocab, shape.hidden), "V", "head", -1))
    # Each further token has a module like the last block, with norms and a projection in front.
    for number in range(shape.unbuilt.predicts if shape.unbuilt else 0):
        last, prefix = f"layers.{shape.layers - 1}.", f"{PREDICTOR}{number}."
        for name in ("hidden_norm", "embedding_norm", "norm"):
            listed += _norm(shape, prefix + name, -1)
        size = (shape.hidden, 2 * shape.hidden)
        listed += _linear(prefix + "projection", "DF", size, "", "attention", -1, False)
        block = [parameter for parameter in listed if parameter.layer == shape.layers - 1]
        listed += [replace(parameter, name=prefix + parameter.name.removeprefix(last), layer=-1) for parameter in block]
    return tuple(listed)


def num_parameters(shape: ModelShape) -> int:
    """Return N: all parameters, embeddings included, a tied head counted once."""
    return sum(p.numel for p in parameters(shape))


def num_active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that one token meets: of the routed experts only top_k."""
    if shape.moe is None:
        return num_parameters(shape)
    top_k, experts = shape.moe.top_k, shape.moe.experts
    return sum(p.numel // experts * top_k if p.group == "expert" else p.numel for p in parameters(shape))


def tp_holders(parameter: Parameter, shape: ModelShape, layout: Layout) -> int:
    """Return the number of neighbouring tp ranks that hold the same part of a parameter.

    These are all ranks if tp splits no dim, several if it splits heads that are fewer than the ranks, and otherwise
    one. Experts spread over ep are held once.
    """
    if layout.ep > 1 and "ep" in parameter.axes:
        return 1
    # The letter of the dim that tp splits decides: heads may be fewer than ranks, ffn and vocab never are.
    split = next((letter for letter, axis in zip(parameter.dims, parameter.axes, strict=True) if axis == "tp"), "")
    heads = {"": 1, "H": shape.heads, "K": shape.kv_heads}.get(split, layout.tp)
    return max(1, layout.tp // heads)


def tp_parts(parameter: Parameter, shape: ModelShape, layout: Layout) -> int:
    """Return the number of neighbouring tp ranks whose gradients must be summed. 1 = each rank's gradient is whole.

    Inside attention and MLP each holder has the part of its own heads or columns. Elsewhere (norms between the blocks,
    learned positions) all holders compute the same, unless sp gives each a slice of the sequence.
    """
    return tp_holders(parameter, shape, layout) if parameter.inside or layout.sp else 1


def _matrix(
    name: str, dims: str, sizes: tuple[int, ...], split: str, group: str, layer: int, inside: bool = False
) -> Parameter:
    """Return a matrix whose dim letters in `split` are split by tp. X (experts) is always split by ep."""
    axes = tuple("ep" if d == "X" else "tp" if d in split else "" for d in dims)
    return Parameter(name=name, dims=dims, shape=sizes, axes=axes, group=group, layer=layer, inside=inside)


def _linear(
    name: str, dims: str, sizes: tuple[int, int], split: str, group: str, layer: int, bias: bool
) -> Iterator[Parameter]:
    yield _matrix(name + ".weight", dims, sizes, split, group, layer, inside=True)
    if bias:
        yield _matrix(name + ".bias", dims[0], sizes[:1], split, group, layer, inside=True)


def _norm(shape: ModelShape, name: str, layer: int, size: int = 0, dim: str = "D") -> Iterator[Parameter]:
    yield _matrix(name + ".weight", dim, (size or shape.hidden,), "", "norm", layer)
    if shape.norm == "layernorm":
        yield _matrix(name + ".bias", dim, (size or shape.hidden,), "", "norm", layer)


def _embedding(shape: ModelShape) -> Iterator[Parameter]:
    yield _matrix("embed.weight", "VD", (shape.vocab, shape.hidden), "V", "embedding", -1)
    if shape.positions == "learned":
        yield _matrix("positions.weight", "SD", (shape.max_positions, shape.hidden), "", "embedding", -1)


def _attention(shape: ModelShape, prefix: str, layer: int) -> Iterator[Parameter]:
    """Yield the parameters of plain attention. H = query heads times head_dim, K = key heads times head_dim."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield from _linear(prefix + "q", "HD", (queries, shape.hidden), "H", "attention", layer, shape.qkv_bias)
    yield from _linear(prefix + "k", "KD", (keys, shape.hidden), "K", "attention", layer, shape.qkv_bias)
    yield from _linear(prefix + "v", "KD", (keys, shape.hidden), "K", "attention", layer, shape.qkv_bias)
    if shape.qk_norm:
        yield _matrix(prefix + "q_norm.weight", "E", (shape.head_dim,), "", "norm", layer, inside=True)
        yield _matrix(prefix + "k_norm.weight", "E", (shape.head_dim,), "", "norm", layer, inside=True)
    if shape.unbuilt is not None:
        yield from _unbuilt_attention(shape, shape.unbuilt, prefix, layer)
    yield from _linear(prefix + "o", "DH", (shape.hidden, queries), "H", "attention", layer, shape.out_bias)


def _unbuilt_attention(shape: ModelShape, parts: UnbuiltParts, prefix: str, layer: int) -> Iterator[Parameter]:
    if parts.qk_norm == "width":
        for name, letter, heads in (("q_norm", "H", shape.heads), ("k_norm", "K", shape.kv_heads)):
            size = (heads * shape.head_dim,)
            yield _matrix(f"{prefix}{name}.weight", letter, size, letter, "norm", layer, inside=True)
    if parts.gated_attention:
        wide = (shape.heads * shape.head_dim, shape.hidden)
        yield from _linear(prefix + "gate", "HD", wide, "H", "attention", layer, shape.qkv_bias)
    if parts.sinks:
        yield _matrix(prefix + "sinks", "H", (shape.heads,), "H", "attention", layer, inside=True)


def _linear_attention(shape: ModelShape, prefix: str, layer: int) -> Iterator[Parameter]:
    """Yield the parameters of linear attention.

    P = rows of query and key heads, U = those of value heads or of all channels, M = value heads. The gated delta rule
    follows transformers' Qwen3NextGatedDeltaNet, decay its MiniMaxLightningAttention with a norm over all heads.
    """
    linear = shape.linear_of(layer)
    assert linear is not None
    for name, letter, size in (("q", "P", linear.keys), ("k", "P", linear.keys), ("v", "U", linear.values)):
        yield from _linear(prefix + name, f"{letter}D", (size, shape.hidden), letter, "attention", layer, False)
    yield from _linear(prefix + "gate", "UD", (linear.values, shape.hidden), "U", "attention", layer, False)
    if linear.delta:
        for name in ("rate", "decay"):
            rates = (linear.value_heads, shape.hidden)
            yield from _linear(prefix + name, "MD", rates, "M", "attention", layer, False)
        for name in ("decay_log", "step_bias"):
            yield _matrix(prefix + name, "M", (linear.value_heads,), "M", "norm", layer, inside=True)
    if linear.taps:
        taps = (linear.channels, linear.taps)
        yield _matrix(prefix + "convolution.weight", "UE", taps, "U", "norm", layer, inside=True)
    width, letter = (linear.value_dim, "E") if linear.delta else (linear.values, "U")
    yield _matrix(prefix + "norm.weight", letter, (width,), "U", "norm", layer, inside=True)
    yield from _linear(prefix + "o", "DU", (shape.hidden, linear.values), "U", "attention", layer, False)


def _mla(shape: ModelShape, prefix: str, layer: int) -> Iterator[Parameter]:
    """Yield the parameters of latent attention. Up-projections are split by head, down-projections (R, C) are whole."""
    mla = shape.mla
    assert mla is not None
    queries = shape.heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank:
        yield from _linear(prefix + "q_down", "RD", (mla.q_rank, shape.hidden), "", "attention", layer, shape.qkv_bias)
        yield _matrix(prefix + "q_norm.weight", "R", (mla.q_rank,), "", "norm", layer, inside=True)
        yield from _linear(prefix + "q_up", "HR", (queries, mla.q_rank), "H", "attention", layer, False)
    else:
        yield from _linear(prefix + "q", "HD", (queries, shape.hidden), "H", "attention", layer, False)
    down = mla.kv_rank + mla.rope_dim
    yield from _linear(prefix + "kv_down", "CD", (down, shape.hidden), "", "attention", layer, shape.qkv_bias)
    yield _matrix(prefix + "kv_norm.weight", "C", (mla.kv_rank,), "", "norm", layer, inside=True)
    up = shape.heads * (mla.nope_dim + mla.v_dim)
    yield from _linear(prefix + "kv_up", "HC", (up, mla.kv_rank), "H", "attention", layer, False)
    values = shape.heads * mla.v_dim
    yield from _linear(prefix + "o", "DH", (shape.hidden, values), "H", "attention", layer, shape.out_bias)


def _mlp(shape: ModelShape, prefix: str, layer: int, ffn: int, bias: bool) -> Iterator[Parameter]:
    if shape.mlp == "swiglu":
        yield from _linear(prefix + "gate", "FD", (ffn, shape.hidden), "F", "mlp", layer, bias)
    yield from _linear(prefix + "up", "FD", (ffn, shape.hidden), "F", "mlp", layer, bias)
    yield from _linear(prefix + "down", "DF", (shape.hidden, ffn), "F", "mlp", layer, bias)


def _moe(shape: ModelShape, prefix: str, layer: int) -> Iterator[Parameter]:
    """Yield router and experts, which are stacked along X. Each expert is (out, in), as for F.linear."""
    moe = shape.moe
    assert moe is not None
    yield Parameter(  # whole on every rank: tokens choose among all experts
        name=prefix + "router.weight",
        dims="XD",
        shape=(moe.experts, shape.hidden),
        axes=("", ""),
        group="router",
        layer=layer,
        inside=True,
    )
    inner = (moe.experts, moe.ffn, shape.hidden)
    if shape.mlp == "swiglu":
        yield _matrix(prefix + "experts.gate", "XFD", inner, "F", "expert", layer, inside=True)
    yield _matrix(prefix + "experts.up", "XFD", inner, "F", "expert", layer, inside=True)
    outer = (moe.experts, shape.hidden, moe.ffn)
    yield _matrix(prefix + "experts.down", "XDF", outer, "F", "expert", layer, inside=True)
    parts = shape.unbuilt
    if parts is not None and parts.router_bias:
        yield _matrix(prefix + "router.bias", "E", (moe.experts,), "", "router", layer, inside=True)
    if parts is not None and parts.expert_bias:
        for name in ("gate", "up") if shape.mlp == "swiglu" else ("up",):
            yield _matrix(f"{prefix}experts.{name}_bias", "XF", inner[:2], "F", "expert", layer, inside=True)
        yield _matrix(prefix + "experts.down_bias", "XD", outer[:2], "", "expert", layer, inside=True)
    if parts is not None and parts.shared_gate:
        yield _matrix(prefix + "shared_gate.weight", "ED", (1, shape.hidden), "", "router", layer, inside=True)
    if moe.shared_experts:
        yield from _mlp(shape, prefix + "shared.", layer, moe.shared_experts * moe.ffn, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlop:
    """FLOP of one token in the forward pass. Training takes three times as much, minus frozen weights' gradients."""

    layers: float
    """Matrix products inside the layers."""
    head: float
    """Product with the head."""
    attention: float
    """Products of queries with keys and of weights with values."""
    frozen: float = 0.0
    """Part of `layers` and `head` whose weights are not trained."""

    @property
    def forward(self) -> float:
        """The whole forward pass."""
        return self.layers + self.head + self.attention

    @property
    def training(self) -> float:
        """Forward and backward pass without recomputation, as MFU counts."""
        return 3 * self.forward - self.frozen

    def hardware(self, recompute: str, share: float = 1.0) -> float:
        """Return the FLOP with recomputation, as HFU counts.

        Policy full repeats the layers and selective the attention core. `share` is the share of layers that recompute.
        """
        layers = self.layers if recompute in ("full", "all-but-attention") else 0.0
        return self.training + share * (layers + (self.attention if recompute in ("full", "selective") else 0.0))


def token_flop(shape: ModelShape, sequence: int, *, causal: bool) -> TokenFlop:
    """Return the FLOP per token at a sequence length.

    With `causal` only the visible keys count (half of them on average), else all. Of routed experts only top_k count.
    Conventions of other tools: docs/notation.md.
    """
    share = shape.moe.top_k / shape.moe.experts if shape.moe else 1.0
    head = 2.0 * shape.vocab * shape.hidden
    layers, frozen = 0.0, head if shape.lora else 0.0
    # Matrices alone: biases and norms have no products.
    for parameter in parameters(shape):
        if parameter.layer >= 0 and parameter.decays:
            product = 2 * parameter.numel * (share if parameter.group == "expert" else 1.0)
            layers += product
            frozen += 0.0 if parameter.trained else product
    attention = sum(_attention_flop(shape, layer, sequence, causal) for layer in range(shape.layers))
    return TokenFlop(layers=layers, head=head, attention=attention, frozen=frozen)


def _attention_flop(shape: ModelShape, layer: int, sequence: int, causal: bool) -> float:
    """Return 2 H (E_qk + E_v) per visible key, with S keys in full attention.

    Causal attention sees S/2 (rounded from (S + 1)/2), fewer with a window. Linear attention counts the products of its
    chunks, at any length.
    """
    linear = shape.linear_of(layer)
    if linear is not None:
        return linear.token_flop
    widths = shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim if shape.mla else 2 * shape.head_dim
    keys = float(sequence)
    if causal:
        window = shape.window_of(layer)
        keys = sequence / 2 if not window or window >= sequence else window - window * window / (2 * sequence)
    return 2.0 * shape.heads * widths * keys
