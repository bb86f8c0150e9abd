"""Activations that a layer, the embedding and the head keep from a micro-batch's forward to its backward pass.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198) section 4 for the plain transformer (34 S B D + 5 H S^2 B, exact in
the tests). Meshwright's own stack follows its model (tests count the tensors that stay alive). Other stacks follow
their source code, as the fields of `Stack` say.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.cost import attention_core
from meshwright.planner.cost.work import KeptBytes
from meshwright.spec.memory.buffers import ADDED_AT_ONCE, padded_columns
from meshwright.spec.rules.quantized_weights import holds_codes

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape

INDEX_BYTES = 8
"""Bytes of an int64 index."""
MASK_BYTES = 1
"""Bytes per element of a dropout mask."""
STREAMS = 3
"""Whole hidden states alive at once in a layer's backward pass, beside its widest place.

They are the gradients of the stream, of a branch and of its normed input. Where sequence parallelism shares the stream,
they are what was gathered and what is to be scattered.
"""


class HeadWidths(NamedTuple):
    """Dims of attention on a rank: of all query heads, of keys and values together, of the core's output."""

    queries: float
    keys_values: float
    out: float


class Routed(NamedTuple):
    """Tokens that a rank routes, copies of tokens that its experts see, inner width of one expert."""

    tokens: float
    copies: float
    ffn: float


def kept_tensors(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> tuple[KeptBytes, ...]:
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


class Logits(NamedTuple):
    """Bytes around head, loss and the norm before them.

    `kept_bytes` stay until the head's backward pass, `held_bytes` of them until the last layer's. `chunk` and `matrix`
    are the extra bytes at the head's worst moments: in a chunk of logits, and when the gradient of its matrix is
    computed. A dropout mask of the embedding counts as kept.
    """

    kept_bytes: float
    held_bytes: float
    chunk: float
    matrix: float = 0.0

    @property
    def transient(self) -> float:
        """The larger of the two extra moments."""
        return max(self.chunk, self.matrix)

    def plus(self, other: "Logits", times: float) -> "Logits":
        """Return the sum of what both keep. Their extra moments do not coincide."""
        if not times:
            return self
        kept_bytes = self.kept_bytes + times * other.kept_bytes
        held_bytes = self.held_bytes + times * other.held_bytes
        return Logits(kept_bytes, held_bytes, max(self.chunk, other.chunk), max(self.matrix, other.matrix))


NONE = Logits(0.0, 0.0, 0.0)
"""Value for every part except the head."""


def embedding_mask(local: "LocalShape") -> Logits:
    """Return what the embedding keeps: its dropout mask."""
    mask = local.between * local.shape.hidden * MASK_BYTES if local.dropout else 0.0
    return Logits(mask, mask, 0.0)


def logits(local: "LocalShape") -> Logits:
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


def _chunk_bytes(local: "LocalShape", logits: float, matrix: float) -> tuple[float, float]:
    """Return the extra bytes of a chunk and of the matrix gradient.

    A chunk's logits exist as computed, and in fp32 where the loss copies them. A CPU adds to a 16-bit matrix gradient
    in pieces outside the product, beside the logits.
    """
    copied = 0 if local.stack.loss_in_place or local.width == 4 else 4
    made = local.hidden_bytes + logits * local.width
    added = min(matrix, ADDED_AT_ONCE) * (local.width + 4) if local.width < 4 and not local.gpu else 0.0
    return made + logits * copied, made + added


def head_columns(local: "LocalShape") -> float:
    """Return the logits of a token on a rank as stored.

    Meshwright pads those of a GPU (kernels/loss/cross_entropy.py).
    """
    vocab = local.shape.vocab / local.tp
    return float(padded_columns(ceil(vocab), local.width)) if local.stack.pads_head and local.gpu else vocab


def head_rows(local: "LocalShape") -> float:
    """Return the tokens of a chunk of the head."""
    vocab = local.shape.vocab / local.tp
    return max(1.0, min(local.tokens, max(256.0, local.stack.head_chunk_bytes / (4 * vocab))))


def divergence_chunk(local: "LocalShape", buffers: int) -> float:
    """Return the bytes of a chunk of a distillation loss, beside the teacher's hidden states (`local`).

    `buffers` fp32 tensors of logits exist at once, and the gradient of the student's logits in the width of products.
    """
    vocab = local.shape.vocab / local.tp
    rows = max(1.0, min(local.tokens, max(256.0, local.stack.head_chunk_bytes / (4 * buffers * vocab))))
    laid = head_columns(local)
    copied = local.width if local.width < 4 or laid > vocab else 0
    return local.hidden_bytes + rows * laid * (4 * buffers + copied)


def layer_transient(local: "LocalShape", routed: Routed | None) -> float:
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


def _norm_kept(local: "LocalShape", name: str) -> tuple[KeptBytes, KeptBytes]:
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


def _mlp_norm_kept(local: "LocalShape", routed: Routed | None) -> tuple[KeptBytes, ...]:
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


def gate_dims(local: "LocalShape", out: float) -> float:
    """Return the columns of a projection that gates an attention output of `out` dims. 0 = no gate."""
    gated = local.linear or (local.shape.unbuilt and local.shape.unbuilt.gated_attention)
    return out if gated else 0.0


def _attention_kept(local: "LocalShape", widths: HeadWidths) -> Iterator[KeptBytes]:
    word = local.tokens * local.width
    if gate := word * gate_dims(local, widths.out):
        yield KeptBytes("attention gate", gate, gate)
        yield KeptBytes("gated attention output", gate, gate if local.stack.selective == "core" else 0.0)
    # linear attention has no S x S weights and no log-sum-exp
    if local.linear:
        yield from attention_core.linear_kept_tensors(local)
        return
    read = _latent_kept(local, widths) if local.shape.mla else _heads_kept(local, widths)
    if local.stack.is_meshwright and local.stack.attention != "flash":
        yield from _scores_kept(local, widths, tuple(read))
        yield KeptBytes("attention output", word * widths.out, word * widths.out, "core")
        return
    yield from read
    # what the kernel copies into its own layout before it starts
    packed = word * widths.queries * local.stack.core_kept / 2
    if packed:
        yield KeptBytes("packed", packed, 0.0)
    if local.stack.attention == "flash":
        # one fp32 sum per query and head, from which the backward pass recomputes the weights
        sums = 4 * local.tokens * local.shape.heads / local.tp
        yield KeptBytes("log-sum-exp", sums, sums if local.stack.selective == "alternate" else 0.0, "core")
    else:
        scores = local.tokens * local.sequence * local.shape.heads / local.tp
        yield KeptBytes("softmax", scores * (local.width + local.stack.score_kept), 0.0)
        if local.dropout:
            yield KeptBytes("softmax mask and dropout", scores * (MASK_BYTES + local.width), 0.0)
    made = {"core": widths.out, "products": local.shape.hidden, "alternate": widths.out}[local.stack.selective]
    yield KeptBytes("attention output", word * widths.out, word * made, "core")


def _scores_kept(local: "LocalShape", widths: HeadWidths, read: Sequence[KeptBytes]) -> Iterator[KeptBytes]:
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
        yield KeptBytes("softmax mask and dropout", scores * (4 + (MASK_BYTES if local.gpu else 4)), 0.0, "scores")


def _heads_kept(local: "LocalShape", widths: HeadWidths) -> Iterator[KeptBytes]:
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


def _latent_kept(local: "LocalShape", widths: HeadWidths) -> Iterator[KeptBytes]:
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


def _mlp_kept(local: "LocalShape") -> Iterator[KeptBytes]:
    yield from _inner_kept(local, "mlp", local.tokens, local.shape.ffn / local.tp, local.stack.activation_kept)
    if local.stack.selective != "core" and not local.lowered:  # compiled code keeps only what gradients read
        yield KeptBytes("mlp output", 0.0, local.hidden_bytes)


def _inner_kept(
    local: "LocalShape", name: str, tokens: float, ffn: float, activation_kept: float
) -> Iterator[KeptBytes]:
    """Yield the inner tensors of an MLP.

    `activation_kept` counts bytes of a 16-bit run beyond the activation's inputs.
    """
    inner = tokens * ffn * local.width
    policy = local.stack.selective
    yield KeptBytes(f"{name} up", local.gates * inner, inner if policy == "alternate" else local.gates * inner)
    extra = inner * activation_kept / 2 if local.gates == 2 else inner
    extra *= not local.lowered
    yield KeptBytes(f"{name} activation", extra, extra if policy == "core" else 0.0)


def _experts_kept(local: "LocalShape", routed: Routed) -> Iterator[KeptBytes]:
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


def _mask_kept(local: "LocalShape", name: str) -> Iterator[KeptBytes]:
    if local.dropout:
        mask = local.between * local.shape.hidden * MASK_BYTES
        yield KeptBytes(f"{name} dropout mask", mask, mask)
