"""The operations of one layer, of the embedding and of the head, for one micro-batch on one rank.

Letters as in docs/notation.md: N tokens of the rank (B S / cp), D hidden, H and K heads times head_dim, F ffn, V vocab,
t the tensor-parallel degree. Sequence parallel divides by t what lies between the tensor-parallel regions: `between`.
Sources of what is kept: Korthikanti et al. 2022 (arXiv:2205.05198) section 4, checked in tests against their
closed forms 34 S B D + 5 H S^2 B; the model of this package where the stack is meshwright.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from meshwright.planner.cost import activations, adapters, exchanges, operands, rounded_weights, state_layers
from meshwright.planner.cost.activations import HeadWidths, Routed
from meshwright.planner.cost.attention_core import without_weights
from meshwright.planner.cost.backward import NONE as NOTHING
from meshwright.planner.cost.backward import backward
from meshwright.planner.cost.grouped_products import grouped
from meshwright.planner.cost.layer_work import LayerWork
from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.weight_product import linear
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
"""Of an fp32 sum of gradients, read and written."""
COLUMNS = ("qkv", "q", "q_down", "kv_down")
"""Products that read what enters attention."""


def of_kind(of: Local, window: int, *, state: bool) -> Local:
    """The same of a layer with this window, or with the linear attention that its shape has in some layers."""
    if not (window or state):
        return of
    return replace(of, window=window, linear=of.shape.unbuilt.linear if state and of.shape.unbuilt else None)


def first_half(of: Local) -> tuple[LayerOperation, ...]:
    """A block's norm, attention and residual: whatever its expert parallelism is."""
    return _norm(of, "attention_norm"), *_attention(of), _add(of)


def layer(
    of: Local, *, window: int = 0, routed: bool = False, state: bool = False,
    attention: tuple[LayerOperation, ...] | None = None,
) -> LayerWork:  # fmt: skip
    """A transformer block. `state`: with the linear attention that its shape has in some layers. `attention`: its
    first half, where another block has it already."""
    of = of_kind(of, window, state=state)
    mlp = _experts(of) if routed else _mlp(of, of.shape.ffn / of.tp, of.tokens)
    operations = [*(attention or first_half(of)), _norm(of, "mlp_norm"), *mlp, _add(of)]
    if of.shape.unbuilt is not None and of.shape.unbuilt.block_norms == 4:
        operations += [_norm(of, "attention_norm"), _norm(of, "mlp_norm")]
    sizes, widths = _routed(of) if routed else None, _widths(of)
    kept = rounded_weights.kept(
        of, widths, routed, adapters.kept(of, widths, sizes, activations.layer_kept(of, widths, sizes))
    )
    if of.stack.drops_scores_alone:
        kept = tuple(
            one if one.of == "scores" or one.selective == one.none else KeptBytes(one.name, one.none, one.none, one.of)
            for one in kept
        )
    if of.compiled and routed and of.ep > 1:
        kept = tuple(KeptBytes(one.name, one.none, one.selective) if one.of else one for one in kept)
    return LayerWork(
        operations=rounded_weights.rounding(of, operations),
        kept=kept,
        boundary_bytes=of.between_bytes,
        transient_bytes=activations.layer_transient(of, sizes),
        backward=backward(of, widths, sizes) if of.stack.own else NOTHING,
        tail=(2 if routed else 3) if of.stack.own else 0,  # the product, its sum over ranks, the residual
        keeps_norms=of.keeps_norms,
    )


def embedding(of: Local) -> LayerWork:
    """Rows of the table; with tp each rank looks up its part of the vocabulary and the parts are summed."""
    moved = of.tokens * of.shape.hidden * of.width
    summed = exchanges.leave(of)
    look_up = LayerOperation(name="embed", forward=(MemoryPass(2 * moved),), exchanges=summed._replace(backward=()))
    if not of.shape.lora:
        look_up = look_up._replace(weights=(MemoryPass(3 * moved),), exchanges=summed)
    return LayerWork(operations=(look_up,), logits=activations.embedding_mask(of))


def head(of: Local) -> LayerWork:
    """Norm, product with the vocabulary, cross-entropy. Chunked: all three products in the forward pass; those of
    log-probabilities that are compared in the backward pass, which makes the logits again."""
    stack, shape = of.stack, of.shape
    vocab = shape.vocab / of.tp
    chunks = of.tokens / activations.head_rows(of)
    laid = activations.head_columns(of) if stack.head_chunk_bytes else vocab
    product, data = Product(of.tokens, shape.hidden, laid), Product(of.tokens, laid, shape.hidden)
    weight = Product(shape.hidden, of.tokens, laid)
    enter = exchanges.enter(of, alone=bool(stack.head_chunk_bytes))
    read = of.width if stack.loss_in_place and of.gpu else 4
    softmax = MemoryPass(of.tokens * vocab * 3 * read * stack.passes * stack.loss_passes, 4)
    if stack.head_chunk_bytes:
        summed: tuple[Work, ...] = (weight, MemoryPass(chunks * vocab * shape.hidden * SUMMED_BYTES))
        if of.gpu and stack.own:  # added to the sum of all chunks inside the product
            summed = (Product(shape.hidden, of.tokens / chunks, laid, moved=SUMMED_BYTES, calls=ceil(chunks)),)
        forward: tuple[Work, ...] = (product, softmax, data, *(() if shape.freezes_head else summed))
        parts = ceil(chunks)
        each = of.tokens / parts * 4  # the largest logit of a row, then its sum of exponentials and its target's logit
        loss = tuple(Exchange("tp", "all-reduce", size, parts) for size in (each, 2 * each)) if of.tp > 1 else ()
        if of.compares:
            both = Exchanges(enter.forward + loss + exchanges.answer_sums(of), loss + enter.backward)
            operation = LayerOperation(name="head", forward=(product, softmax), inputs=forward, exchanges=both)
        else:
            both = Exchanges(enter.forward + loss, enter.backward)
            operation = LayerOperation(name="head", forward=forward, exchanges=both)
    else:
        operation = LayerOperation(
            name="head", forward=(product, softmax), inputs=(data, softmax),
            weights=(weight, *operands.accumulated(of, vocab * shape.hidden)), exchanges=enter,
        )  # fmt: skip
    return LayerWork(operations=(_norm(of, "norm"), operation), logits=activations.logits(of))


def _norm(of: Local, name: str) -> LayerOperation:
    passes = of.stack.norm_passes
    if of.shape.norm == "layernorm" and of.stack.layer_norm_passes:
        passes = of.stack.layer_norm_passes
    moved, launches = of.between_bytes * passes, 1.0 if passes < 2 else 6.0
    return LayerOperation(
        name=name, forward=(MemoryPass(2 * moved, launches),), inputs=(MemoryPass(4 * moved, 2 * launches),), again=True
    )


def _add(of: Local) -> LayerOperation:
    """Residual addition, and dropout with its mask. LayerNorm's own kernel has it not inside, as RMSNorm's has."""
    moved = of.between_bytes * of.stack.passes
    mask = of.between * of.shape.hidden if of.dropout else 0.0
    apart = moved if of.stack.own and of.gpu and not of.compiled and of.shape.norm == "layernorm" else 0.0
    return LayerOperation(
        name="residual", forward=(MemoryPass(3 * moved + 2 * mask + apart),),
        inputs=(MemoryPass(2 * moved + mask + 2 * apart),), again=True,
    )  # fmt: skip


def _widths(of: Local) -> HeadWidths:
    """(query dims, key and value dims together, output dims of the core) of a rank."""
    shape = of.shape
    if of.linear:
        keys, values = of.linear.keys / of.tp, of.linear.values / of.tp
        return HeadWidths(keys, keys + values, values)
    if shape.mla:
        mla = shape.mla
        qk = mla.nope_dim + mla.rope_dim
        return HeadWidths(
            shape.heads * qk / of.tp, shape.heads * (qk + mla.v_dim) / of.tp, shape.heads * mla.v_dim / of.tp
        )
    queries = shape.heads * shape.head_dim / of.tp
    keys = max(shape.kv_heads / of.tp, 1.0) * shape.head_dim
    return HeadWidths(queries, 2 * keys, queries)


def _attention(of: Local) -> Iterator[LayerOperation]:
    shape, tokens = of.shape, of.tokens
    queries, keys_values, out = _widths(of)
    if shape.mla and not of.linear:
        made = list(_latent(of, queries, keys_values))
    else:
        columns = queries + keys_values + activations.gate_dims(of, out)
        made = [linear(of, "qkv", tokens, shape.hidden, columns, shape.qkv_bias and not of.linear)]
    readers = [op for op in made if op.name in COLUMNS]
    enter = exchanges.enter(of, of.stack.column_inputs[0], readers=readers)
    put = exchanges.together(of, queries + keys_values) if of.sp else ()
    yield LayerOperation(name="enter attention", forward=put, exchanges=enter)
    yield from made
    yield from state_layers.core(of) if of.linear else _heads(of, queries, keys_values)
    written = linear(of, "o", tokens, out, shape.hidden, shape.out_bias)
    yield written
    yield _leave(of, "leave attention", written)


def _heads(of: Local, queries: float, keys_values: float) -> Iterator[LayerOperation]:
    """Between the products: rotation, softmax, a gate."""
    if of.shape.qk_norm and of.stack.own:
        read = of.tokens * (queries + keys_values / 2) * of.width * of.stack.norm_passes
        heads = MemoryPass(2 * read, 2), MemoryPass(4 * read, 4)
        yield LayerOperation(name="qk_norm", forward=heads[:1], inputs=heads[1:], again=True)
    if of.shape.positions == "rope":
        passes = of.stack.rope_passes
        moved, launches = of.tokens * (queries + keys_values / 2) * of.width * passes, 2.0 if passes < 2 else 10.0
        turned = (MemoryPass(2 * moved, launches),)
        yield LayerOperation(name="rope", forward=turned, inputs=turned, again=True)
    yield _core(of, queries, keys_values)
    if activations.gate_dims(of, queries):
        yield state_layers.gated(of, queries)


def _latent(of: Local, queries: float, keys_values: float) -> Iterator[LayerOperation]:
    """Multi-head latent attention's projections (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    mla, hidden = of.shape.mla, of.shape.hidden
    assert mla is not None
    if mla.q_rank:
        yield linear(of, "q_down", of.tokens, hidden, mla.q_rank)
        yield linear(of, "q_up", of.tokens, mla.q_rank, queries)
    else:
        yield linear(of, "q", of.tokens, hidden, queries)
    yield linear(of, "kv_down", of.tokens, hidden, mla.kv_rank + mla.rope_dim)
    up = of.shape.heads * (mla.nope_dim + mla.v_dim) / of.tp
    yield linear(of, "kv_up", of.tokens, mla.kv_rank, up)


def _core(of: Local, queries: float, keys_values: float) -> LayerOperation:
    """softmax(q k^T) v. Fused kernels skip what lies above the diagonal; the others do all of it and write S x S."""
    shape, sequence = of.shape, of.sequence
    heads = shape.heads / of.tp
    value = keys_values - queries if shape.mla else queries
    ring = exchanges.ring(of, queries + value if of.stack.merges == "eager" else keys_values)
    if of.stack.own or of.stack.attention == "flash":
        found = without_weights(of, queries, keys_values, value)
        turns = of.stack.turns
        turned = (MemoryPass(2 * turns * of.tokens * queries * of.width, turns),) if turns else ()
        forward, inputs = (*found.forward, *turned), (*found.backward, *turned)
        return LayerOperation(name="attention", again=True, forward=forward, inputs=inputs, exchanges=ring)
    dim, pairs = queries / heads, heads * of.batch
    scores = pairs * (sequence / of.cp) * sequence
    fits = sequence <= 2048 and pairs % 4 == 0  # what the kernel asks for
    moved, back, launches = (36.0, 40.0, 5.0)
    if of.stack.attention == "fused-softmax" and fits:
        moved, back, launches = (4.0, 6.0, 1.0)
    if of.dropout:
        moved, back, launches = moved + 5.0, back + 5.0, launches + 1.0
    rows = sequence / of.cp
    weigh, mix = Product(rows, dim, sequence, pairs), Product(rows, sequence, dim, pairs)
    turn = 2 * of.tokens * queries * of.width
    return LayerOperation(
        name="attention", forward=(weigh, MemoryPass(moved * scores, launches), mix, MemoryPass(turn)),
        inputs=(MemoryPass(turn), mix, weigh, MemoryPass(back * scores, launches), mix, mix, MemoryPass(3 * turn)),
        again=True, exchanges=ring,
    )  # fmt: skip


def _mlp(of: Local, ffn: float, tokens: float, name: str = "mlp", exchange: bool = True) -> Iterator[LayerOperation]:
    shape = of.shape
    up = linear(of, f"{name} up", tokens, shape.hidden, of.gates * ffn, shape.mlp_bias)
    enter = exchanges.enter(of, of.stack.column_inputs[1], readers=(up,)) if exchange else NO_EXCHANGES
    put = exchanges.together(of, of.gates * ffn) if of.sp and exchange else ()
    yield LayerOperation(name=f"enter {name}", forward=put, exchanges=enter)
    yield up
    yield _activation(of, name, tokens, ffn)
    written = linear(of, f"{name} down", tokens, ffn, shape.hidden, shape.mlp_bias)
    yield written
    yield _leave(of, f"leave {name}", written) if exchange else LayerOperation(name=f"leave {name}")


def _leave(of: Local, name: str, written: LayerOperation) -> LayerOperation:
    alone = adapters.adapted(of, written.name) > 0
    put = () if of.sp or alone else exchanges.together(of, of.shape.hidden)
    return LayerOperation(name=name, forward=put, exchanges=exchanges.leave(of, None if alone else written))


def _activation(of: Local, name: str, tokens: float, ffn: float) -> LayerOperation:
    stack = of.stack
    passes = stack.swiglu_passes if of.gates == 2 else stack.gelu_passes
    moved = tokens * ffn * of.width * (stack.passes * passes)
    forward, inputs = MemoryPass((of.gates + 1) * moved), MemoryPass((2 * of.gates + 1) * moved)
    return LayerOperation(name=f"{name} activation", forward=(forward,), inputs=(inputs,), again=True)


def _routed(of: Local) -> Routed:
    """(tokens a rank routes, copies its experts see, ffn of an expert on a rank)."""
    moe = of.shape.moe
    assert moe is not None
    own = of.between if of.ep > 1 else of.tokens
    return Routed(own, own * moe.top_k, moe.ffn if of.ep > 1 else moe.ffn / of.tp)


EXPERT_BIAS = ((28, 3), (44, 7))
"""Of a pass over experts with biases, forward and backward: bytes moved per element of their results, and launches per
expert. Forward a bias times probabilities in fp32 (4), the sum (10); all parts put together (8) and rounded (6). Back:
widened (6), the sum's gradient rounded (6) and cut (8), products with probabilities and with the bias summed (24).
NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias."""


def adds_expert_biases(of: Local) -> bool:
    """Whether experts have biases, and the software adds them by kernels of their own."""
    return of.stack.adds_expert_biases and of.shape.unbuilt is not None and of.shape.unbuilt.expert_bias


def _experts(of: Local) -> Iterator[LayerOperation]:
    """Router, dispatch, experts as grouped products, combine; shared experts as an MLP. Even routing."""
    shape, moe = of.shape, of.shape.moe
    assert moe is not None
    own, copies, ffn = _routed(of)
    enter, leave = (NO_EXCHANGES,) * 2 if of.ep > 1 else (exchanges.enter(of, alone=True), exchanges.leave(of))
    yield LayerOperation(name="enter experts", exchanges=enter)
    router = linear(of, "router", own, shape.hidden, moe.experts)
    if of.stack.own:
        router = in_fp32(router)
    yield router._replace(exchanges=Exchanges(exchanges.balance(of)))
    moved = copies * shape.hidden * of.width
    up = grouped(of, "experts up", copies, shape.hidden, of.gates * ffn)
    down = grouped(of, "experts down", copies, ffn, shape.hidden)
    inner = _activation(of, "experts", copies, ffn)
    if of.stack.fused_experts:
        inner = LayerOperation(name=inner.name)
    shared: list[LayerOperation] = []
    if moe.shared_experts:
        shared = list(_mlp(of, moe.shared_experts * moe.ffn / of.tp, of.tokens, "shared", of.ep > 1))
    there, back = exchanges.exchange_passes(of, moved, (up, inner, down), shared)
    sorting = (MemoryPass(2 * moved, 3),)
    yield LayerOperation(name="dispatch", forward=(MemoryPass(2 * moved, 6),), inputs=sorting, exchanges=there)
    yield from (up, down, inner)
    if adds_expert_biases(of):
        experts, sums = moe.experts / of.ep, copies * shape.hidden
        forward, inputs = ((MemoryPass(moved * sums, launches * experts),) for moved, launches in EXPERT_BIAS)
        yield LayerOperation(name="experts bias", forward=forward, inputs=inputs)
    yield LayerOperation(name="combine", forward=sorting, inputs=sorting, exchanges=back)
    yield from shared
    yield LayerOperation(name="leave experts", exchanges=leave)
