"""Operations and kept tensors of one layer, of the embedding and of the head, for one micro-batch on one rank.

Letters as in docs/notation.md: N tokens of the rank (B S / cp), D hidden, H and K heads times head_dim, F ffn, V vocab,
t the tensor-parallel degree. Sequence parallelism divides by t what lies between tensor-parallel regions: `between`.
Kept bytes follow Korthikanti et al. 2022 (arXiv:2205.05198) section 4, which tests check against the closed forms
34 S B D + 5 H S^2 B, and Meshwright's own model. LayerWork says what each recompute policy keeps and repeats.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from meshwright.planner.cost import activations, attention_core, exchanges, weight_product
from meshwright.planner.cost.activations import NO_BYTES, Backward, backward
from meshwright.planner.cost.attention_core import without_weights
from meshwright.planner.cost.micro_batch import NO_LOGITS, HeadWidths, LocalShape, Logits, Routed
from meshwright.planner.cost.recorded import with_fields
from meshwright.planner.cost.weight_product import accumulated, grouped, linear
from meshwright.planner.cost.work import (
    NO_EXCHANGES,
    Exchange,
    Exchanges,
    KeptBytes,
    LayerOperation,
    MemoryPass,
    Work,
    in_fp32,
)
from meshwright.planner.kernels.kernel_operations import Product

SUMMED_BYTES = 8.0
"""Bytes per element of an fp32 sum of gradients, read and written."""
COLUMNS = ("qkv", "q", "q_down", "kv_down")
"""Products that read the input of attention."""
EXPERT_BIAS = ((28, 3), (44, 7))
"""Cost of adding expert biases, forward and backward: (bytes moved per element of the output, launches per expert).

Forward: a bias times probabilities in fp32 (4), the sum (10), all parts joined (8) and rounded (6). Backward: widened
(6), the sum's gradient rounded (6) and cut (8), products with probabilities and with the bias summed (24).
NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias.
"""


class PolicyBytes(NamedTuple):
    """Bytes of a layer under a recompute policy."""

    kept_bytes: float
    """Bytes from the forward to the backward pass of a micro-batch."""
    again_bytes: float
    """Restored for the layer's backward pass, in addition to what was kept. Norms are restored one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """A layer (or the embedding, or the head) as operations and kept tensors.

    `boundary_bytes`: its input, which is all that full recomputation keeps. `transient_bytes`: alive only inside its
    backward pass. `backward`: the same for Meshwright's engine, moment by moment. `logits`: what head and loss keep.
    """

    operations: tuple[LayerOperation, ...]
    tensors: tuple[KeptBytes, ...] = ()
    boundary_bytes: float = 0.0
    transient_bytes: float = 0.0
    backward: Backward = NO_BYTES
    logits: Logits = NO_LOGITS
    tail: int = 0
    """Number of last operations whose outputs are not kept. Recomputation ends before them."""
    keeps_norms: bool = True
    """Outputs of norms are kept if nothing is recomputed.

    Compiled code recomputes them (spec/rules/passes.py).
    """

    @property
    def keeps_core(self) -> bool:
        """True if the core's output can be kept while everything else is recomputed.

        The compiler does not recompute a part that it must leave alone (parallel/blocks/compiling.py): experts whose
        rows travel.
        """
        return any(tensor.part == "core" for tensor in self.tensors)

    def by_policy(self, *, alone: bool = True) -> dict[str, PolicyBytes]:
        """Return the bytes under each recompute policy.

        `alone`: tensors are restored one by one, as in Meshwright's engine. Otherwise everything that was not kept
        exists together with what was.
        """
        none = norms = selective = core = dropped = widest = 0.0
        # One walk over the tensors sums up all policies, since a search asks for each.
        for _, all_bytes, selective_bytes, part in self.tensors:
            if part != "norm":
                norms += all_bytes
            if part != "norm" or self.keeps_norms:
                none += all_bytes
                selective += selective_bytes
                dropped += max(0.0, all_bytes - selective_bytes)
                if part == "norm":
                    widest = max(widest, all_bytes)
            if part in ("core", "scores"):
                core += all_bytes
        kept_by_policy = {"none": none, "norms": norms, "selective": selective,
                "all-but-attention": self.boundary_bytes + core, "full": self.boundary_bytes}  # fmt: skip
        # Restored one by one, only the largest exists in addition to the others; "norms" needs one norm at a time.
        again_by_policy = {"norms": widest, "selective": dropped} if alone else {}
        return {
            policy: PolicyBytes(size, again_by_policy.get(policy, max(0.0, none - size)))
            for policy, size in kept_by_policy.items()
        }

    def kept_bytes(self, recompute: str) -> float:
        """Return the bytes from the forward to the backward pass of a micro-batch."""
        return self.by_policy()[recompute].kept_bytes


def with_attention_kind(local: LocalShape, window: int, *, state: bool) -> LocalShape:
    """Return the shape of a layer with this window, or with the shape's linear attention."""
    if not (window or state):
        return local
    return with_fields(
        local, window=window, linear=local.shape.unbuilt.linear if state and local.shape.unbuilt else None
    )


def first_half(local: LocalShape) -> tuple[LayerOperation, ...]:
    """Return a block's norm, attention and residual. They do not depend on expert parallelism."""
    return _norm(local, "attention_norm"), *_attention(local), _add(local)


def layer(
    local: LocalShape, *, window: int = 0, routed: bool = False, state: bool = False,
    attention: tuple[LayerOperation, ...] | None = None,
) -> LayerWork:  # fmt: skip
    """Return the work of a transformer block.

    Args:
        state: The layer has the shape's linear attention.
        attention: First half, if another block has counted it already.
    """
    local = with_attention_kind(local, window, state=state)
    mlp = _experts(local) if routed else _mlp(local, local.shape.ffn / local.tp, local.tokens)
    operations = [*(attention or first_half(local)), _norm(local, "mlp_norm"), *mlp, _add(local)]
    # Some models also norm the output of each half.
    if local.shape.unbuilt is not None and local.shape.unbuilt.block_norms == 4:
        operations += [_norm(local, "attention_norm"), _norm(local, "mlp_norm")]
    sizes, widths = _routed(local) if routed else None, _widths(local)
    tensors = activations.kept_tensors(local, widths, sizes)
    tensors = weight_product.with_adapters(local, widths, sizes, tensors)
    tensors = weight_product.with_rounded_activations(local, widths, routed, tensors)
    if local.stack.drops_scores_alone:
        tensors = tuple(
            tensor if tensor.part == "scores" else tensor._replace(selective=tensor.none) for tensor in tensors
        )
    shares, restored_bytes = dict(local.stack.kept_shares), 0.0
    if shares:
        restored_bytes = sum(tensor.none * (1 - shares.get(tensor.name, 1.0)) for tensor in tensors)
        tensors = tuple(tensor._replace(none=tensor.none * shares.get(tensor.name, 1.0)) for tensor in tensors)
    # Experts apart split the compiled block, and what crosses the borders is stored, norms too (keeps_no_norms).
    if local.compiled and routed and local.ep > 1:
        tensors = tuple(tensor._replace(part="") for tensor in tensors)
    return LayerWork(
        operations=weight_product.rounding(local, operations),
        tensors=tensors,
        boundary_bytes=local.between_bytes,
        # An upper bound: as if a layer's backward pass restored all of them before the first is read.
        transient_bytes=activations.layer_transient(local, sizes) + restored_bytes,
        backward=backward(local, widths, sizes) if local.stack.is_meshwright else NO_BYTES,
        tail=(2 if routed else 3) if local.stack.is_meshwright else 0,  # product, its sum over ranks, residual
        keeps_norms=local.keeps_norms,
    )


def embedding(local: LocalShape) -> LayerWork:
    """Return the work of the embedding. With tp each rank looks up its part of the vocabulary, and parts are summed."""
    moved = local.tokens * local.shape.hidden * local.width
    summed = exchanges.leave(local)
    look_up = LayerOperation(name="embed", forward=(MemoryPass(2 * moved),), exchanges=summed._replace(backward=()))
    if not local.shape.lora:
        look_up = look_up._replace(weights=(MemoryPass(3 * moved),), exchanges=summed)
    return LayerWork(operations=(look_up,), logits=activations.embedding_mask(local))


def head(local: LocalShape) -> LayerWork:
    """Return the work of norm, product with the vocabulary, and cross-entropy.

    A chunked head computes all three products in the forward pass. If log-probabilities are compared, it computes them
    in the backward pass and recomputes the logits.
    """
    stack, shape, width = local.stack, local.shape, float(local.width)
    vocab = shape.vocab / local.tp
    chunks = local.tokens / activations.head_rows(local)
    laid = activations.head_columns(local) if stack.head_chunk_bytes else vocab
    product = Product(local.tokens, shape.hidden, laid, width=width)
    data, weight = product._replace(k=laid, n=shape.hidden), product._replace(m=shape.hidden, k=local.tokens)
    enter = exchanges.enter(local, alone=bool(stack.head_chunk_bytes))
    read = local.width if stack.loss_in_place and local.gpu else 4
    softmax = MemoryPass(local.tokens * vocab * 3 * read * stack.passes * stack.loss_passes, 4)
    # Logits of one chunk exist at a time: their gradients follow at once, chunk by chunk.
    if stack.head_chunk_bytes:
        summed: tuple[Work, ...] = (weight, MemoryPass(chunks * vocab * shape.hidden * SUMMED_BYTES))
        if local.gpu and stack.is_meshwright:  # the product itself adds to the sum of all chunks
            summed = (weight._replace(k=local.tokens / chunks, moved=SUMMED_BYTES, calls=ceil(chunks)),)
        forward: tuple[Work, ...] = (product, softmax, data, *(() if shape.freezes_head else summed))
        parts = ceil(chunks)
        each = (
            local.tokens / parts * 4
        )  # first the largest logit of a row, then its exponential sum and its target's logit
        loss = tuple(Exchange("tp", "all-reduce", size, parts) for size in (each, 2 * each)) if local.tp > 1 else ()
        # Pairs are compared before any gradient exists, so chunks are walked a second time.
        if local.compares:
            both = Exchanges(enter.forward + loss + exchanges.answer_sums(local), loss + enter.backward)
            operation = LayerOperation(name="head", forward=(product, softmax), inputs=forward, exchanges=both)
        else:
            both = Exchanges(enter.forward + loss, enter.backward)
            operation = LayerOperation(name="head", forward=forward, exchanges=both)
    else:
        operation = LayerOperation(
            name="head", forward=(product, softmax), inputs=(data, softmax),
            weights=(weight, *accumulated(local, vocab * shape.hidden)), exchanges=enter,
        )  # fmt: skip
    return LayerWork(operations=(_norm(local, "norm"), operation), logits=activations.logits(local))


def _norm(local: LocalShape, name: str) -> LayerOperation:
    passes = local.stack.norm_passes
    if local.shape.norm == "layernorm" and local.stack.layer_norm_passes:
        passes = local.stack.layer_norm_passes
    moved, launches = local.between_bytes * passes, 1.0 if passes < 2 else 6.0
    return LayerOperation(
        name=name, forward=(MemoryPass(2 * moved, launches),), inputs=(MemoryPass(4 * moved, 2 * launches),), again=True
    )


def _add(local: LocalShape) -> LayerOperation:
    """Return the residual addition, and dropout with its mask.

    RMSNorm's kernel includes the addition, LayerNorm's does not.
    """
    moved = local.between_bytes * local.stack.passes
    mask = local.between * local.shape.hidden if local.dropout else 0.0
    apart = (
        moved
        if local.stack.is_meshwright and local.gpu and not local.compiled and local.shape.norm == "layernorm"
        else 0.0
    )
    return LayerOperation(
        name="residual", forward=(MemoryPass(3 * moved + 2 * mask + apart),),
        inputs=(MemoryPass(2 * moved + mask + 2 * apart),), again=True,
    )  # fmt: skip


def _widths(local: LocalShape) -> HeadWidths:
    """Return the dims of attention on a rank."""
    shape = local.shape
    if local.linear:
        keys, values = local.linear.keys / local.tp, local.linear.values / local.tp
        return HeadWidths(keys, keys + values, values)
    if shape.mla:
        mla = shape.mla
        qk = mla.nope_dim + mla.rope_dim
        return HeadWidths(
            shape.heads * qk / local.tp, shape.heads * (qk + mla.v_dim) / local.tp, shape.heads * mla.v_dim / local.tp
        )
    queries = shape.heads * shape.head_dim / local.tp
    # With more ranks than key heads each rank holds a copy of one.
    keys = max(shape.kv_heads / local.tp, 1.0) * shape.head_dim
    return HeadWidths(queries, 2 * keys, queries)


def _attention(local: LocalShape) -> Iterator[LayerOperation]:
    shape, tokens = local.shape, local.tokens
    queries, keys_values, out = _widths(local)
    if shape.mla and not local.linear:
        # Latent attention multiplies in two steps; else one product makes queries, keys and values.
        made = list(_latent(local, queries, keys_values))
    else:
        columns = queries + keys_values + activations.gate_dims(local, out)
        made = [linear(local, "qkv", tokens, shape.hidden, columns, shape.qkv_bias and not local.linear)]
    readers = [op for op in made if op.name in COLUMNS]
    enter = exchanges.enter(local, local.stack.column_inputs[0], readers=readers)
    put = exchanges.together(local, queries + keys_values) if local.sp else ()
    yield LayerOperation(name="enter attention", forward=put, exchanges=enter)
    yield from made
    yield from attention_core.linear_core(local) if local.linear else _heads(local, queries, keys_values)
    written = linear(local, "o", tokens, out, shape.hidden, shape.out_bias)
    yield written
    yield _leave(local, "leave attention", written)


def _heads(local: LocalShape, queries: float, keys_values: float) -> Iterator[LayerOperation]:
    """Yield what lies between the products: rotation, softmax, gate."""
    if local.shape.qk_norm and local.stack.is_meshwright:
        read = local.tokens * (queries + keys_values / 2) * local.width * local.stack.norm_passes
        heads = MemoryPass(2 * read, 2), MemoryPass(4 * read, 4)
        yield LayerOperation(name="qk_norm", forward=heads[:1], inputs=heads[1:], again=True)
    if local.shape.positions == "rope":
        passes = local.stack.rope_passes
        moved, launches = local.tokens * (queries + keys_values / 2) * local.width * passes, 2.0 if passes < 2 else 10.0
        turned = (MemoryPass(2 * moved, launches),)
        yield LayerOperation(name="rope", forward=turned, inputs=turned, again=True)
    yield _core(local, queries, keys_values)
    if activations.gate_dims(local, queries):
        yield attention_core.gate_operation(local, queries)


def _latent(local: LocalShape, queries: float, keys_values: float) -> Iterator[LayerOperation]:
    """Yield the projections of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    mla, hidden = local.shape.mla, local.shape.hidden
    assert mla is not None
    if mla.q_rank:
        yield linear(local, "q_down", local.tokens, hidden, mla.q_rank)
        yield linear(local, "q_up", local.tokens, mla.q_rank, queries)
    else:
        yield linear(local, "q", local.tokens, hidden, queries)
    yield linear(local, "kv_down", local.tokens, hidden, mla.kv_rank + mla.rope_dim)
    up = local.shape.heads * (mla.nope_dim + mla.v_dim) / local.tp
    yield linear(local, "kv_up", local.tokens, mla.kv_rank, up)


def _core(local: LocalShape, queries: float, keys_values: float) -> LayerOperation:
    """Return softmax(q k^T) v.

    Fused kernels skip what lies above the diagonal. Others compute all of it and write S x S.
    """
    shape, sequence = local.shape, local.sequence
    heads = shape.heads / local.tp
    values = keys_values - queries if shape.mla else queries
    ring = exchanges.ring(local, queries + values if local.stack.merges == "eager" else keys_values)
    if local.stack.is_meshwright or local.stack.attention == "flash":
        core = without_weights(local, queries, keys_values, values)
        turns = local.stack.turns
        turned = (MemoryPass(2 * turns * local.tokens * queries * local.width, turns),) if turns else ()
        forward, inputs = (*core.forward, *turned), (*core.backward, *turned)
        return LayerOperation(name="attention", again=True, forward=forward, inputs=inputs, exchanges=ring)
    dim, pairs = queries / heads, heads * local.batch
    scores = pairs * (sequence / local.cp) * sequence
    fits = sequence <= 2048 and pairs % 4 == 0  # the kernel's requirements
    # Bytes per score and launches: five eager kernels, or one fused kernel that reads and writes 16 bits once.
    moved, back, launches = (36.0, 40.0, 5.0)
    if local.stack.attention == "fused-softmax" and fits:
        moved, back, launches = (4.0, 6.0, 1.0)
    if local.dropout:
        moved, back, launches = moved + 5.0, back + 5.0, launches + 1.0
    rows = sequence / local.cp
    weigh, mix = Product(rows, dim, sequence, pairs), Product(rows, sequence, dim, pairs)
    turn = 2 * local.tokens * queries * local.width
    return LayerOperation(
        name="attention", forward=(weigh, MemoryPass(moved * scores, launches), mix, MemoryPass(turn)),
        inputs=(MemoryPass(turn), mix, weigh, MemoryPass(back * scores, launches), mix, mix, MemoryPass(3 * turn)),
        again=True, exchanges=ring,
    )  # fmt: skip


def _mlp(
    local: LocalShape, ffn: float, tokens: float, name: str = "mlp", exchange: bool = True
) -> Iterator[LayerOperation]:
    shape = local.shape
    up = linear(local, f"{name} up", tokens, shape.hidden, local.gates * ffn, shape.mlp_bias)
    enter = exchanges.enter(local, local.stack.column_inputs[1], readers=(up,)) if exchange else NO_EXCHANGES
    put = exchanges.together(local, local.gates * ffn) if local.sp and exchange else ()
    yield LayerOperation(name=f"enter {name}", forward=put, exchanges=enter)
    yield up
    yield _activation(local, name, tokens, ffn)
    written = linear(local, f"{name} down", tokens, ffn, shape.hidden, shape.mlp_bias)
    yield written
    yield _leave(local, f"leave {name}", written) if exchange else LayerOperation(name=f"leave {name}")


def _leave(local: LocalShape, name: str, written: LayerOperation) -> LayerOperation:
    alone = weight_product.adapted(local, written.name) > 0
    put = () if local.sp or alone else exchanges.together(local, local.shape.hidden)
    return LayerOperation(name=name, forward=put, exchanges=exchanges.leave(local, None if alone else written))


def _activation(local: LocalShape, name: str, tokens: float, ffn: float) -> LayerOperation:
    stack = local.stack
    passes = stack.swiglu_passes if local.gates == 2 else stack.gelu_passes
    moved = tokens * ffn * local.width * (stack.passes * passes)
    forward, inputs = MemoryPass((local.gates + 1) * moved), MemoryPass((2 * local.gates + 1) * moved)
    return LayerOperation(name=f"{name} activation", forward=(forward,), inputs=(inputs,), again=True)


def _routed(local: LocalShape) -> Routed:
    """Return the tokens a rank routes, the copies its experts see, and the ffn of an expert on a rank."""
    moe = local.shape.moe
    assert moe is not None
    tokens = local.between if local.ep > 1 else local.tokens
    return Routed(tokens, tokens * moe.top_k, moe.ffn if local.ep > 1 else moe.ffn / local.tp)


def adds_expert_biases(local: LocalShape) -> bool:
    """Return True if experts have biases that the software adds by separate kernels."""
    return local.stack.adds_expert_biases and local.shape.unbuilt is not None and local.shape.unbuilt.expert_bias


def _experts(local: LocalShape) -> Iterator[LayerOperation]:
    """Yield router, dispatch, experts as grouped products, combine, and shared experts as an MLP. Routing is even."""
    shape, moe = local.shape, local.shape.moe
    assert moe is not None
    tokens, copies, ffn = _routed(local)
    # With expert parallelism tokens are cut over tensor ranks already, so f and g have nothing to join.
    enter, leave = (NO_EXCHANGES,) * 2 if local.ep > 1 else (exchanges.enter(local, alone=True), exchanges.leave(local))
    yield LayerOperation(name="enter experts", exchanges=enter)
    router = linear(local, "router", tokens, shape.hidden, moe.experts)
    # The engine scores experts in fp32 (model/feed_forward.py).
    if local.stack.is_meshwright:
        router = in_fp32(router)
    yield router._replace(exchanges=Exchanges(exchanges.balance(local)))
    moved = copies * shape.hidden * local.width
    up = grouped(local, "experts up", copies, shape.hidden, local.gates * ffn)
    down = grouped(local, "experts down", copies, ffn, shape.hidden)
    inner = _activation(local, "experts", copies, ffn)
    if local.stack.fused_experts:
        inner = LayerOperation(name=inner.name)
    # Shared experts see every token and run while routed rows travel.
    shared: list[LayerOperation] = []
    if moe.shared_experts:
        shared = list(_mlp(local, moe.shared_experts * moe.ffn / local.tp, local.tokens, "shared", local.ep > 1))
    there, back = exchanges.exchange_passes(local, moved, (up, inner, down), shared)
    sorting = (MemoryPass(2 * moved, 3),)
    yield LayerOperation(name="dispatch", forward=(MemoryPass(2 * moved, 6),), inputs=sorting, exchanges=there)
    yield from (up, down, inner)
    if adds_expert_biases(local):
        experts, sums = moe.experts / local.ep, copies * shape.hidden
        forward, inputs = ((MemoryPass(moved * sums, launches * experts),) for moved, launches in EXPERT_BIAS)
        yield LayerOperation(name="experts bias", forward=forward, inputs=inputs)
    yield LayerOperation(name="combine", forward=sorting, inputs=sorting, exchanges=back)
    yield from shared
    yield LayerOperation(name="leave experts", exchanges=leave)
