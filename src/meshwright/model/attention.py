"""Self-attention: grouped-query (MHA and MQA are its extremes) and multi-head latent, and the cache of its past.

Positions are rotary. With keys and values of past tokens in a cache, a new token costs one token's work.
Letters: B batch, S sequence, D hidden, H query heads, K key heads, E head_dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.compat import is_hooked
from meshwright.kernels import Kernels
from meshwright.kernels.attention.attend import Mask
from meshwright.kernels.linear.linear import product_dtype
from meshwright.kernels.norm.dropout import AttentionDropout, TokenKeys
from meshwright.model.layers import Linear, RMSNorm, call, held_rows, is_plain, read, write
from meshwright.model.seams import Seams
from meshwright.spec.model.shape import ModelShape, RopeScaling, temperature

Norms = tuple[Tensor, Tensor, float]
"""Norms of queries and keys: the weights (E,) of each, and the epsilon."""


class Past(Protocol):
    """Past of one layer. It runs attention over itself, so its memory format is private."""

    @property
    def low_rank(self) -> bool:
        """True if latent attention stores its low rank here, as one key head that all query heads share."""

    @property
    def length(self) -> int:
        """Number of positions stored."""

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Norm and rotate q and k (B, S, heads, E) in place, and store k and v ahead of `attend`.

        Returns False if the caller must do so itself. `norms`: weights (E,) of the norms of q and k, and their epsilon.
        """

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Store k and v of S new positions and attend with q (B, S, H, E) over all so far. Returns (B, S, H, V)."""

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""


class LayerCache:
    """Past keys and values of one layer, (B, T, K, E), in buffers that double when full."""

    low_rank = False

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Return False: the caller rotates."""
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Store k and v and call the kernel `attend` over all positions."""
        return attend(q, *self.extend(k, v), mask, scale=scale)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append S new positions and return all keys and values so far."""
        end = self.length + keys.shape[1]
        self._keys = self._put(self._keys, keys, end)
        self._values = self._put(self._values, values, end)
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""
        self._keys = None if self._keys is None else self._keys[rows]
        self._values = None if self._values is None else self._values[rows]

    def _put(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is None or buffer.shape[1] < end:
            # Doubling makes the copies of all growth together cost no more than one copy of the end.
            grown = torch.empty(new.shape[0], max(64, 2 * end), *new.shape[2:], dtype=new.dtype, device=new.device)
            if buffer is not None:
                grown[:, : self.length] = buffer[:, : self.length]
            buffer = grown
        buffer[:, self.length : end] = new
        return buffer


class Cache:
    """Past of every layer, by default as LayerCache."""

    def __init__(self, layers: int, make: Callable[[], Past] = LayerCache) -> None:
        self.layers: Sequence[Past] = [make() for _ in range(layers)]

    @property
    def length(self) -> int:
        """Number of positions stored."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""
        for layer in self.layers:
            layer.select(rows)


def frequencies(shape: ModelShape) -> Tensor:
    """Return the angle per position of each pair (E/2,) fp32: theta^(-2i/E), stretched as the shape says."""
    half = torch.arange(0, shape.rope_dim, 2, dtype=torch.int64).float() / shape.rope_dim
    plain = 1.0 / (shape.rope_theta**half)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, shape)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide frequencies of waves longer than original/low, keep those shorter than original/high, and blend."""
    wave = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((scaling.original_positions / wave - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, scaling: RopeScaling, shape: ModelShape) -> Tensor:
    """Keep pairs that turn over beta_fast times in the original length, divide those that turn under beta_slow."""

    def pair_of(turns: float) -> float:
        return (
            shape.rope_dim
            * math.log(scaling.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(shape.rope_theta))
        )

    # Pairs between the two bounds are blended linearly.
    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), shape.rope_dim - 1)
    ramp = ((torch.arange(shape.rope_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def table_factor(shape: ModelShape) -> float:
    """Return the factor of cos and sin. It is 1 except for YaRN."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)
    return temperature(scaling.factor, 1.0)


def softmax_factor(shape: ModelShape) -> float:
    """Return the factor of the softmax scale: DeepSeek's mscale_all_dim, squared. It is 1 elsewhere."""
    scaling = shape.rope_scaling
    if shape.mla is None or scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def tables(inverse: Tensor, positions: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions (B or 1, S), both (B or 1, S, 1, E/2) fp32."""
    angles = (positions.float().unsqueeze(-1) * inverse).unsqueeze(2)
    return angles.cos() * factor, angles.sin() * factor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions as the layers need them: the mask and the rotary tables (None with learned positions).

    `padding` (B, S) marks padding for the balance loss of experts. None = there is none.
    """

    mask: Mask
    cos: Tensor | None = None
    sin: Tensor | None = None
    padding: Tensor | None = None
    keys: TokenKeys | None = None
    """Keys of dropout, in training with dropout."""

    def of_layer(self, name: str) -> "AttentionMetadata":
        """Return the metadata for a layer, whose masks of dropout differ from those of others."""
        return replace(self, keys=self.keys and self.keys.of_layer(name))

    @property
    def token_keys(self) -> Tensor | None:
        """Keys (B, S) of the positions that matrices with adapters read."""
        return None if self.keys is None else self.keys.tokens


class AttentionBase(nn.Module):
    """Common end of both kinds: attention of queries over keys and values, and the output product."""

    o: Linear
    scale: float

    def __init__(self, shape: ModelShape, kernels: Kernels, seams: Seams, dropout: float) -> None:
        super().__init__()
        self.shape, self.kernels, self.seams, self.dropout = shape, kernels, seams, dropout

    def attended(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, cache: Past | None) -> Tensor:
        """Map q (B, S, H, E), and k and v of the same positions, to (B, S, D)."""
        out = self.over_past(q, k, v, metadata, cache).flatten(2)
        return write(self.seams.dense, out, self.o, metadata.keys and metadata.keys.tokens)

    def over_past(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, cache: Past | None) -> Tensor:
        """Attend like `attended`, without the output product. Returns (B, S, H, width of values)."""
        attend = self.seams.attend or self.kernels.attend
        if cache is not None:
            return cache.attend(attend, q, k, v, metadata.mask, scale=self.scale)
        if not self.dropout or not self.training:
            return attend(q, k, v, metadata.mask, scale=self.scale)
        assert metadata.token_keys is not None, "a model in training makes its keys of dropout"
        heads = q.shape[2]
        drops = AttentionDropout.make(metadata.token_keys, self.dropout, heads, self.seams.tp_index * heads)
        return attend(q, k, v, metadata.mask, scale=self.scale, dropout=drops)


class Attention(AttentionBase):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, shape: ModelShape, kernels: Kernels, seams: Seams, dropout: float) -> None:
        super().__init__(shape, kernels, seams, dropout)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Linear(shape.hidden, queries, kernels, shape.qkv_bias)
        self.k = Linear(shape.hidden, keys, kernels, shape.qkv_bias)
        self.v = Linear(shape.hidden, keys, kernels, shape.qkv_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, kernels)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, kernels)
        self.o = Linear(queries, shape.hidden, kernels, shape.out_bias)
        self.scale = shape.head_dim**-0.5

    @property
    def held_key_heads(self) -> int:
        """Number of key heads held here: all, or those of a part of the model."""
        width = self.shape.head_dim
        return held_rows(self.k, self.shape.kv_heads * width) // width

    def forward(self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None) -> Tensor:
        """Map x (B, S, D) to (B, S, D)."""
        parts = read(self.seams.dense, x, self.q, self.k, self.v, keys=metadata.keys and metadata.keys.tokens)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in parts)
        # A cache of a serving engine may norm, rotate and store in one kernel.
        if cache is None or not self._turned_by(cache, q, k, v, metadata):
            if self.shape.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            if metadata.cos is not None:
                q, k = self.kernels.rotate_pair(q, k, metadata.cos, metadata.sin, self.shape.rope_interleaved)
        return self.attended(q, k, v, metadata, cache)

    def _turned_by(self, cache: Past, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> bool:
        """Return True if the cache normed and rotated q and k in place, in one pass with storing k and v."""
        if metadata.cos is None or metadata.sin is None:
            return False
        norms = None
        if self.shape.qk_norm:
            # A hook must see its norm called, so the fused pass is not for hooked norms.
            if is_hooked(self.q_norm) or is_hooked(self.k_norm):
                return False
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return cache.turn(q, k, v, metadata.cos, metadata.sin, interleaved=self.shape.rope_interleaved, norms=norms)


class LatentAttention(AttentionBase):
    """Multi-head latent attention: keys and values of all heads from one low-rank vector, and one rotary key."""

    def __init__(self, shape: ModelShape, kernels: Kernels, seams: Seams, dropout: float) -> None:
        super().__init__(shape, kernels, seams, dropout)
        assert shape.mla is not None
        mla = self.mla = shape.mla
        queries = shape.heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank:
            self.q_down = Linear(shape.hidden, mla.q_rank, kernels, shape.qkv_bias)
            self.q_norm = RMSNorm(mla.q_rank, 1e-6, kernels)
            self.q_up = Linear(mla.q_rank, queries, kernels)
        else:
            self.q = Linear(shape.hidden, queries, kernels)
        self.kv_down = Linear(shape.hidden, mla.kv_rank + mla.rope_dim, kernels, shape.qkv_bias)
        self.kv_norm = RMSNorm(mla.kv_rank, 1e-6, kernels)
        self.kv_up = Linear(mla.kv_rank, shape.heads * (mla.nope_dim + mla.v_dim), kernels)
        self.o = Linear(shape.heads * mla.v_dim, shape.hidden, kernels, shape.out_bias)
        self.scale = (mla.nope_dim + mla.rope_dim) ** -0.5 * softmax_factor(shape)

    def forward(self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None) -> Tensor:
        """Map x (B, S, D) to (B, S, D)."""
        mla = self.mla
        keys = metadata.keys and metadata.keys.tokens
        q, low = read(self.seams.dense, x, self.q_down if mla.q_rank else self.q, self.kv_down, keys=keys)
        q = call(self.q_up, self.q_norm(q), keys) if mla.q_rank else q
        q = q.unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        q_nope, q_rope = q.split((mla.nope_dim, mla.rope_dim), dim=-1)
        latent, k_rope = low.split((mla.kv_rank, mla.rope_dim), dim=-1)
        low = self.kv_norm(latent)
        # A cache of the low rank is smaller than one of keys and values, which are then never made.
        over_low = cache is not None and cache.low_rank
        kv = low if over_low else call(self.kv_up, low, keys)
        pair = (q_rope, k_rope.unsqueeze(2))
        # Not in place: both are views of tensors that the backward pass reads.
        q_rope, k_rope = self.kernels.rotate_pair(
            *pair, metadata.cos, metadata.sin, self.shape.rope_interleaved, in_place=False
        )
        if cache is not None and over_low:
            return self.attended_low((q_nope, q_rope), (low.unsqueeze(2), k_rope), metadata, cache)
        k_nope, v = kv.unflatten(-1, (-1, mla.nope_dim + mla.v_dim)).split((mla.nope_dim, mla.v_dim), dim=-1)
        # One rotary key serves all heads, so it is repeated for each.
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        return self.attended(q, k, v, metadata, cache)

    @property
    def held_key_heads(self) -> int:
        """Number of key heads held here, where keys and values of every head are cached."""
        width = self.mla.nope_dim + self.mla.v_dim
        return held_rows(self.kv_up, self.shape.heads * width) // width

    @property
    def folds_keys(self) -> bool:
        """True if the matrix of keys and values may be multiplied into queries and outputs."""
        return is_plain(self.kv_up)

    def attended_low(
        self, q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], metadata: AttentionMetadata, cache: Past
    ) -> Tensor:
        """Attend over the low rank (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Returns (B, S, D).

        With c the low rank of a position, q (W_k c) = (W_k^T q) c, and sums of W_v c are W_v times sums of c.

        Args:
            q: Queries without and with rotation, (B, S, H, width) each.
            k: Low rank and rotary key, (B, S, 1, width) each.
        """
        mla = self.mla
        # Folded into queries and outputs, the matrix is never multiplied with each cached position.
        matrix = self.kv_up.weight.view(-1, mla.nope_dim + mla.v_dim, mla.kv_rank)
        key_matrix, value_matrix = matrix.split((mla.nope_dim, mla.v_dim), dim=1)
        low = _folded("bshn,hnr->bshr", q[0], key_matrix)
        keys = torch.cat(k, dim=-1)
        summed = self.over_past(torch.cat((low, q[1]), dim=-1), keys, keys[..., : mla.kv_rank], metadata, cache)
        out = _folded("bshr,hvr->bshv", summed, value_matrix)
        return write(self.seams.dense, out.flatten(2), self.o)


def _folded(equation: str, x: Tensor, matrices: Tensor) -> Tensor:
    dtype = product_dtype(x)
    return torch.einsum(equation, x.to(dtype), matrices.to(dtype)).to(x.dtype)
