"""Attention over a part of the keys at a time, when not all of them are here at once.

Each part gives a result and the log-sum-exp of its scores. From both, in fp32, follows the softmax over all parts
(Milakov and Gimelshein 2018, arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889). The backward pass recomputes the
weights of a part from the log-sum-exp over all, so parts come in any order and none is saved.

Letters: B batch, S queries, T keys of a part, H query heads, K key heads, E and V widths. Heads come before positions
here, the order that products want: q (B, H, S, E), k (B, K, T, E), v (B, K, T, V).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c import sequence_attention, training_rows
from meshwright.kernels.chooser import device_kind, simulated_kind, uses_triton
from meshwright.kernels.linear.linear import needs_wide
from meshwright.kernels.norm.dropout import AttentionDropout, keep_mask

ROWS = 64
"""Queries of a tile of the plain form; see kernels/attention/blockwise.py."""
COLUMNS = 2048
"""Keys of a tile of the plain form: bounds its memory. From 256 to all keys the time is equal within noise."""
WIDEST = 256
"""Widest head that fused GPU kernels take."""
LEAST_PAIRS = 64 * 64
"""Queries times keys of a tile from which on the compiled loops pay: forward and backward 0.77 of the time of torch's
kernel at 64 x 64, 0.54 at 128 x 128 (AMD EPYC with AVX512-BF16, fp32, heads of 64)."""
LOWEST = -1e30
"""Maximum of a row that sees nothing.

exp(-inf - LOWEST) is 0, where exp(-inf + inf) is not a number.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries, and the keys that they see: all of a slice except the hidden ones.

    Attributes:
        rows: Rows of the batch. The plain form takes them all.
        hidden: Pairs of a slice of the tile's keys and a mask over it, bool (R, C) or (B or 1, R, C).
        left: Of T keys, query i of S sees those from i + T - S - left. -1 = no border.
        right: And those up to i + T - S + right. -1 = no border.
    """

    queries: slice
    keys: slice
    rows: slice = field(default_factory=lambda: slice(None))
    hidden: tuple[tuple[slice, Tensor], ...] = ()
    left: int = -1
    right: int = -1

    @property
    def is_causal(self) -> bool:
        """True for as many keys as queries, of which query i sees the first i + 1."""
        return self.left < 0 and self.right == 0 and self.keys.stop - self.keys.start == _length(self.queries)

    @property
    def is_whole(self) -> bool:
        """True where all queries see all keys."""
        return self.left < 0 and self.right < 0

    @property
    def past(self) -> int:
        """Number of keys beyond its own position that the first query sees, of a causal or a whole tile."""
        return 0 if self.is_causal else self.keys.stop - self.keys.start

    def bias(self, like: Tensor) -> Tensor | None:
        """Return (S, T) in the dtype of `like`, -inf where hidden. None where a kernel needs no mask."""
        if self.is_whole or self.is_causal:
            return None
        keys = self.keys.stop - self.keys.start
        seen = torch.ones(_length(self.queries), keys, dtype=torch.bool, device=like.device)
        shift = keys - len(seen)
        seen = seen if self.right < 0 else seen.tril_(shift + self.right)
        seen = seen if self.left < 0 else seen.triu_(shift - self.left)
        return like.new_zeros(()).where(seen, float("-inf"))


def _length(positions: slice) -> int:
    return int(positions.stop - positions.start)


def can_fuse(q: Tensor, k: Tensor) -> bool:
    """Return whether a fused kernel takes q (B, S, H, E) and k (B, T, K, E).

    On a CPU it takes 3 to 30 % less time than the plain form (AVX2, 64 to 8192 positions). On a GPU it needs 16-bit
    tensors and heads of up to 256.
    """
    if not compat.has_flash_attention(device_kind(q)):
        return False
    if device_kind(q) == "cpu":
        return True
    if simulated_kind():
        return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= WIDEST
    fuses: bool = _device_fuses(q.device, q.dtype, fused_width(q.shape[-1]), q.shape[2] != k.shape[2])
    return fuses


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def _device_fuses(device: torch.device, dtype: torch.dtype, width: int, grouped: bool) -> bool:
    """Return whether a GPU's flash kernel takes such heads. torch is asked once, with a few numbers.

    The compiler cannot trace the question. With it inside, a block with documents was compiled in two halves, which
    saved what a whole block recomputes.
    """
    return _cached_device_fuses(device, dtype, width, grouped)


@cache
def _cached_device_fuses(device: torch.device, dtype: torch.dtype, width: int, grouped: bool) -> bool:
    # torch looks at sizes and dtype alone, so the smallest tensors of the kind do.
    q = torch.empty(1, 1 + grouped, 1, width, dtype=dtype, device=device)
    k = q[:, :1]
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, grouped)
    return bool(torch.backends.cuda.can_use_flash_attention(params))


class PartialAttention:
    """softmax(q k^T * scale) v over keys that are added part by part."""

    def __init__(
        self, q: Tensor, value_width: int, *, scale: float, fused: bool, dropout: AttentionDropout | None = None
    ) -> None:
        """Take q (B, S, H, E). Only the plain form has dropout."""
        self.dropout = dropout
        self.dtype, self.fused, self.scale, self.value_width = q.dtype, fused, scale, value_width
        self.q = _queries(q, value_width, scale, fused)
        self.out = q.new_zeros(*self.q.shape[:3], value_width, dtype=torch.float32)
        self.lse = q.new_full(self.q.shape[:3], float("-inf"), dtype=torch.float32)

    def add(self, k: Tensor, v: Tensor, tiles: Iterable[Tile], columns: Tensor | None = None) -> None:
        """Attend over a part, k (B, K, T, E) and v (B, K, T, V). `columns` (T,) are the part's keys for dropout."""
        k, v = _keys(k, self.q, self.fused), _keys(v, self.q, self.fused)
        for tile in tiles:
            keys, values = k[tile.rows, :, tile.keys], v[tile.rows, :, tile.keys]
            q, out, lse = (x[tile.rows, :, tile.queries] for x in (self.q, self.out, self.lse))
            # A fused kernel divides by its own sum already, so its shift is its log-sum-exp.
            if self.fused:
                part, part_lse = _attended(q, keys, values, tile, self.scale)
                _merge(out, lse, part[..., : self.value_width], part_lse, part_lse)
            else:
                mask = _mask_of_tile(self.dropout, columns, tile, k.shape[1])
                _merge(out, lse, *_part(q, keys, values, tile, mask))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (B, S, H, V) in the dtype of q, and the log-sum-exp (B, H, S) fp32."""
        if self.dropout is not None:
            self.out.mul_(self.dropout.growth)
        return self.out.to(self.dtype).transpose(1, 2).contiguous(), self.lse


class PartialGradients:
    """Backward pass of PartialAttention: the same parts again, in any order."""

    def __init__(
        self, q: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, *, scale: float, fused: bool,
        dropout: AttentionDropout | None = None,
    ) -> None:  # fmt: skip
        """Take q (B, S, H, E), out and its gradient (B, S, H, V), and lse (B, H, S)."""
        self.dropout = dropout
        self.dtype, self.width, self.fused, self.scale, self.lse = q.dtype, q.shape[-1], fused, scale, lse
        self.q = _queries(q, out.shape[-1], scale, fused)
        self.gradient = _keys(gradient.transpose(1, 2), self.q, fused).contiguous()
        self.q_gradient = torch.zeros_like(self.q, dtype=torch.float32)
        if fused:
            self.out = _keys(out.transpose(1, 2), self.q, fused).contiguous()
        else:
            # Gradient times result stands for the sum over all keys, so parts need not know each other.
            self.inner = (gradient.float() * out.float()).sum(-1).transpose(1, 2)
        if dropout is not None:
            self.gradient = self.gradient * dropout.growth

    def add(
        self, k: Tensor, v: Tensor, tiles: Iterable[Tile], k_gradient: Tensor, v_gradient: Tensor,
        columns: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add to the fp32 gradients of k (B, K, T, E) and v (B, K, T, V), in place, and to that of q."""
        keys, values = _keys(k, self.q, self.fused), _keys(v, self.q, self.fused)
        for tile in tiles:
            arguments = keys[tile.rows, :, tile.keys], values[tile.rows, :, tile.keys], tile, k_gradient, v_gradient
            if self.fused:
                self._fused_tile(*arguments)
            else:
                self._plain_tile(*arguments, _mask_of_tile(self.dropout, columns, tile, k.shape[1]))

    def result(self) -> Tensor:
        """Return the gradient of q (B, S, H, E)."""
        return self.q_gradient[..., : self.width].transpose(1, 2).to(self.dtype)

    def _fused_tile(self, k: Tensor, v: Tensor, tile: Tile, k_gradient: Tensor, v_gradient: Tensor) -> None:
        q, out, gradient = (x[tile.rows, :, tile.queries] for x in (self.q, self.out, self.gradient))
        lse = self.lse[tile.rows, :, tile.queries].contiguous()
        of_q, of_k, of_v = _gradients(gradient, q, k, v, out, lse, tile, self.scale)
        self.q_gradient[tile.rows, :, tile.queries] += of_q
        k_gradient[tile.rows, :, tile.keys] += of_k[..., : k_gradient.shape[-1]]
        v_gradient[tile.rows, :, tile.keys] += of_v[..., : v_gradient.shape[-1]]

    def _plain_tile(
        self, k: Tensor, v: Tensor, tile: Tile, k_gradient: Tensor, v_gradient: Tensor, mask: Tensor | None
    ) -> None:
        heads = k.shape[1]
        q, gradient = (_flat(x[:, :, tile.queries], heads) for x in (self.q, self.gradient))
        lse, inner = (_flat(x[:, :, tile.queries].unsqueeze(-1), heads) for x in (self.lse, self.inner))
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        # By the log-sum-exp over all parts: these are shares of the whole softmax.
        weights = _scores(q, k, self.q.shape[:2], tile).sub_(lse).exp_()
        dropped_weights = weights if mask is None else weights * mask
        v_gradient[:, :, tile.keys] += torch.bmm(dropped_weights.mT, gradient).view_as(v_gradient[:, :, tile.keys])
        weight_gradient = torch.bmm(gradient, v.mT)
        if mask is not None:
            weight_gradient.mul_(mask)
        score_gradient = weight_gradient.sub_(inner).mul_(weights)
        k_gradient[:, :, tile.keys] += torch.bmm(score_gradient.mT, q).view_as(k_gradient[:, :, tile.keys])
        q_gradient = self.q_gradient[:, :, tile.queries]
        q_gradient.add_(torch.bmm(score_gradient, k).view(q_gradient.shape), alpha=self.scale)


def _attended(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Return result (B, H, S, E) and log-sum-exp (B, H, S) of the fused kernel. A GPU's takes borders as numbers."""
    if _loops_take(q, k, v, tile):
        rows, (q, k, v) = _rows(q), _position_first(q, k, v)
        out, lse = sequence_attention.attend(q, k, v, rows, window=0, scale=scale, past=tile.past)
        return out.transpose(1, 2), lse
    if device_kind(q) != "cpu" and not (tile.is_whole or tile.is_causal):
        return compat.banded_attention(q, k, v, left=tile.left, right=tile.right, scale=scale)
    return compat.flash_attention(q, k, v, mask=tile.bias(q), causal=tile.is_causal, scale=scale, device=device_kind(q))


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, by the same kernel."""
    tensors = gradient, q, k, v, out, lse
    if _loops_take(q, k, v, tile):
        rows, (gradient, q, k, v, out) = _rows(q), _position_first(gradient, q, k, v, out)
        gradients = sequence_attention.gradients(
            gradient, q, k, v, out, lse, rows, window=0, scale=scale, past=tile.past
        )
        of_q, of_k, of_v = _position_first(*gradients)
        return of_q, of_k, of_v
    if device_kind(q) != "cpu" and not (tile.is_whole or tile.is_causal):
        return compat.banded_attention_backward(*tensors, left=tile.left, right=tile.right, scale=scale)
    return compat.flash_attention_backward(
        *tensors, mask=tile.bias(q), causal=tile.is_causal, scale=scale, device=device_kind(q)
    )


def _loops_take(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> bool:
    """Return whether the compiled loops attend a tile: half to a third of the time of torch's kernel on a CPU."""
    if device_kind(q) != "cpu" or not (tile.is_whole or tile.is_causal) or q.shape[2] * k.shape[2] < LEAST_PAIRS:
        return False
    q, k, v = _position_first(q, k, v)
    # The library is asked last: the first answer on a machine starts the C compiler.
    return sequence_attention.takes_parts(q, k, v) and training_rows.is_compiled()


def _position_first(*tensors: Tensor) -> list[Tensor]:
    """Swap heads and positions, as the loops take them."""
    return [x.transpose(1, 2) for x in tensors]


def _rows(q: Tensor) -> sequence_attention.Documents:
    """Return one document for all rows of q (B, H, S, E)."""
    return [(slice(0, len(q)), 0, q.shape[2])]


def _queries(q: Tensor, value_width: int, scale: float, fused: bool) -> Tensor:
    """Transpose queries (B, S, H, E) to (B, H, S, E).

    The plain form gets them scaled and in fp32. The fused one needs queries, keys and values of one width: all are
    padded with zeros to the widest, which changes nothing.
    """
    q = q.transpose(1, 2)
    if not fused:
        return (q.float() * scale).contiguous()
    return padded(_wide(q), fused_width(max(q.shape[-1], value_width))).contiguous()


def _keys(x: Tensor, q: Tensor, fused: bool) -> Tensor:
    """Convert keys, values or gradients to the fused form's width, or to fp32."""
    return padded(_wide(x), q.shape[-1]) if fused else x.float()


def _wide(x: Tensor) -> Tensor:
    return x.float() if needs_wide(x) else x


def fused_width(width: int) -> int:
    """Round a width up to rows of 16 bytes, which GPU kernels read."""
    return -(-width // 8) * 8


def padded(x: Tensor, width: int) -> Tensor:
    """Pad x (..., E) with zeros to `width`, which changes no product."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _flat(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, H, R, E) to (B K, H / K R, E): query heads that share a key head are one product."""
    return x.reshape(x.shape[0] * heads, -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, outer: torch.Size, tile: Tile) -> Tensor:
    """Return q (B K, G R, E) k^T, -inf where hidden. `outer` = (B, H)."""
    scores = torch.bmm(q, k.mT)
    view = scores.view(*outer, -1, k.shape[1])
    for columns, hidden in tile.hidden:
        hidden = hidden if hidden.dim() == 2 else hidden.unsqueeze(1)
        view[..., columns].masked_fill_(hidden, float("-inf"))
    return scores


def _mask_of_tile(dropout: AttentionDropout | None, columns: Tensor | None, tile: Tile, keys: int) -> Tensor | None:
    """Return which weights (B K, G R, T) of a tile stay, bool. None without dropout."""
    if dropout is None or columns is None:
        return None
    rows = dropout.rows[:, tile.queries].transpose(1, 2)
    return keep_mask(_flat(rows.unsqueeze(-1), keys).squeeze(-1), columns[tile.keys], dropout.rate)


def _part(q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Attend q (B, H, R, E) over a part. `mask` (B K, H / K R, T) are the weights that stay.

    Returns sum of exp(scores - shift) v (B, H, R, V), the log-sum-exp and the shift (B, H, R).
    """
    scores = _scores(_flat(q, k.shape[1]), k.flatten(0, 1), q.shape[:2], tile)
    shift = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
    weights = scores.sub_(shift).exp_()
    lse = weights.sum(-1, keepdim=True).log_().add_(shift)
    if mask is not None:  # the softmax still divides by the sum of all weights
        weights.mul_(mask)
    part = torch.bmm(weights, v.flatten(0, 1))
    return part.view(*q.shape[:3], -1), lse.view(q.shape[:3]), shift.view(q.shape[:3])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, shift: Tensor) -> None:
    """Merge a part into the result so far, in place.

    The part is still to be divided by exp(part_lse - shift) for its own softmax. The factor that merging needs anyway
    does that. A query that has seen nothing yet has 0 and -inf, and keeps them where it sees nothing of the part.
    """
    if uses_triton("merge", out):
        from meshwright.kernels.triton import flash

        return flash.merge(out, lse, part, part_lse, shift)
    both = torch.logaddexp(lse, part_lse)
    # A query that has seen nothing has -inf twice, whose difference would be NaN.
    base = both.clamp(min=LOWEST)
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(part, (shift - base).exp_().unsqueeze(-1))
    lse.copy_(both)
