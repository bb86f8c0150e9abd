"""What a layer of Meshwright's own engine needs inside its backward pass, beside what it kept, and what a split
backward pass leaves for the gradients of weights. Letters as in block.py; held against a dry run of the engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.cost import adapters, attention_core, state_layers
from meshwright.planner.cost.activations import MASK_BYTES, HeadWidths, Routed
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.planner.cost.states import largest_weight

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Bytes of one layer and micro-batch."""

    mlp: float = 0.0
    """At its worst place in the MLP."""
    attention: float = 0.0
    """In the attention core."""
    after: float = 0.0
    """When the pass leaves the MLP, without the gradients of its weights."""
    weights: float = 0.0
    """Elements of its largest weight (experts: all of a rank's), whose gradient is made at once."""
    outside: float = 0.0
    """When the pass comes to the experts of a layer or leaves them: gradients of the stream and of rows. Without what
    the layer makes again, and what experts keep is gone or still to be made again."""
    inner: float = 0.0
    """What experts keep."""
    queued: float = 0.0
    """From a split pass to the gradients of weights."""


NONE = Backward()
PIECE = 2**26
"""Elements of a stack of experts that are rounded at a time (kernels.fp8_experts)."""


def backward(of: "Local", widths: HeadWidths, routed: Routed | None) -> Backward:
    """Of a layer."""
    if routed:
        mlp = _experts(of, routed) + _rounded_experts(of, routed) + adapters.restored_bytes(of, "expert")
    else:
        mlp = max(_mlp(of), _rounded_mlp(of), of.gates * _gate(of) + adapters.restored_bytes(of, "mlp"))
    weights = largest_weight(of.shape, of.tp, of.ep, routed is not None)
    kept = _mlp_kept(of, routed)
    stream = of.hidden_bytes + 2 * of.between_bytes
    if of.lowered and not routed:
        made = (of.gates + 1) * of.shape.hidden * of.shape.ffn * of.width * (of.shape.lora is None)
        return Backward(
            mlp=max(_lowered_mlp(of), _rounded_mlp(of) + made) + 2 * of.hidden_bytes + TUNING_BYTES,
            attention=_attention(of, widths) - kept + made + 2 * stream + TUNING_BYTES,
            weights=weights,
        )
    sent = routed.copies * of.shape.hidden * of.width if routed else 0.0
    return Backward(
        outside=2 * of.between_bytes + sent if routed else 0.0,
        inner=kept - sent if routed else 0.0,
        mlp=mlp + weights * of.width + stream,
        attention=max(_attention(of, widths), _rounded_attention(of, widths), _restored_attention(of, widths))
        - kept
        + stream,
        after=(_left_experts(of, routed) if routed else of.gates * _gate(of)) - kept + stream,
        weights=weights,
        queued=adapters.queued(of, widths, routed) if of.shape.lora else queued(of, widths, routed),
    )


def _mlp(of: "Local") -> float:
    """Gated: the gradient of the product, which becomes that of a gate, that of the other, and the product made again
    stand together (kernels/swiglu.py)."""
    return (of.gates + 1) * _gate(of)


def _lowered_mlp(of: "Local") -> float:
    """Compiled. Gated: the gradient of the product, those of what it is made of, and the product made again. Else the
    activation made again stands beside its gradient, in whose place its input's is made."""
    return 2 * of.gates * _gate(of)


def _gate(of: "Local") -> float:
    """The gradient of what the first product of an MLP makes, or each of two."""
    return of.tokens * of.shape.ffn / of.tp * of.width


def _rounded(of: "Local", weight: float, rows: float) -> float:
    """A matrix and the rows that it multiplies, of so many elements, on their way to 8 bits (kernels.fp8.narrow): first
    the matrix, scaled and then narrow, then the rows beside it. Compiled code and Triton make no scaled copy."""
    each = 1 if of.stack.rounds_in_place or (of.compiled and not of.fp8_all) else 1 + of.width
    return max(each * weight, weight + each * rows)


def _rounded_mlp(of: "Local") -> float:
    """Where the second of two gates is rounded, beside the sum of their products and, in a split pass, the product made
    again. Where gradients of weights are products of 8 bits too: where the product that is made again is rounded beside
    the gradient of what it makes, its own, and, gated, the activation."""
    ffn = of.shape.ffn / of.tp
    inner = of.tokens * ffn
    beside = of.hidden_bytes + of.splits * inner * of.width
    again = (3 if of.gates == 2 else 1) * inner * of.width + _rounded(of, of.tokens * of.shape.hidden, inner)
    gates = _rounded(of, of.shape.hidden * ffn, inner) + beside
    return max(gates, again * of.fp8_all) if of.fp8 else 0.0


def _rounded_experts(of: "Local", routed: Routed) -> float:
    """Stacks, some experts at a time, beside the rows that they multiply; rows of both sides of a gradient of a stack,
    each in three copies of a byte. No compiled code; Triton makes no copy."""
    assert of.shape.moe is not None
    experts = of.shape.moe.experts / of.ep / of.ep_pieces
    one, wider = of.shape.hidden * routed.ffn, max(of.shape.hidden, routed.ffn)
    piece = min(experts, max(1.0, PIECE // one)) * one
    scaled = 0 if of.stack.rounds_in_place else of.width
    stack, rows = experts * one + piece * scaled, (1 + scaled) * routed.copies * wider
    return max(stack, experts * one + rows, (of.shape.hidden + routed.ffn) * routed.copies + rows) * of.fp8_all


def _rounded_attention(of: "Local", widths: HeadWidths) -> float:
    """Where the queries' gradient is rounded, beside those of keys and values."""
    queries, made = of.tokens * widths.queries, of.tokens * (widths.queries + widths.keys_values) * of.width
    read = of.shape.mla.q_rank if of.shape.mla and of.shape.mla.q_rank else of.shape.hidden
    return _rounded(of, read * widths.queries, queries) + made + of.hidden_bytes if of.fp8 else 0.0


def _restored_attention(of: "Local", widths: HeadWidths) -> float:
    """Where the matrix of queries is restored, beside the gradients of queries, keys and values."""
    gradients = of.tokens * (widths.queries + widths.keys_values) * of.width
    return gradients + adapters.restored_bytes(of, "attention") if of.shape.lora else 0.0


def _experts(of: "Local", routed: Routed) -> float:
    """Over copies of tokens, whose product is kept and gone by then."""
    return (2 * routed.ffn + of.shape.hidden) * routed.copies * of.width


def _left_experts(of: "Local", routed: Routed) -> float:
    """Beside gradients of all of a rank's stacks: those of what the first products made, whose results and activation
    are gone; then those of rows."""
    return max(of.gates * routed.copies * routed.ffn, routed.copies * of.shape.hidden) * of.width


def _mlp_kept(of: "Local", routed: Routed | None) -> float:
    """What is gone when the pass comes to the attention core."""
    if routed:
        return (3 * routed.copies * routed.ffn + 2 * routed.copies * of.shape.hidden) * of.width
    tensors = of.gates + of.stack.activation_kept / 2 if of.gates == 2 else of.gates
    return tensors * of.tokens * of.shape.ffn / of.tp * of.width


def _attention(of: "Local", widths: HeadWidths) -> float:
    """Around the core. Over context-parallel ranks (parallel/ring.py, kernels/partial.py): copies of queries, result
    and its gradient, their own gradient in fp32; of keys and values those of two ranks and four fp32 sums (ring), or
    those of all ranks three times beside their fp32 gradients and these cut, or once beside these put together again
    (all-gather). Stripes are used rank by rank: once, and their fp32 gradients twice."""
    if of.linear:
        return state_layers.inside_bytes(of)
    queries, keys_values = of.tokens * widths.queries, of.tokens * widths.keys_values
    if of.stack.own and of.stack.attention != "flash":
        return _plain_attention(of, widths)
    if of.cp == 1:
        copies = queries - keys_values / 2 if of.masked and of.shape.mla is None else 0.0
        keys = attention_core.widest_strip(of) if of.masked else 0.0
        mask = (of.batch if of.documents else 1) * min(attention_core.STRIP, of.sequence) * keys * (of.width + 2)
        return of.width * (3 * queries + keys_values + 2 * copies * keys / of.sequence) + mask
    around = queries * (4 * of.width + 4)
    if of.ring:
        return around + keys_values * (3 * of.width + 4 * 4)
    striped = of.context_split == "striped"
    held = of.width + 2 * 4 if striped else max(3 * of.width + 2 * 4, of.width + 3 * 4)
    return around + of.cp * keys_values * held


def _plain_attention(of: "Local", widths: HeadWidths) -> float:
    """Bytes where the softmax is differentiated (kernels/attention.py, attend_reference), beside the kept weights.

    Uncompiled, the gradients of the weights and of the scores, S x S in fp32, stand beside the gradient of the values
    of all heads. A forward pass stores as much: scores, scores without hidden pairs, and the pairs. Compiled code
    writes the gradient of the scores in place of that of the weights.
    """
    scores = of.tokens * of.sequence * of.shape.heads / of.tp
    pairs = (of.batch if of.documents else 1) * of.sequence**2 * MASK_BYTES
    return 4 * (1 if of.lowered else 2) * scores + 4 * of.tokens * widths.out + pairs


def queued(of: "Local", widths: HeadWidths, routed: Routed | None) -> float:
    """Inputs of the products with weights, gathered where sequence parallelism shares them, and gradients of what the
    products made."""
    word, hidden, mla = of.width, of.hidden_bytes, None if of.linear else of.shape.mla
    found = hidden + of.tokens * widths.out * word
    if mla is None:
        found += hidden + of.tokens * (widths.queries + widths.keys_values) * word
    else:
        low = mla.q_rank + mla.kv_rank
        up = of.shape.heads * (mla.nope_dim + mla.v_dim) / of.tp
        found += hidden + of.tokens * (low + mla.rope_dim) * word
        found += of.tokens * (low + widths.queries + up) * word
    return found + (_queued_experts(of, routed) if routed else _queued_mlp(of, of.shape.ffn / of.tp))


def _queued_mlp(of: "Local", ffn: float) -> float:
    return 2 * of.hidden_bytes + (of.gates + 1) * of.tokens * ffn * of.width


def _queued_experts(of: "Local", routed: Routed) -> float:
    """The router's product is no product of the kernels': it stays in the pass."""
    moe = of.shape.moe
    assert moe is not None
    inner, sent = routed.copies * routed.ffn * of.width, routed.copies * of.shape.hidden * of.width
    found = 2 * sent + (of.gates + 1) * inner
    if moe.shared_experts:
        found += _queued_mlp(of, moe.shared_experts * moe.ffn / of.tp)
    return found
