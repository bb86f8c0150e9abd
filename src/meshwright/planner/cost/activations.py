"""What a layer, the embedding and the head keep from a micro-batch's forward pass to its backward pass, on one rank.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198) section 4 for the plain transformer (34 S B D + 5 H S^2 B, exact in
the tests); the model of this package for its own stack (tests count the tensors that stay alive); the source code of
the others, as the fields of `Stack` say.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.cost import state_layers
from meshwright.planner.cost.work import KeptBytes
from meshwright.spec.aligned_products import padded_columns
from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.head_chunk import ADDED_AT_ONCE

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local

INDEX_BYTES = 8
"""An int64."""
MASK_BYTES = 1
"""Of a dropped element."""
STREAMS = 3
"""Whole hidden states alive at once in a layer's backward pass beside its widest place: gradients of the stream, of a
branch and of its normed input; where sequence parallelism shares the stream, what is gathered and to be scattered."""


class HeadWidths(NamedTuple):
    """Dims of the attention of a rank: of all query heads, of keys and values together, of what the core makes."""

    queries: float
    keys_values: float
    out: float


class Routed(NamedTuple):
    """Tokens that a rank routes, copies of tokens that its experts see, inner width of one of them."""

    tokens: float
    copies: float
    ffn: float


def layer_kept(of: "Local", widths: HeadWidths, routed: Routed | None) -> tuple[KeptBytes, ...]:
    """Of one layer."""
    found = [*_norm_kept(of, "attention"), *_attention_kept(of, widths), *_mask_kept(of, "attention")]
    if of.shape.unbuilt is not None and of.shape.unbuilt.block_norms == 4:
        found += [_norm_kept(of, "attention out")[0], _norm_kept(of, "mlp out")[0]]
    found += [*_mlp_norm_kept(of, routed), *(_experts_kept(of, routed) if routed else _mlp_kept(of))]
    found += _mask_kept(of, "mlp")
    if of.tp > 1 and of.stack.tensor_kept:
        copies = of.hidden_bytes * of.stack.tensor_kept / 2
        found.append(KeptBytes("inputs of column-split products", copies, copies))
    return tuple(found)


class Logits(NamedTuple):
    """Bytes that head, loss and the norm in front of them keep until their backward pass, those of them that stay until
    the last layer's, and bytes more at the worst moments of the head: in a chunk of logits, and where the matrix's
    gradient is made. A dropout mask of the embedding stays too."""

    kept: float
    held: float
    chunk: float
    matrix: float = 0.0

    @property
    def transient(self) -> float:
        """The worse of the two."""
        return max(self.chunk, self.matrix)

    def plus(self, other: "Logits", times: float) -> "Logits":
        """Both kept, one moment at a time."""
        if not times:
            return self
        kept, held = self.kept + times * other.kept, self.held + times * other.held
        return Logits(kept, held, max(self.chunk, other.chunk), max(self.matrix, other.matrix))


NONE = Logits(0.0, 0.0, 0.0)
"""Of all but the head."""


def embedding_mask(of: "Local") -> Logits:
    """What the embedding keeps: its dropout mask."""
    mask = of.between * of.shape.hidden * MASK_BYTES if of.dropout else 0.0
    return Logits(mask, mask, 0.0)


def logits(of: "Local") -> Logits:
    """Of one micro-batch."""
    stack, shape = of.stack, of.shape
    ranks = of.tp if stack.vocab_parallel else 1
    vocab = shape.vocab / ranks
    stream, normed = (kept.none for kept in _norm_kept(of, "head"))
    if stack.head_chunk_bytes:  # makes both gradients at once: that of its input, and an fp32 one of its matrix
        laid = head_columns(of)
        matrix = 0.0 if shape.lora else laid * shape.hidden
        made = of.tokens * shape.hidden * of.width + matrix * 4 + (normed if of.compares else 0.0)
        return Logits(stream + made, 0.0, *_chunk_bytes(of, head_rows(of) * laid, matrix))
    count = of.tokens * vocab
    peak = stack.logit_peak + (stack.tensor_logit if of.tp > 1 else 0.0)
    kept = stream + normed + count * stack.logit_kept
    return Logits(kept, count * stack.logit_held, count * (peak - stack.logit_kept))


def _chunk_bytes(of: "Local", logits: float, matrix: float) -> tuple[float, float]:
    """A chunk's logits as they are made, and in fp32 where losses take a copy; then what a CPU adds to the matrix's
    gradient at a time beside its logits, in 16 bits, which it does not add inside the product."""
    copied = 0 if of.stack.loss_in_place or of.width == 4 else 4
    made = of.hidden_bytes + logits * of.width
    added = min(matrix, ADDED_AT_ONCE) * (of.width + 4) if of.width < 4 and not of.gpu else 0.0
    return made + logits * copied, made + added


def head_columns(of: "Local") -> float:
    """Logits of a token on a rank as they lie in memory: this package pads those of a GPU (kernels/head_matrix.py)."""
    vocab = of.shape.vocab / of.tp
    return float(padded_columns(ceil(vocab), of.width)) if of.stack.pads_head and of.gpu else vocab


def head_rows(of: "Local") -> float:
    """Tokens of a chunk of the head."""
    vocab = of.shape.vocab / of.tp
    return max(1.0, min(of.tokens, max(256.0, of.stack.head_chunk_bytes / (4 * vocab))))


def divergence_chunk(of: "Local", buffers: int) -> float:
    """Bytes of a chunk of a distillation loss beside hidden states of the teacher `of`, with so many fp32 tensors of
    logits at once, and the gradient of the student's in the width of products."""
    vocab = of.shape.vocab / of.tp
    rows = max(1.0, min(of.tokens, max(256.0, of.stack.head_chunk_bytes / (4 * buffers * vocab))))
    laid = head_columns(of)
    copied = of.width if of.width < 4 or laid > vocab else 0
    return of.hidden_bytes + rows * laid * (4 * buffers + copied)


def layer_transient(of: "Local", routed: Routed | None) -> float:
    """Gradients alive at once inside a layer's backward pass: those of its widest place, and of the stream.

    Where the activation was kept, its place is free by the time those of its inputs are made. Written-out scores have a
    gradient before and one after the softmax, in fp32 too where it runs in fp32.
    """
    again = of.gates == 2 and not routed and not of.stack.activation_kept
    tokens, ffn = (routed.copies, routed.ffn) if routed else (of.tokens, of.shape.ffn / of.tp)
    widest = (of.gates + again) * tokens * ffn * of.width
    if of.stack.attention != "flash":
        word = 2 * of.width + (8 if of.stack.score_kept else 0)
        widest = max(widest, of.tokens * of.sequence * of.shape.heads / of.tp * word)
    return max(widest, state_layers.inside_bytes(of)) + STREAMS * of.hidden_bytes


def _norm_kept(of: "Local", name: str) -> tuple[KeptBytes, KeptBytes]:
    """The residual stream at this point, and the normed input of the matrices behind."""
    stream = of.between * of.shape.hidden * of.stack.norm_kept * of.width / 2
    coded = of.sp and holds_codes(of.shape)  # beside codes what was gathered is kept, which no norm has made
    normed = of.between_bytes if of.stack.regather and of.sp and not coded else of.hidden_bytes
    core = of.stack.selective == "core"
    first = of.between_bytes if name == "attention" else 0.0
    return (
        KeptBytes(f"{name} norm input", stream, stream if core else first),
        KeptBytes(f"{name} norm output", normed, normed if core else 0.0, "" if coded else "norm"),
    )


def _mlp_norm_kept(of: "Local", routed: Routed | None) -> tuple[KeptBytes, ...]:
    """A router keeps an fp32 copy of its input, and what is dispatched is a copy too: nobody keeps the input itself."""
    stream, normed = _norm_kept(of, "mlp")
    copied = of.stack.own and of.width < 4 and routed and not (of.shape.moe and of.shape.moe.shared_experts)
    return (stream,) if copied else (stream, normed)


def gate_dims(of: "Local", out: float) -> float:
    """Columns of a projection that weighs what attention makes of `out` dims; 0 = there is none."""
    gated = of.linear or (of.shape.unbuilt and of.shape.unbuilt.gated_attention)
    return out if gated else 0.0


def _attention_kept(of: "Local", widths: HeadWidths) -> Iterator[KeptBytes]:
    word = of.tokens * of.width
    if gate := word * gate_dims(of, widths.out):
        yield KeptBytes("attention gate", gate, gate)
        yield KeptBytes("gated attention output", gate, gate if of.stack.selective == "core" else 0.0)
    if of.linear:
        yield from state_layers.kept(of)
        return
    read = _latent_kept(of, widths) if of.shape.mla else _heads_kept(of, widths)
    if of.stack.own and of.stack.attention != "flash":
        yield from _scores_kept(of, widths, tuple(read))
        yield KeptBytes("attention output", word * widths.out, word * widths.out, "core")
        return
    yield from read
    packed = word * widths.queries * of.stack.core_kept / 2
    if packed:
        yield KeptBytes("packed", packed, 0.0)
    if of.stack.attention == "flash":
        sums = 4 * of.tokens * of.shape.heads / of.tp
        yield KeptBytes("log-sum-exp", sums, sums if of.stack.selective == "alternate" else 0.0, "core")
    else:
        scores = of.tokens * of.sequence * of.shape.heads / of.tp
        yield KeptBytes("softmax", scores * (of.width + of.stack.score_kept), 0.0)
        if of.dropout:
            yield KeptBytes("softmax mask and dropout", scores * (MASK_BYTES + of.width), 0.0)
    made = {"core": widths.out, "products": of.shape.hidden, "alternate": widths.out}[of.stack.selective]
    yield KeptBytes("attention output", word * widths.out, word * made, "core")


def _scores_kept(of: "Local", widths: HeadWidths, read: Sequence[KeptBytes]) -> Iterator[KeptBytes]:
    """Yield what this package's plain attention keeps (kernels/attention.py, attend_reference), which is in fp32.

    It keeps its weights, the hidden pairs, and copies of the core's inputs (`read`), one for each query head. Compiled
    code makes these copies again.
    """
    if of.lowered:
        yield from read
    else:
        taken = sum(kept.none for kept in read if kept.of == "core")
        yield from (kept for kept in read if kept.of != "core")
        copies = 4 * of.tokens * (2 * widths.queries + widths.out)
        yield KeptBytes("queries, keys, values in fp32", copies, taken, "scores")
    scores = of.tokens * of.sequence * of.shape.heads / of.tp
    yield KeptBytes("softmax", 4 * scores, 0.0, "scores")
    hidden = (of.batch if of.documents else 1) * of.sequence**2 * MASK_BYTES
    yield KeptBytes("hidden pairs", hidden, 0.0, "scores")
    if of.dropout:
        yield KeptBytes("softmax mask and dropout", scores * (4 + (MASK_BYTES if of.gpu else 4)), 0.0, "scores")


def _heads_kept(of: "Local", widths: HeadWidths) -> Iterator[KeptBytes]:
    """Queries, keys and values as the core takes them. torchtitan's policy keeps every other product: q and v."""
    word = of.tokens * of.width
    whole = word * (widths.queries + widths.keys_values)
    if of.repeats:
        repeated = word * 3 * widths.queries if widths.keys_values < 2 * widths.queries else whole
        yield KeptBytes("queries, keys and values of all heads", repeated, whole, "core")
        return
    half = word * (widths.queries + widths.keys_values / 2)
    yield KeptBytes("queries, keys, values", whole, half if of.stack.selective == "alternate" else whole, "core")
    if of.shape.qk_norm or (of.shape.unbuilt is not None and of.shape.unbuilt.qk_norm):
        plain = word * (widths.queries + widths.keys_values / 2) * of.stack.norm_kept / 2
        yield KeptBytes("queries, keys before their norms", plain, 0.0)


def _latent_kept(of: "Local", widths: HeadWidths) -> Iterator[KeptBytes]:
    """Both low-rank vectors and their norms, queries and keys put together, values as a view of their product."""
    mla = of.shape.mla
    assert mla is not None
    word = of.tokens * of.width
    low = (mla.q_rank + mla.kv_rank) * of.stack.norm_kept / 2 + mla.rope_dim
    yield KeptBytes("low ranks", word * low, word * low)
    yield KeptBytes("normed low ranks", word * (mla.q_rank + mla.kv_rank), 0.0, "norm")
    up = of.shape.heads * (mla.nope_dim + mla.v_dim) / of.tp
    yield KeptBytes("queries", word * widths.queries, word * widths.queries, "core")
    yield KeptBytes("keys", word * widths.queries, 0.0, "core")
    yield KeptBytes("keys and values", word * up, word * up, "core")


def _mlp_kept(of: "Local") -> Iterator[KeptBytes]:
    yield from _inner_kept(of, "mlp", of.tokens, of.shape.ffn / of.tp, of.stack.activation_kept)
    if of.stack.selective != "core" and not of.lowered:  # compiled code keeps no result that no gradient reads
        yield KeptBytes("mlp output", 0.0, of.hidden_bytes)


def _inner_kept(of: "Local", name: str, tokens: float, ffn: float, activation_kept: float) -> Iterator[KeptBytes]:
    """`activation_kept`: bytes of a 16-bit run beyond what goes into the activation."""
    inner = tokens * ffn * of.width
    policy = of.stack.selective
    yield KeptBytes(f"{name} up", of.gates * inner, inner if policy == "alternate" else of.gates * inner)
    extra = inner * activation_kept / 2 if of.gates == 2 else inner
    extra *= not of.lowered
    yield KeptBytes(f"{name} activation", extra, extra if policy == "core" else 0.0)


def _experts_kept(of: "Local", routed: Routed) -> Iterator[KeptBytes]:
    """Scores, the order of the copies, the copies, what experts make of them, and their results before they are
    weighed. Grouped products keep the activation: only a plain MLP has a kernel that makes it again."""
    shape, moe = of.shape, of.shape.moe
    assert moe is not None
    core = of.stack.selective == "core"
    scores = routed.tokens * moe.experts * 4
    yield KeptBytes("router", 2 * scores, 2 * scores if core else scores)
    if of.stack.own:
        wide = routed.tokens * shape.hidden * 4 if of.width < 4 else 0.0
        yield KeptBytes("router input in fp32", wide, 0.0)
    order = routed.copies * (2 * INDEX_BYTES + 4)
    yield KeptBytes("order", order, order if core else 0.0)
    sent = routed.copies * shape.hidden * of.width
    yield KeptBytes("dispatched", sent, sent if core else 0.0)
    yield from _inner_kept(of, "experts", routed.copies, routed.ffn, max(2.0, of.stack.activation_kept))
    yield KeptBytes("returned", sent, sent)
    if moe.shared_experts:
        width = moe.shared_experts * moe.ffn / of.tp
        yield from _inner_kept(of, "shared", of.tokens, width, of.stack.activation_kept)
        yield KeptBytes("shared output", 0.0, 0.0 if core else of.hidden_bytes)


def _mask_kept(of: "Local", name: str) -> Iterator[KeptBytes]:
    if of.dropout:
        mask = of.between * of.shape.hidden * MASK_BYTES
        yield KeptBytes(f"{name} dropout mask", mask, mask)
