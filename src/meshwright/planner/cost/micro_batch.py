"""One micro-batch on one rank: its local shape, all that the counting needs to know of a layout, and its cost.

A cost is seconds of its passes and bytes at their moments in a part of a model, and sums over such parts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.planner.cost.stack import Stack, plain_code
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import LinearAttention
from meshwright.spec.recipe.recipe import NO_SCHEME
from meshwright.spec.rules.passes import compiles_blocks, is_lowered, keeps_no_norms

MASK_BYTES = 1
"""Bytes per element of a dropout mask."""


@dataclass(frozen=True, kw_only=True)
class LocalShape:
    """One micro-batch on one rank. Its sizes are read hundreds of times, so each is computed once."""

    shape: ModelShape
    stack: Stack
    batch: int
    """Sequences."""
    sequence: int
    """Positions of the whole sequence."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    ring: bool = True
    width: int = 2
    """Bytes of an activation."""
    context_split: str = "zigzag"
    product_width: float = 2.0
    """Bytes of an operand of the layers' products."""
    fp8: bool = False
    """The engine rounds the operands of these products itself (kernels.fp8)."""
    fp8_all: bool = False
    """The engine rounds those of weight gradients and of experts as well."""
    dropout: bool = False
    documents: bool = False
    """Attention is masked between documents."""
    document_tokens: float = 0.0
    """Mean length of the document of a token. 0 = documents fill their rows."""
    compares: bool = False
    """The objective compares pairs: it needs log-probabilities, and recomputes logits in the backward pass."""
    window: int = 0
    """Sliding window of the counted layer."""
    linear: LinearAttention | None = None
    """Linear attention of the counted layer. None = it attends to keys and values."""
    splits: bool = False
    """The schedule splits backward passes and defers weight gradients."""
    compiled: bool = False
    """Blocks are compiled."""
    keeps_norms: bool = True
    """Blocks without recomputation keep the outputs of norms."""
    lowered: bool = False
    """Compiled blocks on a GPU without communication (spec/rules/passes.py).

    Their code recomputes whatever a few passes over kept tensors can produce, and has its own backward pass.
    """
    gpu: bool = False
    """The device's kernels are those of a GPU."""
    pieces: int = 1
    """Pieces of a sequence in tensor-parallel products."""
    rounded: Scheme | None = None
    """Quantization scheme of matrices that are rounded in every product."""
    ep_pieces: int = 1
    """Pieces in which tokens travel to experts."""

    @cached_property
    def repeats(self) -> bool:
        """True if keys and values are kept once per head.

        That is the case on a GPU in fp32, where no strips read them and no compiled code repeats them again.
        """
        apart = self.cp == 1 and not self.masked and not self.lowered and not self.draws_by_tile
        return apart and self.stack.is_meshwright and self.stack.attention == "flash" and self.gpu and self.width >= 4

    @cached_property
    def draws_by_tile(self) -> bool:
        """True if dropout makes a GPU attend tile by tile in fp32 (kernels/attention/blockwise.py)."""
        return self.stack.is_meshwright and self.dropout and self.gpu

    @cached_property
    def masked(self) -> bool:
        """True if keys are hidden by documents, a window or other ranks' positions, and no kernel skips them.

        That is the case in fp32 on a GPU (kernels/attention/varlen.py, kernels/attention/partial.py).
        """
        hidden = 0 < self.window < self.sequence or self.documents or self.cp > 1
        return self.stack.is_meshwright and hidden and self.gpu and self.width >= 4

    @cached_property
    def uneven(self) -> float:
        """Attention work of the busiest rank over the mean.

        Of chunks that is the last, whose queries see all that a window allows. Without a window it is (2 c - 1) / c.
        """
        if self.context_split != "chunks":
            return 1.0
        whole, begin = float(self.sequence), self.sequence * (1 - 1 / self.cp)
        reach = min(self.window or whole, whole)
        narrow = max(reach, begin)  # windows are full from here on
        last = ((narrow**2 - begin**2) / 2 + reach * (whole - narrow)) / (whole - begin)
        return last / (reach - reach**2 / (2 * whole))

    def group(self, axis: str) -> tuple[int, int]:
        """Return (ranks of a group along tp, cp or ep, distance between them)."""
        return (self.cp, self.tp) if axis == "cp" else (self.tp if axis == "tp" else self.ep, 1)

    @cached_property
    def gates(self) -> int:
        """Matrices that read an MLP's input."""
        return 2 if self.shape.mlp == "swiglu" else 1

    @cached_property
    def tokens(self) -> float:
        """N: tokens of the rank."""
        return self.batch * self.sequence / self.cp

    @cached_property
    def between(self) -> float:
        """Tokens of the rank between tensor-parallel regions."""
        return self.tokens / self.tp if self.sp else self.tokens

    @cached_property
    def hidden_bytes(self) -> float:
        """Bytes of a tensor (N, D)."""
        return self.tokens * self.shape.hidden * self.width

    @cached_property
    def between_bytes(self) -> float:
        """Bytes of (N, D) where sequence parallelism shares it."""
        return self.between * self.shape.hidden * self.width


def local_shape(
    shape: ModelShape, stack: Stack, layout: Layout, sequence: int, batch: int, width: int,
    *, dropout: float = 0.0, documents: bool = False, gpu: bool = False, products: str = "same", compares: bool = False,
    fake_quantize: str = NO_SCHEME, document_tokens: float = 0.0,
) -> LocalShape:  # fmt: skip
    """Describe one micro-batch on one rank, as `stack` runs it under `layout`.

    `sequence`: positions of the whole sequence. `batch`: sequences. `width`: bytes of an activation. `products`:
    recipe.products. The rest is as in LocalShape.
    """
    # Features that only the engine has are off for other stacks, whatever the layout says.
    ours = stack.is_meshwright
    kind, positions, moe = "cuda" if gpu else "cpu", sequence // layout.cp, shape.moe
    rows = batch * positions // (layout.tp if layout.sp else 1) * moe.top_k if moe else 0
    lowered = ours and gpu and is_lowered(layout, shape, fake_quantize)
    # The reference kernels keep and move more, as another stack would.
    if ours and layout.kernels == "reference":
        stack = plain_code(stack, layout, width, compiled=lowered)
    return LocalShape(
        shape=shape,
        stack=stack,
        batch=batch,
        sequence=sequence,
        tp=layout.tp,
        sp=layout.sp and layout.tp > 1,
        cp=layout.cp,
        ep=layout.ep,
        ring=layout.context == "ring",
        context_split=layout.context_split,
        width=width,
        product_width=min(width, stack.product_bytes) if width == 2 else width,
        fp8=ours and products != "same",
        fp8_all=ours and products == "fp8-all",
        dropout=stack.dropout or dropout > 0,
        documents=documents and ours,
        document_tokens=document_tokens if documents and ours else 0.0,
        compares=compares and ours,
        splits=ours and layout.splits_every_backward,
        compiled=ours and compiles_blocks(layout, shape, kind, fake_quantize),
        keeps_norms=not (ours and keeps_no_norms(layout, shape, kind, fake_quantize)),
        lowered=lowered,
        gpu=gpu,
        rounded=SCHEMES.get(fake_quantize) if ours else None,
        pieces=layout.tp_pieces(positions, shape.hidden, kind) if ours else 1,
        ep_pieces=layout.ep_pieces(rows, shape.hidden, moe, kind) if ours and moe else 1,
    )


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


NO_LOGITS = Logits(0.0, 0.0, 0.0)
"""Value for every part except the head."""


class MicroBatchCost(NamedTuple):
    """Cost of one micro-batch. Seconds include exposed exchanges, which `exchange_s` counts separately."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    exchange_s: float = 0.0
    again_s: float = 0.0
    """Repeated forward passes within input_s."""
    kept_bytes: float = 0.0
    mlp_bytes: float = 0.0
    """Peak of a layer's backward pass beyond what is kept. In Meshwright's engine, of its MLP."""
    attention_bytes: float = 0.0
    """The same in attention of Meshwright's engine."""
    after_bytes: float = 0.0
    """The same between the two, without weight gradients."""
    outside_bytes: float = 0.0
    """The same when the pass reaches or leaves experts, without `inner_bytes`."""
    inner_bytes: float = 0.0
    """Bytes that experts keep."""
    queued_bytes: float = 0.0
    """Kept from a split backward pass to the weight gradients."""
    split_bytes: float = 0.0
    """Peak of a split pass in its last layer, beyond what it leaves."""
    weights: float = 0.0
    """Elements of the largest weight."""
    new_bytes: float = 0.0
    """Its new gradient, part of mlp_bytes."""
    logits: Logits = NO_LOGITS
    largest_kept_bytes: float = 0.0
    """Kept by the layer that keeps most."""
    host_bytes: float = 0.0
    """Kept in host memory instead."""
    offload_s: float = 0.0
    """Seconds of both passes by which transfers to host memory exceed computation."""

    @property
    def transient_bytes(self) -> float:
        """Peak of a layer's backward pass."""
        return max(self.mlp_bytes, self.attention_bytes)

    @property
    def inputs_bytes(self) -> float:
        """The same of a pass that defers weight gradients."""
        return max(self.mlp_bytes - self.new_bytes, self.attention_bytes)

    @property
    def backward_s(self) -> float:
        """Input and weight gradients together."""
        return self.input_s + self.weight_s

    def plus(self, other: "MicroBatchCost", times: float = 1.0) -> "MicroBatchCost":
        """Return the cost of this part followed by `times` of the other."""
        if not times:
            return self
        return MicroBatchCost(
            forward_s=self.forward_s + times * other.forward_s,
            input_s=self.input_s + times * other.input_s,
            weight_s=self.weight_s + times * other.weight_s,
            exchange_s=self.exchange_s + times * other.exchange_s,
            again_s=self.again_s + times * other.again_s,
            kept_bytes=self.kept_bytes + times * other.kept_bytes,
            mlp_bytes=max(self.mlp_bytes, other.mlp_bytes),
            attention_bytes=max(self.attention_bytes, other.attention_bytes),
            after_bytes=max(self.after_bytes, other.after_bytes),
            outside_bytes=max(self.outside_bytes, other.outside_bytes),
            inner_bytes=max(self.inner_bytes, other.inner_bytes),
            queued_bytes=self.queued_bytes + times * other.queued_bytes,
            split_bytes=max(self.split_bytes, other.split_bytes),
            weights=max(self.weights, other.weights),
            new_bytes=max(self.new_bytes, other.new_bytes),
            logits=self.logits.plus(other.logits, times),
            largest_kept_bytes=max(self.largest_kept_bytes, other.largest_kept_bytes or other.kept_bytes),
            host_bytes=self.host_bytes + times * other.host_bytes,
            offload_s=self.offload_s + times * other.offload_s,
        )

    def offloaded(self, last: "MicroBatchCost", stays_bytes: float, host_bytes_per_s: float) -> "MicroBatchCost":
        """Return the cost of a stage whose blocks except the last keep activations in host memory.

        `stays_bytes` of its input stay. While one block runs backward, the activations of the block before it return.
        """
        # The last block stays: its backward pass begins at once, so a transfer could not hide.
        moved = max(0.0, self.kept_bytes - last.kept_bytes - stays_bytes)
        ahead = self.largest_kept_bytes if moved else 0.0
        # Each way overlaps with its own pass; only the excess is exposed.
        way_s = moved / host_bytes_per_s if host_bytes_per_s else 0.0
        forward_s, backward_s = max(0.0, way_s - self.forward_s), max(0.0, way_s - self.backward_s)
        return self._replace(
            kept_bytes=self.kept_bytes - moved,
            host_bytes=moved,
            mlp_bytes=self.mlp_bytes + ahead,
            attention_bytes=self.attention_bytes + ahead,
            after_bytes=self.after_bytes + ahead,
            outside_bytes=self.outside_bytes + ahead,
            forward_s=self.forward_s + forward_s,
            input_s=self.input_s + backward_s,
            offload_s=forward_s + backward_s,
        )

    def followed_by(self, other: "MicroBatchCost") -> "MicroBatchCost":
        """Return the cost of a stage whose first layers are followed by `other`.

        Its backward pass begins inside `other`, when most is kept, and ends inside the first layers.
        """
        return self.plus(other)._replace(
            mlp_bytes=other.mlp_bytes,
            attention_bytes=other.attention_bytes,
            after_bytes=other.after_bytes,
            outside_bytes=other.outside_bytes,
            inner_bytes=other.inner_bytes,
            split_bytes=self.split_bytes,
        )


NO_COST = MicroBatchCost()
