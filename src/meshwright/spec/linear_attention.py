"""Linear attention as a shape has it: layers that keep a state of one size, in place of keys and values.

Counted in chunks, as training kernels compute it: within a chunk by products of positions with positions, between
chunks by the state. Letters: C positions of a chunk, A dims of a key head, V of a value head.
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
"""Products of a chunk and value head. gated-delta: flash-linear-attention, fla/ops/gated_delta_rule/chunk.py
(chunk_scaled_dot_kkt_fwd, recompute_w_u_fwd, chunk_gated_delta_rule_fwd_h, chunk_fwd_o), and transformers'
torch_chunk_gated_delta_rule; Yang et al. 2024, arXiv:2412.06464. decay: transformers' MiniMaxLightningAttention; Qin et
al. 2024, arXiv:2405.17381. Solving the triangle of a chunk takes C / 3 per element more, 2 % of the others."""
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
"""The same of the backward pass. decay: the states again, then the gradient of each product of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Of all layers but every n-th."""

    full_every: int
    """Every n-th layer, counted from 1, has attention as model.heads say, the others are linear."""
    key_heads: int
    """Heads of queries and of keys. A value head shares one with its neighbours."""
    value_heads: int
    """Each has a state of key_dim x value_dim."""
    key_dim: int = 128
    """Dims of a query or key head."""
    value_dim: int = 128
    """Dims of a value head."""
    taps: int = 0
    """Positions that a causal convolution of each channel of queries, keys and values sees; 0 = there is none."""
    rule: Rule = "gated-delta"
    """gated-delta: a key's old value is taken out before the new one is added, by rates that each token gives (gated
    DeltaNet). decay: a fixed rate for each head (lightning attention)."""
    chunk: int = 64
    """Positions that the kernels take at once."""

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

    def at(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is one of them."""
        return (layer + 1) % self.full_every != 0

    @property
    def keys(self) -> int:
        """Dims of all key heads, as many as of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Dims of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.keys + self.values

    @property
    def delta(self) -> bool:
        """Whether each token gives two rates for each value head."""
        return self.rule == "gated-delta"

    @property
    def state_elements(self) -> int:
        """What a layer keeps of a sequence while it is served: states, and what the convolution still sees."""
        return self.value_heads * self.key_dim * self.value_dim + max(0, self.taps - 1) * self.channels

    def products(self, *, backward: bool = False) -> tuple[tuple[int, int, int], ...]:
        """(m, k, n) of every product of a chunk and value head."""
        sizes = {"C": self.chunk, "A": self.key_dim, "V": self.value_dim}
        found = BACKWARD[self.rule] if backward else FORWARD[self.rule]
        return tuple((sizes[m], sizes[k], sizes[n]) for m, k, n in found)

    @property
    def token_flop(self) -> float:
        """Of the rule's forward pass, for each token."""
        return 2.0 * self.value_heads * sum(m * k * n for m, k, n in self.products()) / self.chunk
