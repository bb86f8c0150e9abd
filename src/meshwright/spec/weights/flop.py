"""FLOP of a model per token, counted from its shape. Used by the trainer's MFU and by the planner.

A multiply-add is 2 FLOP. Every weight matrix except the input embedding meets each token once in the forward pass (2
FLOP per weight) and twice in the backward pass, a frozen one once. Attention multiplies each query with every key that
it may see, and the weights with the values. Norms, activations and softmax (below 1 %) are omitted, as in every
published MFU.
"""

from dataclasses import dataclass

from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import parameters


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
