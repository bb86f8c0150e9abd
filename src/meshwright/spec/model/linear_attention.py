"""Linear attention: layers that keep a state of fixed size instead of keys and values.

Work is counted in chunks, as training kernels compute it: products of positions with positions within a chunk, and
the state between chunks. Letters: C positions of a chunk, A dims of a key head, V dims of a value head.
"""

from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import PlanError

Size = tuple[Literal["C", "A", "V"], Literal["C", "A", "V"], Literal["C", "A", "V"]]
"""(m, k, n) of a product."""
Rule = Literal["gated-delta", "decay"]
FORWARD: dict[str, tuple[Size, ...]] = {
    "gated-delta": (
        ("C", "A", "C"), ("C", "C", "A"), ("C", "C", "V"),  # keys with keys, both sides of the inverse
        ("C", "A", "V"), ("A", "C", "V"),  # what the state knows already, what it learns
        ("C", "A", "V"), ("C", "A", "C"), ("C", "C", "V"),  # what a query reads of the state and of its chunk
    ),
    "decay": (("C", "A", "C"), ("C", "C", "V"), ("C", "A", "V"), ("A", "C", "V")),
}  # fmt: skip
"""Products per chunk and value head.

gated-delta: flash-linear-attention, fla/ops/gated_delta_rule/chunk.py (chunk_scaled_dot_kkt_fwd, recompute_w_u_fwd,
chunk_gated_delta_rule_fwd_h, chunk_fwd_o), and transformers' torch_chunk_gated_delta_rule; Yang et al. 2024,
arXiv:2412.06464. decay: transformers' MiniMaxLightningAttention; Qin et al. 2024, arXiv:2405.17381. Solving the
triangle of a chunk takes C / 3 per element more, 2 % of the others.
"""
BACKWARD: dict[str, tuple[Size, ...]] = {
    "gated-delta": (
        *FORWARD["gated-delta"][1:5],  # recompute_w_u_fwd and chunk_gated_delta_rule_fwd_h again
        ("C", "A", "C"), ("C", "C", "V"),  # chunk_bwd_dv_local
        ("C", "A", "V"), ("A", "C", "V"), ("A", "C", "V"),  # chunk_gated_delta_rule_bwd_dhu
        ("C", "V", "C"), ("C", "V", "A"), ("C", "V", "A"), ("C", "V", "A"), ("C", "A", "C"), ("C", "C", "A"),
        ("C", "C", "A"),  # chunk_bwd_dqkwg
        ("C", "V", "C"), ("C", "A", "C"), ("C", "C", "V"), ("C", "C", "A"), ("C", "C", "C"), ("C", "C", "C"),
        ("C", "A", "C"), ("C", "C", "A"), ("C", "C", "A"),  # prepare_wy_repr_bwd
    ),
    "decay": (
        ("C", "V", "C"), ("C", "C", "A"), ("C", "V", "A"), ("C", "C", "A"), ("C", "V", "A"), ("C", "A", "C"),
        ("C", "C", "V"), ("C", "A", "V"), ("A", "C", "V"), ("A", "C", "V"),
    ),
}  # fmt: skip
"""Products of the backward pass. decay: the states again, then the gradient of each product of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Linear attention in all layers but every n-th."""

    full_every: int
    """Every n-th layer, counted from 1, has attention as described by model.heads; the others are linear."""
    key_heads: int
    """Heads of queries and of keys. Neighbouring value heads share one."""
    value_heads: int
    """Each has a state of key_dim x value_dim."""
    key_dim: int = 128
    """Dims of a query or key head."""
    value_dim: int = 128
    """Dims of a value head."""
    taps: int = 0
    """Positions seen by a causal convolution of each channel of queries, keys and values; 0 = no convolution."""
    rule: Rule = "gated-delta"
    """gated-delta: a key's old value is removed before the new one is added, at rates that each token gives (gated
    DeltaNet). decay: a fixed rate per head (lightning attention)."""
    chunk: int = 64
    """Positions that the kernels process at once."""

    def __post_init__(self) -> None:
        for field in ("full_every", "key_heads", "value_heads", "key_dim", "value_dim", "chunk"):
            if getattr(self, field) < 1:
                raise PlanError(f"model.unbuilt.linear.{field}={getattr(self, field)} must be at least 1")
        if self.value_heads % self.key_heads:
            raise PlanError(
                f"model.unbuilt.linear.value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}"
            )
        if self.taps < 0:
            raise PlanError(f"model.unbuilt.linear.taps={self.taps} must be 0 (no convolution) or more")

    def covers(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, is linear."""
        return (layer + 1) % self.full_every != 0

    @property
    def keys(self) -> int:
        """Dims of all key heads together, which equal those of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Dims of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.keys + self.values

    @property
    def delta(self) -> bool:
        """Each token gives two rates per value head."""
        return self.rule == "gated-delta"

    @property
    def state_elements(self) -> int:
        """Elements that a layer keeps per sequence while serving: states, and inputs of the convolution."""
        return self.value_heads * self.key_dim * self.value_dim + max(0, self.taps - 1) * self.channels

    def products(self, *, backward: bool = False) -> tuple[tuple[int, int, int], ...]:
        """Return (m, k, n) of every product per chunk and value head."""
        sizes = {"C": self.chunk, "A": self.key_dim, "V": self.value_dim}
        products = BACKWARD[self.rule] if backward else FORWARD[self.rule]
        return tuple((sizes[m], sizes[k], sizes[n]) for m, k, n in products)

    @property
    def token_flop(self) -> float:
        """FLOP of the rule's forward pass per token."""
        return 2.0 * self.value_heads * sum(m * k * n for m, k, n in self.products()) / self.chunk
