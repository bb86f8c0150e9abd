"""A whole transformer block for the few rows of a step, in one call of the compiled C loops.

For small models on a CPU a step is otherwise mostly Python: a dozen calls a layer, of microseconds each. The loops are
those that compute the block's parts one by one, so the bits are the same.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from meshwright.kernels.attention.paged import PagedStore, RowsCall
from meshwright.kernels.c.build import structure
from meshwright.kernels.c.serving_library import Loops, Panels, pointer

PARTS = ("qkv", "o", "gate_up", "down")


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
        # The struct has addresses alone, so the tensors are held here as long.
        self._alive = cos.contiguous(), sin.contiguous(), slots, call
        cosine, sine, *_ = self._alive
        self.fields = structure("Step")(
            cosine=pointer(cosine), sine=pointer(sine), slots=pointer(slots), tables=pointer(call.tables),
            offsets=pointer(call.offsets), last=pointer(call.last), rows=len(slots), longest=call.longest,
        )  # fmt: skip


@final
class FusedBlock:
    """A block whose tensors stay where they are in memory."""

    def __init__(self, loops: Loops, parts: BlockParts) -> None:
        self._loops, self._parts = loops, parts
        keys, values = parts.keys, parts.values
        (_, size, key_heads, width), value_width = keys.sizes, values.sizes[3]
        attention = structure("Attention")(
            keys=pointer(keys.codes), values=pointer(values.codes), key_scales=pointer(keys.scales),
            value_scales=pointer(values.scales), heads=parts.heads, key_heads=key_heads, width=width,
            value_width=value_width, value_stride=value_width, block=size, window=parts.window, e4m3=0,
            scale=parts.scale,
        )  # fmt: skip
        norms = {name: getattr(parts, name) for name in ("norm", "q_norm", "k_norm", "mlp_norm")}
        self._fields = structure("Block")(
            attention=attention,
            **{name: getattr(parts, name).fields for name in PARTS},
            **{name: None if norm is None else pointer(norm.weight) for name, norm in norms.items()},
            eps=parts.norm.eps,
            qk_eps=0.0 if parts.q_norm is None else parts.q_norm.eps,
            mlp_eps=parts.mlp_norm.eps,
        )

    def __call__(self, x: Tensor, step: FusedStep, beside: Mapping[str, Sequence[ctypes.Structure]]) -> Tensor:
        """Run the step's rows x (1, R, D) fp32, contiguous, through the block. Returns (1, R, D).

        Their keys and values are stored. `beside`: structs LowRank that are added to the products named in PARTS.
        """
        # Structs are made anew only where adapters are: this runs once for each layer of a step.
        if not beside:
            return self._loops.block(self._fields, step.fields, None, x)
        arrays = [(structure("LowRank") * len(beside.get(name, ())))(*beside.get(name, ())) for name in PARTS]
        low_ranks = structure("LowRanks")(tuple(map(ctypes.addressof, arrays)), tuple(map(len, arrays)))
        return self._loops.block(self._fields, step.fields, low_ranks, x)
