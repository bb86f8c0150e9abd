"""A whole transformer block for the few rows of a step, in one call of the compiled C loops.

For small models on a CPU a step is otherwise mostly Python: a dozen calls a layer, of microseconds each. The loops are
those that compute the block's parts one by one, so the bits are the same.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from meshwright.kernels.attention.paged import RowsCall
from meshwright.kernels.attention.store import PagedStore
from meshwright.kernels.c.panels import FLOAT, INT, POINTER, PanelFields, Panels, pointer
from meshwright.kernels.c.serving_library import AttentionFields, Loops

PARTS = ("qkv", "o", "gate_up", "down")


class _BlockFields(ctypes.Structure):
    _fields_ = (
        ("attention", AttentionFields), *((name, PanelFields) for name in PARTS), ("norm", POINTER),
        ("q_norm", POINTER), ("k_norm", POINTER), ("mlp_norm", POINTER), ("eps", FLOAT), ("qk_eps", FLOAT),
        ("mlp_eps", FLOAT),
    )  # fmt: skip


class _StepFields(ctypes.Structure):
    _fields_ = (
        ("cosine", POINTER), ("sine", POINTER), ("slots", POINTER), ("tables", POINTER), ("offsets", POINTER),
        ("last", POINTER), ("rows", INT), ("longest", INT),
    )  # fmt: skip


class LowRankFields(ctypes.Structure):
    """LowRank of block.c: a low-rank matrix beside a part of a block's product, for some rows of a step."""

    _fields_ = (
        ("a", POINTER), ("b", POINTER), ("rows", POINTER), ("begin", INT), ("count", INT), ("column", INT),
    )  # fmt: skip


class _LowRanksFields(ctypes.Structure):
    _fields_ = (("some", POINTER * len(PARTS)), ("counts", INT * len(PARTS)))


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Weights of a block: x + o(attention(qkv(norm(x)))), then x + down(silu(gate) * up) of its norm.

    Letters: H query heads, K key heads, E width of a head, F of the feed-forward.
    """

    norm: Norm
    qkv: Panels
    """(H E + 2 K E, D): queries, keys, values."""
    q_norm: Norm | None
    k_norm: Norm | None
    """Norms of each head, both with the same eps. None = none."""
    o: Panels
    mlp_norm: Norm
    gate_up: Panels
    """(2 F, D): gate, then up."""
    down: Panels
    keys: PagedStore
    values: PagedStore
    """(blocks, block, K, E), as numbers or int8."""
    heads: int
    window: int
    """Visible positions. 0 = all."""
    scale: float


@final
class FusedStep:
    """The rows of a step, for all blocks."""

    def __init__(self, cos: Tensor, sin: Tensor, slots: Tensor, call: RowsCall) -> None:
        """Take cos and sin (1, R, 1, E / 2) and slots (R,)."""
        self._alive = cos.contiguous(), sin.contiguous(), slots, call
        tensors = *self._alive[:3], call.tables, call.offsets, call.last
        self.fields = _StepFields(*map(pointer, tensors), len(slots), call.longest)


@final
class FusedBlock:
    """A block whose tensors stay where they are in memory."""

    def __init__(self, loops: Loops, parts: BlockParts) -> None:
        self._loops, self._parts = loops, parts
        keys, values = parts.keys, parts.values
        (_, size, key_heads, width), value_width = keys.sizes, values.sizes[3]
        attention = AttentionFields(
            keys=pointer(keys.codes), values=pointer(values.codes), key_scales=pointer(keys.scales),
            value_scales=pointer(values.scales), heads=parts.heads, key_heads=key_heads, width=width,
            value_width=value_width, value_stride=value_width, block=size, window=parts.window, e4m3=0,
            scale=parts.scale,
        )  # fmt: skip
        norms = [None if norm is None else pointer(norm.weight) for norm in self._norms]
        eps = parts.norm.eps, 0.0 if parts.q_norm is None else parts.q_norm.eps, parts.mlp_norm.eps
        self._fields = _BlockFields(attention, *(getattr(parts, name).fields for name in PARTS), *norms, *eps)

    @property
    def _norms(self) -> list[Norm | None]:
        return [self._parts.norm, self._parts.q_norm, self._parts.k_norm, self._parts.mlp_norm]

    def __call__(self, x: Tensor, step: FusedStep, beside: Mapping[str, Sequence[LowRankFields]]) -> Tensor:
        """Run the step's rows x (1, R, D) fp32, contiguous, through the block. Returns (1, R, D).

        Their keys and values are stored. `beside`: adapters added to the products named in PARTS.
        """
        if not beside:
            return self._loops.block(self._fields, step.fields, None, x)
        arrays = [(LowRankFields * len(adapters))(*adapters) for adapters in (beside.get(name, ()) for name in PARTS)]
        pointers = (POINTER * len(PARTS))(*map(ctypes.addressof, arrays))
        low_ranks = _LowRanksFields(pointers, (INT * len(PARTS))(*map(len, arrays)))
        return self._loops.block(self._fields, step.fields, low_ranks, x)
