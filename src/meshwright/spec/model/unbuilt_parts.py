"""Parts of a shape that the planner counts and the engine does not compute.

Families differ by a few parts, and a shape names the parts, not the family. The engine trains shapes without them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import PlanError, printable
from meshwright.spec.units import many

# Linear attention: layers that keep a state of fixed size instead of keys and values. Work is counted in chunks, as
# training kernels compute it: products of positions with positions within a chunk, and the state between chunks.
# Letters: C positions of a chunk, A dims of a key head, V dims of a value head.
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


WHOLE = ("embedding", "head")
"""Matrices that may be trained whole in addition to adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbuiltParts:
    """Parts of blocks in addition to, or in place of, those of docs/notation.md. A field at its default is absent."""

    norms: Literal["before", "after", "both", "stream"] = "before"
    """Position of the norms of a block's two halves: behind them in OLMo 2, on both sides in Gemma 2 and 3, on the
    residual stream itself in MiniMax-01."""
    qk_norm: Literal["", "heads", "width"] = ""
    """Norms of queries and keys other than Qwen3's: as wide as all heads (OLMo 2), or of heads without a weight."""
    full_every: int = 0
    """Every n-th layer sees all positions before it and the others model.window; 0 = as in model.window_from_layer."""
    activation: Literal["", "gelu", "relu2", "clamped"] = ""
    """In place of the MLP's own: GeGLU, squared ReLU, or SwiGLU with clamped operands (GPT-OSS)."""
    rotary_share: float = 1.0
    """Share of a head's dims that are rotated."""
    long_rope: bool = False
    """Frequencies divided by a list of factors (LongRoPE, arXiv:2402.13753)."""
    unrotated_every: int = 0
    """Every n-th layer has no positions at all; 0 = none."""
    chunk: int = 0
    """Length of chunks in tokens: in layers with positions, queries see keys of their own chunk only (Llama 4); 0 =
    off."""
    linear: LinearAttention | None = None
    """Layers of linear attention between those with keys and values (Qwen3-Next, MiniMax-01)."""
    gated_attention: bool = False
    """A sigmoid of a further projection of each token weighs the output of attention, dim by dim (Qwen3-Next)."""
    predicts: int = 0
    """Further tokens, each predicted by a module behind the last layer: a block like it, a projection of its input and
    the next token's embedding, and the head once more (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    sinks: bool = False
    """A trained number for each query head joins its scores (GPT-OSS)."""
    router_bias: bool = False
    """Biases of the router's logits."""
    expert_bias: bool = False
    """Biases of every expert's matrices."""
    routed_every: int = 1
    """Every n-th of the layers that may be mixtures of experts is one, counted from 1."""
    shared_gate: bool = False
    """A sigmoid for each token weighs the shared expert."""
    scaled_embedding: bool = False
    """Embeddings are multiplied before the first layer."""
    soft_caps: bool = False
    """Logits, or scores of attention, pass through a tanh."""
    other_router: bool = False
    """Experts are weighed in another way than by softmax or sigmoid over the chosen ones."""
    centred_norm: bool = False
    """The weight of a norm is 1 + what is trained."""
    whole: str = ""
    """In addition to adapters, matrices that are trained whole in a copy of their own: embedding, head, or both with a
    comma (PEFT's modules_to_save)."""

    def __post_init__(self) -> None:
        if not 0 < self.rotary_share <= 1:
            raise PlanError(f"model.unbuilt.rotary_share={self.rotary_share} must be above 0 and at most 1")
        for name in filter(None, self.whole.split(",")):
            if name not in WHOLE:
                raise PlanError(
                    f"model.unbuilt.whole={printable(self.whole)}: take {' or '.join(WHOLE)}, or both with a comma"
                )
        for field in ("full_every", "unrotated_every", "chunk", "predicts", "routed_every"):
            least = 1 if field == "routed_every" else 0
            if getattr(self, field) < least:
                raise PlanError(f"model.unbuilt.{field}={getattr(self, field)} must be at least {least}")

    @property
    def block_norms(self) -> int:
        """Norms of a block between its halves and the residual stream."""
        return 4 if self.norms == "both" else 2

    def windowed(self, layer: int) -> bool:
        """Return whether a layer has the model's window."""
        return not self.full_every or (layer + 1) % self.full_every != 0

    def named(self) -> tuple[str, ...]:
        """Return each part in a few words, for a sentence."""
        return tuple(self._named())

    def _named(self) -> Iterator[str]:
        if self.norms != "before":
            places = {"after": "behind a block's halves", "both": "on both sides of a block's halves"}
            yield f"norms {places.get(self.norms, 'of the residual stream itself')}"
        if self.qk_norm:
            yield "norms over all heads of queries and keys" if self.qk_norm == "width" else "norms without a weight"
        if self.linear:
            kind = "gated delta rule" if self.linear.delta else "decay"
            yield f"linear attention ({kind}) in all but one of {self.linear.full_every} layers"
        if self.full_every:
            yield f"a window in all but one of {self.full_every} layers"
        if self.activation:
            yield {"gelu": "GeGLU", "relu2": "squared ReLU", "clamped": "clamped SwiGLU"}[self.activation]
        if self.rotary_share != 1:
            yield f"rotary positions on {self.rotary_share:g} of a head"
        if self.unrotated_every:
            yield f"layers without positions (one of {self.unrotated_every})"
        if self.chunk:
            yield "attention within chunks"
        if self.predicts:
            yield f"multi-token prediction ({many(self.predicts, 'further token')})"
        if self.routed_every > 1:
            yield "dense layers between routed ones"
        if self.whole:
            yield f"{self.whole.replace(',', ' and ')} trained whole in addition to adapters"
        words = {
            "long_rope": "LongRoPE", "gated_attention": "gated attention", "sinks": "attention sinks",
            "router_bias": "biases of routers", "expert_bias": "biases of experts",
            "shared_gate": "a gate of the shared expert", "scaled_embedding": "scaled embeddings",
            "soft_caps": "capped logits", "other_router": "this family's weights of experts",
            "centred_norm": "norms around 1",
        }  # fmt: skip
        yield from (phrase for field, phrase in words.items() if getattr(self, field))
