"""Activations of a micro-batch: what its forward pass keeps for the backward pass, and what exists inside the latter.

Kept are tensors of a layer, of the embedding and of the head. Sources: Korthikanti et al. 2022 (arXiv:2205.05198)
section 4 for the plain transformer (34 S B D + 5 H S^2 B, exact in the tests). Meshwright's own stack follows its model
(tests count the tensors that stay alive). Other stacks follow their source code, as the fields of `Stack` say.

Bytes inside a layer's backward pass are known moment by moment of Meshwright's engine (`Backward`), together with what
a split backward pass leaves for the weight gradients. Tests compare them with a dry run. Of other software only one
peak is known (`layer_transient`). Letters as in block.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.planner.cost import attention_core, weight_product
from meshwright.planner.cost.micro_batch import MASK_BYTES, HeadWidths, LocalShape, Logits, Routed
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.planner.cost.states import largest_weight
from meshwright.planner.cost.work import KeptBytes
from meshwright.spec.memory.held import ADDED_AT_ONCE, padded_columns
from meshwright.spec.rules.passes import holds_codes

INDEX_BYTES = 8
"""Bytes of an int64 index."""
STREAMS = 3
"""Whole hidden states alive at once in a layer's backward pass, in addition to its widest place.

They are the gradients of the stream, of a branch and of its normed input. Where sequence parallelism shares the stream,
they are what was gathered and what is to be scattered.
"""
TILE_BYTES = 17
"""Bytes per score of a tile with dropout: weights, those that stay, both gradients in fp32, and the mask."""
PIECE = 2**26
"""Elements of a stack of experts that are rounded at a time (kernels/linear/fp8.py)."""


def kept_tensors(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> tuple[KeptBytes, ...]:
    """Return the tensors that one layer keeps."""
    tensors = [*_norm_kept(local, "attention"), *_attention_kept(local, widths), *_mask_kept(local, "attention")]
    if local.shape.unbuilt is not None and local.shape.unbuilt.block_norms == 4:
        tensors += [_norm_kept(local, "attention out")[0], _norm_kept(local, "mlp out")[0]]
    tensors += [*_mlp_norm_kept(local, routed), *(_experts_kept(local, routed) if routed else _mlp_kept(local))]
    tensors += _mask_kept(local, "mlp")
    if local.tp > 1 and local.stack.tensor_kept:
        copies = local.hidden_bytes * local.stack.tensor_kept / 2
        tensors.append(KeptBytes("inputs of column-split products", copies, copies))
    return tuple(tensors)


def embedding_mask(local: LocalShape) -> Logits:
    """Return what the embedding keeps: its dropout mask."""
    mask = local.between * local.shape.hidden * MASK_BYTES if local.dropout else 0.0
    return Logits(mask, mask, 0.0)


def logits(local: LocalShape) -> Logits:
    """Return the bytes of the head for one micro-batch."""
    stack, shape = local.stack, local.shape
    ranks = local.tp if stack.vocab_parallel else 1
    vocab = shape.vocab / ranks
    stream, normed = (tensor.none for tensor in _norm_kept(local, "head"))
    if stack.head_chunk_bytes:  # computes both gradients at once: of its input, and of its matrix in fp32
        laid = head_columns(local)
        matrix = 0.0 if shape.lora else laid * shape.hidden
        made = local.tokens * shape.hidden * local.width + matrix * 4 + (normed if local.compares else 0.0)
        return Logits(stream + made, 0.0, *_chunk_bytes(local, head_rows(local) * laid, matrix))
    count = local.tokens * vocab
    peak = stack.logit_peak + (stack.tensor_logit if local.tp > 1 else 0.0)
    kept_bytes = stream + normed + count * stack.logit_kept
    return Logits(kept_bytes, count * stack.logit_held, count * (peak - stack.logit_kept))


def _chunk_bytes(local: LocalShape, logits: float, matrix: float) -> tuple[float, float]:
    """Return the extra bytes while a chunk's logits are computed, and while the gradient of the head is.

    A chunk's logits exist as computed, and in fp32 where the loss copies them. A CPU adds to a 16-bit matrix gradient
    in pieces outside the product, in addition to the logits.
    """
    copy_width = 0 if local.stack.loss_in_place or local.width == 4 else 4
    # The head's normed input for the whole micro-batch, and the chunk's logits.
    common = local.hidden_bytes + logits * local.width
    piece_bytes = min(matrix, ADDED_AT_ONCE) * (local.width + 4) if local.width < 4 and not local.gpu else 0.0
    return common + logits * copy_width, common + piece_bytes


def head_columns(local: LocalShape) -> float:
    """Return the logits of a token on a rank as stored.

    Meshwright pads those of a GPU (kernels/loss/cross_entropy.py).
    """
    vocab = local.shape.vocab / local.tp
    return float(padded_columns(ceil(vocab), local.width)) if local.stack.pads_head and local.gpu else vocab


def head_rows(local: LocalShape) -> float:
    """Return the tokens of a chunk of the head."""
    vocab = local.shape.vocab / local.tp
    return max(1.0, min(local.tokens, max(256.0, local.stack.head_chunk_bytes / (4 * vocab))))


def divergence_chunk(local: LocalShape, buffers: int) -> float:
    """Return the bytes of a chunk of a distillation loss, in addition to the teacher's hidden states (`local`).

    `buffers` fp32 tensors of logits exist at once, and the gradient of the student's logits in the width of products.
    """
    vocab = local.shape.vocab / local.tp
    rows = max(1.0, min(local.tokens, max(256.0, local.stack.head_chunk_bytes / (4 * buffers * vocab))))
    laid = head_columns(local)
    copied = local.width if local.width < 4 or laid > vocab else 0
    return local.hidden_bytes + rows * laid * (4 * buffers + copied)


def layer_transient(local: LocalShape, routed: Routed | None) -> float:
    """Return the bytes of gradients alive at once inside a layer's backward pass.

    They are those of its widest place and of the stream. A kept activation is freed before the gradients of its inputs
    are computed. Stored scores have a gradient before and after the softmax, in fp32 too where it runs in fp32.
    """
    again = local.gates == 2 and not routed and not local.stack.activation_kept
    tokens, ffn = (routed.copies, routed.ffn) if routed else (local.tokens, local.shape.ffn / local.tp)
    widest = (local.gates + again) * tokens * ffn * local.width
    if local.stack.attention != "flash":
        word = 2 * local.width + (8 if local.stack.score_kept else 0)
        widest = max(widest, local.tokens * local.sequence * local.shape.heads / local.tp * word)
    return max(widest, attention_core.linear_inside_bytes(local)) + STREAMS * local.hidden_bytes


def _norm_kept(local: LocalShape, name: str) -> tuple[KeptBytes, KeptBytes]:
    """Return the residual stream at this point, and the normed input of the matrices behind it."""
    stream = local.between * local.shape.hidden * local.stack.norm_kept * local.width / 2
    coded = local.sp and holds_codes(
        local.shape
    )  # with quantized weights the gathered input is kept, not the norm's output
    normed = local.between_bytes if local.stack.regather and local.sp and not coded else local.hidden_bytes
    core = local.stack.selective == "core"
    first = local.between_bytes if name == "attention" else 0.0
    return (
        KeptBytes(f"{name} norm input", stream, stream if core else first),
        KeptBytes(f"{name} norm output", normed, normed if core else 0.0, "" if coded else "norm"),
    )


def _mlp_norm_kept(local: LocalShape, routed: Routed | None) -> tuple[KeptBytes, ...]:
    """Return the same of an MLP.

    A router keeps an fp32 copy and dispatch another, so the normed input itself is freed.
    """
    stream, normed = _norm_kept(local, "mlp")
    copied = (
        local.stack.is_meshwright
        and local.width < 4
        and routed
        and not (local.shape.moe and local.shape.moe.shared_experts)
    )
    return (stream,) if copied else (stream, normed)


def gate_dims(local: LocalShape, out: float) -> float:
    """Return the columns of a projection that gates an attention output of `out` dims. 0 = no gate."""
    gated = local.linear or (local.shape.unbuilt and local.shape.unbuilt.gated_attention)
    return out if gated else 0.0


def _attention_kept(local: LocalShape, widths: HeadWidths) -> Iterator[KeptBytes]:
    word = local.tokens * local.width
    if gate := word * gate_dims(local, widths.out):
        yield KeptBytes("attention gate", gate, gate)
        yield KeptBytes("gated attention output", gate, gate if local.stack.selective == "core" else 0.0)
    # Linear attention has no S x S weights and no log-sum-exp.
    if local.linear:
        yield from attention_core.linear_kept_tensors(local)
        return
    read = _latent_kept(local, widths) if local.shape.mla else _heads_kept(local, widths)
    if local.stack.is_meshwright and local.stack.attention != "flash":
        yield from _scores_kept(local, widths, tuple(read))
        yield KeptBytes("attention output", word * widths.out, word * widths.out, "core")
        return
    yield from read
    # What the kernel copies into its own layout before it starts.
    packed = word * widths.queries * local.stack.core_kept / 2
    if packed:
        yield KeptBytes("packed", packed, 0.0)
    if local.stack.attention == "flash":
        # One fp32 sum per query and head, from which the backward pass recomputes the weights.
        sums = 4 * local.tokens * local.shape.heads / local.tp
        yield KeptBytes("log-sum-exp", sums, sums if local.stack.selective == "alternate" else 0.0, "core")
    else:
        scores = local.tokens * local.sequence * local.shape.heads / local.tp
        yield KeptBytes("softmax", scores * (local.width + local.stack.score_kept), 0.0)
        if local.dropout:
            yield KeptBytes("softmax mask and dropout", scores * (MASK_BYTES + local.width), 0.0)
    made = {"core": widths.out, "products": local.shape.hidden, "alternate": widths.out}[local.stack.selective]
    yield KeptBytes("attention output", word * widths.out, word * made, "core")


def _scores_kept(local: LocalShape, widths: HeadWidths, read: Sequence[KeptBytes]) -> Iterator[KeptBytes]:
    """Yield what Meshwright's plain fp32 attention keeps (kernels/attention/attend.py, attend_reference).

    It keeps its weights, the hidden pairs, and copies of the core's inputs (`read`), one per query head. Compiled code
    recomputes these copies.
    """
    if local.lowered:
        yield from read
    else:
        taken = sum(tensor.none for tensor in read if tensor.part == "core")
        yield from (tensor for tensor in read if tensor.part != "core")
        copies = 4 * local.tokens * (2 * widths.queries + widths.out)
        yield KeptBytes("queries, keys, values in fp32", copies, taken, "scores")
    scores = local.tokens * local.sequence * local.shape.heads / local.tp
    yield KeptBytes("softmax", 4 * scores, 0.0, "scores")
    hidden = (local.batch if local.documents else 1) * local.sequence**2 * MASK_BYTES
    yield KeptBytes("hidden pairs", hidden, 0.0, "scores")
    if local.dropout:
        # To repeat the core, the keys of its masks are kept: int32 per query and head.
        keys = 4 * local.tokens * local.shape.heads / local.tp
        yield KeptBytes("softmax mask and dropout", scores * (4 + MASK_BYTES), keys, "scores")


def _heads_kept(local: LocalShape, widths: HeadWidths) -> Iterator[KeptBytes]:
    """Yield queries, keys and values as the core takes them. torchtitan's policy keeps every other product: q and v."""
    word = local.tokens * local.width
    whole = word * (widths.queries + widths.keys_values)
    if local.repeats:
        repeated = word * 3 * widths.queries if widths.keys_values < 2 * widths.queries else whole
        yield KeptBytes("queries, keys and values of all heads", repeated, whole, "core")
        return
    half = word * (widths.queries + widths.keys_values / 2)
    yield KeptBytes("queries, keys, values", whole, half if local.stack.selective == "alternate" else whole, "core")
    if local.shape.qk_norm or (local.shape.unbuilt is not None and local.shape.unbuilt.qk_norm):
        plain = word * (widths.queries + widths.keys_values / 2) * local.stack.norm_kept / 2
        yield KeptBytes("queries, keys before their norms", plain, 0.0)


def _latent_kept(local: LocalShape, widths: HeadWidths) -> Iterator[KeptBytes]:
    """Yield both low-rank vectors, their norms, assembled queries and keys, and values as a view of their product."""
    mla = local.shape.mla
    assert mla is not None
    word = local.tokens * local.width
    low = (mla.q_rank + mla.kv_rank) * local.stack.norm_kept / 2 + mla.rope_dim
    yield KeptBytes("low ranks", word * low, word * low)
    yield KeptBytes("normed low ranks", word * (mla.q_rank + mla.kv_rank), 0.0, "norm")
    up = local.shape.heads * (mla.nope_dim + mla.v_dim) / local.tp
    yield KeptBytes("queries", word * widths.queries, word * widths.queries, "core")
    yield KeptBytes("keys", word * widths.queries, 0.0, "core")
    yield KeptBytes("keys and values", word * up, word * up, "core")


def _mlp_kept(local: LocalShape) -> Iterator[KeptBytes]:
    yield from _inner_kept(local, "mlp", local.tokens, local.shape.ffn / local.tp, local.stack.activation_kept)
    if local.stack.selective != "core" and not local.lowered:  # compiled code keeps only what gradients read
        yield KeptBytes("mlp output", 0.0, local.hidden_bytes)


def _inner_kept(local: LocalShape, name: str, tokens: float, ffn: float, activation_kept: float) -> Iterator[KeptBytes]:
    """Yield the inner tensors of an MLP.

    `activation_kept` counts bytes of a 16-bit run beyond the activation's inputs.
    """
    inner = tokens * ffn * local.width
    policy = local.stack.selective
    yield KeptBytes(f"{name} up", local.gates * inner, inner if policy == "alternate" else local.gates * inner)
    extra = inner * activation_kept / 2 if local.gates == 2 else inner
    extra *= not local.lowered
    yield KeptBytes(f"{name} activation", extra, extra if policy == "core" else 0.0)


def _experts_kept(local: LocalShape, routed: Routed) -> Iterator[KeptBytes]:
    """Yield scores, the order of the copies, the copies, experts' inner tensors, and their outputs before weighting.

    Grouped products keep the activation, because only a plain MLP has a kernel that recomputes it.
    """
    shape, moe = local.shape, local.shape.moe
    assert moe is not None
    core = local.stack.selective == "core"
    scores = routed.tokens * moe.experts * 4
    yield KeptBytes("router", 2 * scores, 2 * scores if core else scores)
    if local.stack.is_meshwright:
        wide = routed.tokens * shape.hidden * 4 if local.width < 4 else 0.0
        yield KeptBytes("router input in fp32", wide, 0.0)
    order = routed.copies * (2 * INDEX_BYTES + 4)
    yield KeptBytes("order", order, order if core else 0.0)
    sent = routed.copies * shape.hidden * local.width
    yield KeptBytes("dispatched", sent, sent if core else 0.0)
    yield from _inner_kept(local, "experts", routed.copies, routed.ffn, max(2.0, local.stack.activation_kept))
    yield KeptBytes("returned", sent, sent)
    if moe.shared_experts:
        width = moe.shared_experts * moe.ffn / local.tp
        yield from _inner_kept(local, "shared", local.tokens, width, local.stack.activation_kept)
        yield KeptBytes("shared output", 0.0, 0.0 if core else local.hidden_bytes)


def _mask_kept(local: LocalShape, name: str) -> Iterator[KeptBytes]:
    if local.dropout:
        mask = local.between * local.shape.hidden * MASK_BYTES
        yield KeptBytes(f"{name} dropout mask", mask, mask)


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


NO_BYTES = Backward()


def backward(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> Backward:
    """Return the bytes inside a layer's backward pass."""
    if routed:
        mlp = _experts(local, routed) + _rounded_experts(local, routed) + weight_product.restored_bytes(local, "expert")
    else:
        mlp = max(
            _mlp(local), _rounded_mlp(local), local.gates * _gate(local) + weight_product.restored_bytes(local, "mlp")
        )
    # A dense layer's key would have the expert parallelism that is read here.
    weights = largest_weight(local.shape, local.tp, local.ep if routed else 1, routed is not None)
    # The pass walks back: what the MLP kept is free by the time attention is reached.
    released = _released_mlp(local, routed)
    stream = local.hidden_bytes + 2 * local.between_bytes
    # The MLP's weight gradients stay until the compiled pass returns, so attention's moment has them.
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


def _mlp(local: LocalShape) -> float:
    """Return the bytes of an MLP's gradients.

    Gated: the gradient of the product, that of the other gate, and the recomputed product exist together. The first
    becomes the gradient of a gate (kernels/linear/swiglu.py).
    """
    return (local.gates + 1) * _gate(local)


def _lowered_mlp(local: LocalShape) -> float:
    """Return the same for compiled code.

    Gated: the gradient of the product, those of its factors, and the recomputed product. Otherwise the recomputed
    activation and its gradient, whose place the gradient of its input takes.
    """
    return 2 * local.gates * _gate(local)


def _gate(local: LocalShape) -> float:
    """Return the bytes of the gradient of the first product of an MLP, or of each of two."""
    return local.tokens * local.shape.ffn / local.tp * local.width


def _rounded(local: LocalShape, weight: float, rows: float) -> float:
    """Return the peak bytes while a matrix and its rows are narrowed to 8 bits (kernels.fp8.narrow).

    First the matrix, scaled and then narrow, then also the rows. Compiled code and Triton make no scaled copy.
    """
    each = 1 if local.stack.rounds_in_place or (local.compiled and not local.fp8_all) else 1 + local.width
    return max(each * weight, weight + each * rows)


def _rounded_mlp(local: LocalShape) -> float:
    """Return the bytes where the second of two gates is rounded while the sum of their products is held.

    In a split pass the recomputed product is there as well. If weight gradients are also 8-bit products, another moment
    can be worse. There the recomputed product is rounded while its own gradient, that of its output, and, gated, the
    activation are held.
    """
    ffn = local.shape.ffn / local.tp
    inner = local.tokens * ffn
    beside = local.hidden_bytes + local.splits * inner * local.width
    again = (3 if local.gates == 2 else 1) * inner * local.width + _rounded(
        local, local.tokens * local.shape.hidden, inner
    )
    gates = _rounded(local, local.shape.hidden * ffn, inner) + beside
    return max(gates, again * local.fp8_all) if local.fp8 else 0.0


def _rounded_experts(local: LocalShape, routed: Routed) -> float:
    """Return the bytes while experts are rounded.

    Stacks are rounded some experts at a time, together with the rows that they multiply. Both operands of a stack's
    gradient exist in three copies of a byte. Experts are not compiled, and Triton makes no copy.
    """
    assert local.shape.moe is not None
    experts = local.shape.moe.experts / local.ep / local.ep_pieces
    matrix, wider = local.shape.hidden * routed.ffn, max(local.shape.hidden, routed.ffn)
    piece = min(experts, max(1.0, PIECE // matrix)) * matrix
    scaled = 0 if local.stack.rounds_in_place else local.width
    stack, rows = experts * matrix + piece * scaled, (1 + scaled) * routed.copies * wider
    return max(stack, experts * matrix + rows, (local.shape.hidden + routed.ffn) * routed.copies + rows) * local.fp8_all


def _rounded_attention(local: LocalShape, widths: HeadWidths) -> float:
    """Return the bytes where the queries' gradient is rounded while those of keys and values are held."""
    queries, made = local.tokens * widths.queries, local.tokens * (widths.queries + widths.keys_values) * local.width
    read = local.shape.mla.q_rank if local.shape.mla and local.shape.mla.q_rank else local.shape.hidden
    return _rounded(local, read * widths.queries, queries) + made + local.hidden_bytes if local.fp8 else 0.0


def _restored_attention(local: LocalShape, widths: HeadWidths) -> float:
    """Return the bytes where the query matrix is dequantized while gradients of queries, keys and values are held."""
    gradients = local.tokens * (widths.queries + widths.keys_values) * local.width
    return gradients + weight_product.restored_bytes(local, "attention") if local.shape.lora else 0.0


def _experts(local: LocalShape, routed: Routed) -> float:
    """Return the bytes of gradients over copies of tokens. The kept product is freed by then."""
    return (2 * routed.ffn + local.shape.hidden) * routed.copies * local.width


def _left_experts(local: LocalShape, routed: Routed) -> float:
    """Return the bytes held in addition to the weight gradients of a rank's experts.

    First gradients of the first products, whose outputs and activation are freed, then those of rows.
    """
    return max(local.gates * routed.copies * routed.ffn, routed.copies * local.shape.hidden) * local.width


def _released_mlp(local: LocalShape, routed: Routed | None) -> float:
    """Return the bytes that are freed before the pass reaches the attention core."""
    if routed:
        return (3 * routed.copies * routed.ffn + 2 * routed.copies * local.shape.hidden) * local.width
    tensors = local.gates + local.stack.activation_kept / 2 if local.gates == 2 else local.gates
    return tensors * local.tokens * local.shape.ffn / local.tp * local.width


def _attention(local: LocalShape, widths: HeadWidths) -> float:
    """Return the bytes around the attention core.

    With context parallelism (parallel/axes/ring.py, kernels/attention/partial.py) there are copies of the queries, the
    output and its gradient, and their own gradient in fp32. For keys and values a ring holds those of two ranks and
    four fp32 sums. An all-gather holds those of all ranks three times, with their fp32 gradients and the cut ones, or
    once, with the reassembled ones. Stripes are used rank by rank: once, and their fp32 gradients twice.
    """
    if local.linear:
        return attention_core.linear_inside_bytes(local)
    queries, keys_values = local.tokens * widths.queries, local.tokens * widths.keys_values
    if local.stack.is_meshwright and local.stack.attention != "flash":
        return _plain_attention(local, widths)
    if local.cp == 1 and local.draws_by_tile:
        # fp32 copies of what is read, fp32 gradients, and a tile of weights with its hashes, mask and gradient.
        rows = min(attention_core.ROWS, local.sequence) * local.batch * local.shape.heads / local.tp
        return 4 * (3 * queries + 2 * keys_values) + TILE_BYTES * rows * local.sequence
    # Strips of fp32 attention repeat keys and values per head and hold a mask of their own.
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


def _plain_attention(local: LocalShape, widths: HeadWidths) -> float:
    """Return the bytes where the softmax is differentiated, in addition to the kept weights.

    Source: kernels/attention/attend.py, attend_reference. Uncompiled, the gradients of the weights and of the scores, S
    x S in fp32, exist together with the gradient of the values of all heads. A forward pass stores as much: scores,
    scores without hidden pairs, and the pairs. Compiled code writes the gradient of the scores in place of that of the
    weights.
    """
    scores = local.tokens * local.sequence * local.shape.heads / local.tp
    pairs = (local.batch if local.documents else 1) * local.sequence**2 * MASK_BYTES
    return 4 * (1 if local.lowered else 2) * scores + 4 * local.tokens * widths.out + pairs


def queued(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> float:
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


def _queued_mlp(local: LocalShape, ffn: float) -> float:
    return 2 * local.hidden_bytes + (local.gates + 1) * local.tokens * ffn * local.width


def _queued_experts(local: LocalShape, routed: Routed) -> float:
    """Return the same of experts. The router's weight gradient is not deferred."""
    moe = local.shape.moe
    assert moe is not None
    inner, sent = routed.copies * routed.ffn * local.width, routed.copies * local.shape.hidden * local.width
    queued_bytes = 2 * sent + (local.gates + 1) * inner
    if moe.shared_experts:
        queued_bytes += _queued_mlp(local, moe.shared_experts * moe.ffn / local.tp)
    return queued_bytes
