"""Parts of a shape that the planner counts and the engine does not compute.

Families differ by a few parts, and a shape names the parts, not the family. Without any, the engine can train it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import PlanError, printable
from meshwright.spec.model.linear_attention import LinearAttention

WHOLE = ("embedding", "head")
"""Matrices that may be trained whole beside adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbuiltParts:
    """Parts of blocks beside, or in place of, those of docs/notation.md. A field at its default is absent."""

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
    """A trained number for each query head stands beside its scores (GPT-OSS)."""
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
    """Beside adapters, matrices that are trained whole in a copy of their own: embedding, head, or both with a comma
    (PEFT's modules_to_save)."""

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
            yield f"prediction of {self.predicts} further token" + "s" * (self.predicts > 1)
        if self.routed_every > 1:
            yield "dense layers between routed ones"
        if self.whole:
            yield f"{self.whole.replace(',', ' and ')} trained whole beside adapters"
        words = {
            "long_rope": "LongRoPE", "gated_attention": "gated attention", "sinks": "attention sinks",
            "router_bias": "biases of routers", "expert_bias": "biases of experts",
            "shared_gate": "a gate of the shared expert", "scaled_embedding": "scaled embeddings",
            "soft_caps": "capped logits", "other_router": "this family's weights of experts",
            "centred_norm": "norms around 1",
        }  # fmt: skip
        yield from (phrase for field, phrase in words.items() if getattr(self, field))
