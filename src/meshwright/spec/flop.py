"""FLOP of a model, counted per token from the shape. Read by the trainer's MFU and by the planner.

A multiply-add is 2 FLOP. Every weight matrix but the input embedding meets each token once forward (2 FLOP a weight)
and twice backward, a frozen one once; attention multiplies each query with every key it may see, and the weights with
the values. Norms, activations and the softmax are left out (below 1 %), as every published MFU does.
"""

from dataclasses import dataclass

from meshwright.spec.inventory import parameters
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlop:
    """FLOP of one token: forward pass only; training takes three times as much (forward 1, backward 2), but for
    gradients of frozen weights."""

    layers: float
    """Matrix products inside the layers."""
    head: float
    """Product with the head."""
    attention: float
    """Queries with keys, weights with values."""
    frozen: float = 0.0
    """Of `layers` and `head`, products with weights that are not trained."""

    @property
    def forward(self) -> float:
        """All of the forward pass."""
        return self.layers + self.head + self.attention

    @property
    def training(self) -> float:
        """Forward and backward, nothing recomputed: what MFU counts."""
        return 3 * self.forward - self.frozen

    def hardware(self, recompute: str, share: float = 1.0) -> float:
        """With what recomputation adds, as HFU counts: full = the layers again, selective = the attention core.
        `share`: of the layers, those that recompute."""
        layers = self.layers if recompute in ("full", "all-but-attention") else 0.0
        return self.training + share * (layers + (self.attention if recompute in ("full", "selective") else 0.0))


def token_flop(shape: ModelShape, sequence: int, *, causal: bool) -> TokenFlop:
    """FLOP per token at a sequence length; `causal` counts only the keys a query may see (on average half), else all.

    Of routed experts only top_k count. Conventions of other tools: docs/notation.md.
    """
    share = shape.moe.top_k / shape.moe.experts if shape.moe else 1.0
    head = 2.0 * shape.vocab * shape.hidden
    layers, frozen = 0.0, head if shape.lora else 0.0
    for parameter in parameters(shape):
        if parameter.layer >= 0 and parameter.decays:
            product = 2 * parameter.numel * (share if parameter.group == "expert" else 1.0)
            layers += product
            frozen += 0.0 if parameter.trained else product
    attention = sum(_attention_flop(shape, layer, sequence, causal) for layer in range(shape.layers))
    return TokenFlop(layers=layers, head=head, attention=attention, frozen=frozen)


def _attention_flop(shape: ModelShape, layer: int, sequence: int, causal: bool) -> float:
    """2 H (E_qk + E_v) per key seen; full: S keys. Causal: S/2 (rounded from (S + 1)/2), less with a window. Linear
    attention: the products of its chunks, at any length."""
    linear = shape.linear_of(layer)
    if linear is not None:
        return linear.token_flop
    widths = shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim if shape.mla else 2 * shape.head_dim
    keys = float(sequence)
    if causal:
        window = shape.window_of(layer)
        keys = sequence / 2 if not window or window >= sequence else window - window * window / (2 * sequence)
    return 2.0 * shape.heads * widths * keys
