"""Bytes inside a layer's backward pass in Meshwright's engine, beside what the forward pass kept.

Also what a split backward pass leaves for the weight gradients. Tests compare it with a dry run. Letters as in
block.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.cost import attention_core, weight_product
from meshwright.planner.cost.activations import MASK_BYTES, HeadWidths, Routed
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.planner.cost.states import largest_weight

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Bytes of one layer and micro-batch."""

    mlp: float = 0.0
    """Bytes at the worst moment of the MLP."""
    attention: float = 0.0
    """Bytes in the attention core."""
    after: float = 0.0
    """Bytes when the pass leaves the MLP, without its weight gradients."""
    weights: float = 0.0
    """Elements of the largest weight (experts: all of a rank's), whose gradient is computed at once."""
    outside: float = 0.0
    """Bytes when the pass reaches or leaves the experts: gradients of the stream and of rows.

    Recomputed tensors are not included, and what experts keep is already freed or not yet recomputed.
    """
    inner: float = 0.0
    """Bytes that experts keep."""
    queued: float = 0.0
    """Bytes from a split backward pass to the weight gradients."""


NONE = Backward()
PIECE = 2**26
"""Elements of a stack of experts that are rounded at a time (kernels.fp8_experts)."""


def backward(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> Backward:
    """Return the bytes inside a layer's backward pass."""
    if routed:
        mlp = _experts(local, routed) + _rounded_experts(local, routed) + weight_product.restored_bytes(local, "expert")
    else:
        mlp = max(
            _mlp(local), _rounded_mlp(local), local.gates * _gate(local) + weight_product.restored_bytes(local, "mlp")
        )
    # a dense layer's key would have the expert parallelism that is read here
    weights = largest_weight(local.shape, local.tp, local.ep if routed else 1, routed is not None)
    # the pass walks back: what the MLP kept is free by the time attention is reached
    released = _mlp_kept(local, routed)
    stream = local.hidden_bytes + 2 * local.between_bytes
    # the MLP's weight gradients stay until the compiled pass returns, so attention's moment has them
    if local.lowered and not routed:
        made = (local.gates + 1) * local.shape.hidden * local.shape.ffn * local.width * (local.shape.lora is None)
        return Backward(
            mlp=max(_lowered_mlp(local), _rounded_mlp(local) + made) + 2 * local.hidden_bytes + TUNING_BYTES,
            attention=_attention(local, widths) - released + made + 2 * stream + TUNING_BYTES,
            weights=weights,
        )
    sent = routed.copies * local.shape.hidden * local.width if routed else 0.0
    return Backward(
        outside=2 * local.between_bytes + sent if routed else 0.0,
        inner=released - sent if routed else 0.0,
        mlp=mlp + weights * local.width + stream,
        attention=max(_attention(local, widths), _rounded_attention(local, widths), _restored_attention(local, widths))
        - released
        + stream,
        after=(_left_experts(local, routed) if routed else local.gates * _gate(local)) - released + stream,
        weights=weights,
        queued=weight_product.queued(local, widths, routed) if local.shape.lora else queued(local, widths, routed),
    )


def _mlp(local: "LocalShape") -> float:
    """Return the bytes of an MLP's gradients.

    Gated: the gradient of the product, that of the other gate, and the recomputed product exist together. The first
    becomes the gradient of a gate (kernels/linear/swiglu.py).
    """
    return (local.gates + 1) * _gate(local)


def _lowered_mlp(local: "LocalShape") -> float:
    """Return the same for compiled code.

    Gated: the gradient of the product, those of its factors, and the recomputed product. Otherwise the recomputed
    activation and its gradient, whose place the gradient of its input takes.
    """
    return 2 * local.gates * _gate(local)


def _gate(local: "LocalShape") -> float:
    """Return the bytes of the gradient of the first product of an MLP, or of each of two."""
    return local.tokens * local.shape.ffn / local.tp * local.width


def _rounded(local: "LocalShape", weight: float, rows: float) -> float:
    """Return the peak bytes while a matrix and its rows are narrowed to 8 bits (kernels.fp8.narrow).

    First the matrix, scaled and then narrow, then the rows beside it. Compiled code and Triton make no scaled copy.
    """
    each = 1 if local.stack.rounds_in_place or (local.compiled and not local.fp8_all) else 1 + local.width
    return max(each * weight, weight + each * rows)


def _rounded_mlp(local: "LocalShape") -> float:
    """Return the bytes where the second of two gates is rounded, beside the sum of their products.

    In a split pass the recomputed product is there as well. If weight gradients are also 8-bit products, another moment
    can be worse. There the recomputed product is rounded beside its own gradient, that of its output, and, gated, the
    activation.
    """
    ffn = local.shape.ffn / local.tp
    inner = local.tokens * ffn
    beside = local.hidden_bytes + local.splits * inner * local.width
    again = (3 if local.gates == 2 else 1) * inner * local.width + _rounded(
        local, local.tokens * local.shape.hidden, inner
    )
    gates = _rounded(local, local.shape.hidden * ffn, inner) + beside
    return max(gates, again * local.fp8_all) if local.fp8 else 0.0


def _rounded_experts(local: "LocalShape", routed: Routed) -> float:
    """Return the bytes while experts are rounded.

    Stacks are rounded some experts at a time beside the rows that they multiply. Both operands of a stack's gradient
    exist in three copies of a byte. Experts are not compiled, and Triton makes no copy.
    """
    assert local.shape.moe is not None
    experts = local.shape.moe.experts / local.ep / local.ep_pieces
    matrix, wider = local.shape.hidden * routed.ffn, max(local.shape.hidden, routed.ffn)
    piece = min(experts, max(1.0, PIECE // matrix)) * matrix
    scaled = 0 if local.stack.rounds_in_place else local.width
    stack, rows = experts * matrix + piece * scaled, (1 + scaled) * routed.copies * wider
    return max(stack, experts * matrix + rows, (local.shape.hidden + routed.ffn) * routed.copies + rows) * local.fp8_all


def _rounded_attention(local: "LocalShape", widths: HeadWidths) -> float:
    """Return the bytes where the queries' gradient is rounded, beside those of keys and values."""
    queries, made = local.tokens * widths.queries, local.tokens * (widths.queries + widths.keys_values) * local.width
    read = local.shape.mla.q_rank if local.shape.mla and local.shape.mla.q_rank else local.shape.hidden
    return _rounded(local, read * widths.queries, queries) + made + local.hidden_bytes if local.fp8 else 0.0


def _restored_attention(local: "LocalShape", widths: HeadWidths) -> float:
    """Return the bytes where the query matrix is dequantized, beside gradients of queries, keys and values."""
    gradients = local.tokens * (widths.queries + widths.keys_values) * local.width
    return gradients + weight_product.restored_bytes(local, "attention") if local.shape.lora else 0.0


def _experts(local: "LocalShape", routed: Routed) -> float:
    """Return the bytes of gradients over copies of tokens. The kept product is freed by then."""
    return (2 * routed.ffn + local.shape.hidden) * routed.copies * local.width


def _left_experts(local: "LocalShape", routed: Routed) -> float:
    """Return the bytes beside the weight gradients of a rank's experts.

    First gradients of the first products, whose outputs and activation are freed, then those of rows.
    """
    return max(local.gates * routed.copies * routed.ffn, routed.copies * local.shape.hidden) * local.width


def _mlp_kept(local: "LocalShape", routed: Routed | None) -> float:
    """Return the bytes that are freed before the pass reaches the attention core."""
    if routed:
        return (3 * routed.copies * routed.ffn + 2 * routed.copies * local.shape.hidden) * local.width
    tensors = local.gates + local.stack.activation_kept / 2 if local.gates == 2 else local.gates
    return tensors * local.tokens * local.shape.ffn / local.tp * local.width


def _attention(local: "LocalShape", widths: HeadWidths) -> float:
    """Return the bytes around the attention core.

    With context parallelism (parallel/axes/ring.py, kernels/attention/partial.py) there are copies of the queries, the
    output and its gradient, and their own gradient in fp32. For keys and values a ring holds those of two ranks and
    four fp32 sums. An all-gather holds those of all ranks three times beside their fp32 gradients and the cut ones, or
    once beside the reassembled ones. Stripes are used rank by rank: once, and their fp32 gradients twice.
    """
    if local.linear:
        return attention_core.linear_inside_bytes(local)
    queries, keys_values = local.tokens * widths.queries, local.tokens * widths.keys_values
    if local.stack.is_meshwright and local.stack.attention != "flash":
        return _plain_attention(local, widths)
    # strips of fp32 attention repeat keys and values per head and hold a mask of their own
    if local.cp == 1:
        copies = queries - keys_values / 2 if local.masked and local.shape.mla is None else 0.0
        keys = attention_core.widest_strip(local) if local.masked else 0.0
        mask = (
            (local.batch if local.documents else 1)
            * min(attention_core.STRIP, local.sequence)
            * keys
            * (local.width + 2)
        )
        return local.width * (3 * queries + keys_values + 2 * copies * keys / local.sequence) + mask
    around = queries * (4 * local.width + 4)
    if local.ring:
        return around + keys_values * (3 * local.width + 4 * 4)
    striped = local.context_split == "striped"
    held = local.width + 2 * 4 if striped else max(3 * local.width + 2 * 4, local.width + 3 * 4)
    return around + local.cp * keys_values * held


def _plain_attention(local: "LocalShape", widths: HeadWidths) -> float:
    """Return the bytes where the softmax is differentiated, beside the kept weights.

    Source: kernels/attention/attend.py, attend_reference. Uncompiled, the gradients of the weights and of the scores, S
    x S in fp32, exist beside the gradient of the values of all heads. A forward pass stores as much: scores, scores
    without hidden pairs, and the pairs. Compiled code writes the gradient of the scores in place of that of the
    weights.
    """
    scores = local.tokens * local.sequence * local.shape.heads / local.tp
    pairs = (local.batch if local.documents else 1) * local.sequence**2 * MASK_BYTES
    return 4 * (1 if local.lowered else 2) * scores + 4 * local.tokens * widths.out + pairs


def queued(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> float:
    """Return the bytes of inputs of the products with weights and of the gradients of their outputs.

    Inputs are gathered where sequence parallelism shares them.
    """
    word, hidden, mla = local.width, local.hidden_bytes, None if local.linear else local.shape.mla
    queued_bytes = hidden + local.tokens * widths.out * word
    if mla is None:
        queued_bytes += hidden + local.tokens * (widths.queries + widths.keys_values) * word
    else:
        low = mla.q_rank + mla.kv_rank
        up = local.shape.heads * (mla.nope_dim + mla.v_dim) / local.tp
        queued_bytes += hidden + local.tokens * (low + mla.rope_dim) * word
        queued_bytes += local.tokens * (low + widths.queries + up) * word
    return queued_bytes + (_queued_experts(local, routed) if routed else _queued_mlp(local, local.shape.ffn / local.tp))


def _queued_mlp(local: "LocalShape", ffn: float) -> float:
    return 2 * local.hidden_bytes + (local.gates + 1) * local.tokens * ffn * local.width


def _queued_experts(local: "LocalShape", routed: Routed) -> float:
    """Return the same of experts. The router's weight gradient is not deferred."""
    moe = local.shape.moe
    assert moe is not None
    inner, sent = routed.copies * routed.ffn * local.width, routed.copies * local.shape.hidden * local.width
    queued_bytes = 2 * sent + (local.gates + 1) * inner
    if moe.shared_experts:
        queued_bytes += _queued_mlp(local, moe.shared_experts * moe.ffn / local.tp)
    return queued_bytes
