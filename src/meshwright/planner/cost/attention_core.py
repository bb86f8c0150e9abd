"""Attention cores: softmax attention in Meshwright's engine, and the core of a layer with linear attention.

Softmax attention: its kernel under masks and context parallelism, and memory passes around it. Sources:
kernels/attention/attend.py, kernels/attention/partial.py, parallel/axes/ring.py. Letters as in block.py.

Linear attention: operations, kept tensors, and bytes inside its backward pass. Products are those of
spec/model/unbuilt_parts.py, timed by the kernels' curves. Convolution, norms and gates move bytes. The wait of one
chunk's state for the previous one's is not counted, since no times of it are published.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import LocalShape
from meshwright.planner.cost.work import KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import AttentionCore, CoreKind, Product

BACKWARD = 2.5
"""FLOP of a fused kernel's backward pass relative to its forward pass: five products to two."""
ROWS, COLUMNS = 64, 2048
"""Rows and columns of a tile of the plain form (kernels/attention/partial.py, parallel/axes/context.py)."""
STRIP = 512
"""Queries per strip (kernels/attention/varlen.py)."""
SCORES_MOVED, SCORES_COMPILED = (24, 28), (12, 20)
"""Bytes moved per fp32 score between the products of the reference kernels, forward and backward.

Uncompiled: scaling, mask and softmax, each read and written, and their gradients (kernels/attention/attend.py,
attend_reference). Compiled: one loop over a row that reads its inputs twice and writes once.
"""
HASH_PASSES = 20
"""Passes over fp32 scores that a mask of dropout takes: ten eager operations on int32 (kernels/norm/dropout.py)."""
MERGED_BYTES = 18
"""Bytes moved per element of a partial output when it is merged: the fp32 sum read and written twice, the part read."""
ADDED_BYTES = 10
"""Bytes moved per element of a gradient that is added to an fp32 sum."""
EAGER_MERGED, EAGER_ONCE = 38, 28
"""Bytes moved per element when each step of a merge is a separate kernel.

Per part: its output widened (6 bytes), then its difference to the sum, the weighted difference and the new sum (32).
Once: copies of keys and values before sending, and the rounded output.
torch/distributed/tensor/experimental/_attention.py, _SDPAMerger and _templated_ring_attention.
"""
EAGER_ADDED, EAGER_TURNED, EAGER_ZEROED = 10, 21, 46
"""Bytes moved per element in _templated_ring_attention_backward of the same file.

For a query gradient added to an fp32 sum. For a key or value gradient that is added to half of what arrives, joined
with the other half and copied for sending. Once per query: zeroed sums, copies, rounded outputs.
"""


class Core(NamedTuple):
    """Work of the forward and backward pass."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def core(local: LocalShape, queries: float, keys_values: float, values: float) -> Core:
    """Return the work of the core.

    The widths are dims of a rank's queries, of its keys and values together, of its values.
    """
    if local.stack.attention == "unfused":
        return _written(local, queries, values)
    if local.draws_by_tile:
        return _plain(local, queries, keys_values, values)
    if local.cp > 1:
        return (
            _plain(local, queries, keys_values, values) if local.masked else _parts(local, queries, keys_values, values)
        )
    return _masked(local, queries, values) if local.masked else fused(local, queries, values, 1)


def _seen(local: LocalShape) -> float:
    """Return the keys that a query sees on average."""
    row = min(local.document_tokens or local.sequence, local.sequence)
    span = min(local.window or row, row)
    # The first `span` queries of a row see ever more keys, all later ones see `span`.
    return span - span * span / (2 * row)


def _dim(local: LocalShape, values: float) -> float:
    return values / (local.shape.heads / local.tp)


def fused(local: LocalShape, queries: float, values: float, parts: float) -> Core:
    """Return the work of the causal kernel. In `parts` it is called for that many shorter rows."""
    keys, dim = _seen(local), _dim(local, values)
    flop, rows = 2 * local.tokens * keys * (queries + values) * local.uneven, 2 * keys / parts
    kernel: CoreKind = "documents" if local.documents else "window" if 0 < local.window < local.sequence else "rows"
    if local.cp > 1:
        kernel = "parts of documents" if local.documents else "parts"
    forward = AttentionCore(flop, sequence=rows, dim=dim, width=local.width, kernel=kernel)
    return Core((forward,), (forward._replace(flop=BACKWARD * flop, backward=True),))


def _masked(local: LocalShape, queries: float, values: float) -> Core:
    """Return the work of strips of queries (kernels/attention/varlen.py).

    Each strip attends to the keys up to its last query. Keys and values are repeated for each head, and a mask hides
    pairs, in both passes.
    """
    keys, strips = strip_keys(local), max(1.0, local.sequence / STRIP)
    flop, dim = 2 * local.tokens * keys * (queries + values), _dim(local, values)
    mask = MemoryPass(local.tokens * keys * (2 * local.width + 2), 4 * strips)
    repeated = MemoryPass(2 * local.batch * strips * keys * (queries + values) * local.width, 2 * strips)
    added = MemoryPass(local.batch * strips * keys * (queries + values) * (local.width + 8), 4 * strips)
    back = AttentionCore(BACKWARD * flop, backward=True, sequence=keys, dim=dim, masked=True, width=local.width)
    return Core((AttentionCore(flop, sequence=keys, dim=dim, masked=True, width=local.width), mask, repeated),
                (back, mask, repeated, added))  # fmt: skip


def strip_keys(local: LocalShape) -> float:
    """Return the keys of a strip on average: up to its last query and, with a window, from its first query's.

    Lengths of documents depend on the text, so documents count as whole rows.
    """
    strip, reach = min(STRIP, local.sequence), min(local.window or local.sequence, local.sequence)
    return (reach * (reach + strip) / 2 + (local.sequence - reach) * (reach + strip)) / local.sequence


def widest_strip(local: LocalShape) -> float:
    """Return the most keys of any strip."""
    return float(min(local.sequence, min(local.window or local.sequence, local.sequence) + STRIP))


def _parts(local: LocalShape, queries: float, keys_values: float, values: float) -> Core:
    """Return the work of one part per rank's keys (ring, stripes), or of one part (all-gather).

    Outputs are merged in fp32. Gradients are added in fp32, and in a ring once more to those that arrive.
    """
    parts = local.cp if local.ring or local.context_split == "striped" else 1
    parts_seen = _parts_seen(local, parts)
    kernels = fused(
        local, queries, values, parts_seen if parts_seen < parts else local.cp
    )  # rows of a call: of met keys, or of a rank's
    tiles = 2 * parts
    keys = local.tokens * keys_values * (1 if local.ring else local.cp)
    pack = MemoryPass(2 * keys * local.width * (1 if local.ring else 3), 4)
    merge = MemoryPass(parts_seen * local.tokens * values * MERGED_BYTES, 4 * tiles)
    # Sums in fp32 are read and written; a ring also adds those that arrive.
    travel = 12 if local.ring else 8
    back = parts_seen * (local.tokens * queries + keys) * ADDED_BYTES + parts * keys * (4 + travel)
    added = MemoryPass(back, 6 * tiles)
    return Core((*kernels.forward, pack, merge), (*kernels.backward, pack, added))


def _parts_seen(local: LocalShape, parts: int) -> float:
    """Return the parts in which a query sees keys, on average.

    With a window these are its own chunk and as many before it as the window reaches. Stripes see all.
    """
    chunk = local.sequence / local.cp / (2 if local.context_split == "zigzag" else 1)
    reached = parts if local.context_split == "striped" or not local.window else 1 + local.window / chunk
    return min(float(parts), reached)


def without_weights(local: LocalShape, queries: float, keys_values: float, values: float) -> Core:
    """Return the work of the core in Meshwright, or in other software that never writes the S x S weights."""
    if local.stack.is_meshwright:
        return core(local, queries, keys_values, values)
    return eager_parts(local, queries, values) if local.stack.merges == "eager" else fused(local, queries, values, 1)


def eager_parts(local: LocalShape, queries: float, values: float) -> Core:
    """Return the work of one part per rank's keys, merged and added by separate torch kernels.

    Keys and values are repeated for every query head. The rank is the one whose parts cover all its queries.
    """
    if local.cp == 1:
        return fused(local, queries, values, 1)
    kernels, elements = fused(local, queries, values, local.cp), local.tokens * queries
    merge = MemoryPass(elements * (EAGER_ONCE + (local.cp - 1) * EAGER_MERGED), 8.0 * local.cp)
    added = MemoryPass(elements * (EAGER_ZEROED + local.cp * (EAGER_ADDED + 2 * EAGER_TURNED)), 12.0 * local.cp)
    return Core((*kernels.forward, merge), (*kernels.backward, added))


def _plain(local: LocalShape, queries: float, keys_values: float, values: float) -> Core:
    """Return the work of masked attention tile by tile: products and softmax in fp32, each a separate operation."""
    heads = local.shape.heads / local.tp * local.batch
    rows, keys, dim = local.sequence / local.cp, _seen(local) * local.uneven, queries / (local.shape.heads / local.tp)
    scores = heads * rows * keys * 4
    tiles = max(1.0, rows / ROWS) * max(float(local.cp), keys / COLUMNS)
    weigh, mix = Product(rows, dim, keys, heads, 4.0), Product(rows, keys, _dim(local, values), heads, 4.0)
    hashed = HASH_PASSES if local.dropout else 0
    return Core(
        (weigh, MemoryPass((7 + hashed) * scores, (12 + hashed) * tiles), mix),
        (weigh, mix, mix, weigh, weigh, MemoryPass((9 + hashed) * scores, (16 + hashed) * tiles)),
    )


def _written(local: LocalShape, queries: float, values: float) -> Core:
    """Return the work of the reference kernels, which write all S x S scores in fp32, masked ones too."""
    pairs, sequence = local.shape.heads / local.tp * local.batch, float(local.sequence)
    hashed = 4 * HASH_PASSES if local.dropout else 0
    moved = [pairs * sequence**2 * (each + hashed) for each in (SCORES_COMPILED if local.compiled else SCORES_MOVED)]
    launches = (1.0, 1.0) if local.compiled else (3.0, 3.0)
    # Queries, and keys and values repeated for every head, are widened to fp32; gradients take the way back.
    widened = MemoryPass(local.tokens * (2 * queries + values) * (3 * local.width + 4), 5)
    weigh = Product(sequence, _dim(local, queries), sequence, pairs, 4.0)
    mix = Product(sequence, sequence, _dim(local, values), pairs, 4.0)
    return Core(
        (widened, weigh, MemoryPass(moved[0], launches[0]), mix),
        (mix, mix, MemoryPass(moved[1], launches[1]), weigh, weigh, widened),
    )


def linear_core(local: LocalShape) -> Iterator[LayerOperation]:
    """Yield the operations between the products with weights."""
    linear = local.linear
    assert linear is not None
    word = local.tokens * local.width * local.stack.passes / local.tp
    if linear.taps:  # includes its activation
        channels = word * linear.channels
        yield _moving("convolution", 2 * channels, 3 * channels)
    if linear.delta:  # norms of queries and keys, rates
        keys, rates = 2 * word * linear.keys, 2 * word * linear.value_heads
        yield _moving("lengths", 2 * (keys + rates), 3 * (keys + rates), 4.0)
    else:  # activation of queries, keys and values
        yield _moving("state activation", 2 * word * linear.channels, 3 * word * linear.channels)
    forward, backward = (_products(local, backward) for backward in (False, True))
    yield LayerOperation(name="attention", forward=forward, inputs=backward, again=True)
    yield gate_operation(local, linear.values / local.tp)


def _products(local: LocalShape, backward: bool) -> tuple[Work, ...]:
    linear = local.linear
    assert linear is not None
    chunks = local.tokens / linear.chunk * linear.value_heads / local.tp
    return tuple(Product(*size, chunks, float(local.width)) for size in linear.products(backward=backward))


def gate_operation(local: LocalShape, dims: float) -> LayerOperation:
    """Return the gating of an attention output of `dims` columns, normed if it comes from states."""
    moved = local.tokens * dims * local.width * local.stack.passes
    return _moving("gate", 3 * moved, 5 * moved)


def _moving(name: str, forward: float, inputs: float, launches: float = 1.0) -> LayerOperation:
    return LayerOperation(
        name=name, forward=(MemoryPass(forward, launches),), inputs=(MemoryPass(inputs, launches),), again=True
    )


def linear_kept_tensors(local: LocalShape) -> Iterator[KeptBytes]:
    """Yield the tensors from the forward to the backward pass, except those of the gate.

    flash-linear-attention keeps queries, keys, values, rates and the inverse of each chunk's triangle
    (ChunkGatedDeltaRuleFunction). It recomputes states.
    """
    linear, core = local.linear, local.stack.selective == "core"
    assert linear is not None
    word = local.tokens * local.width / local.tp
    mixed, values = word * linear.channels, word * linear.values
    if linear.taps or not linear.delta:
        yield KeptBytes("projected queries, keys, values", mixed, mixed)
    yield KeptBytes("queries, keys, values", mixed, mixed if core else 0.0, "core")
    if linear.delta:
        rates = local.tokens * linear.value_heads / local.tp * (2 * local.width + 4)
        yield KeptBytes("rates", rates, rates)
        yield KeptBytes("triangles", word * linear.value_heads * linear.chunk, 0.0, "core")
    made = {"core": values, "products": local.hidden_bytes, "alternate": values}[local.stack.selective]
    yield KeptBytes("attention output", values, made, "core")


def linear_inside_bytes(local: LocalShape) -> float:
    """Return the bytes at once inside the core's backward pass.

    Gradients of queries, keys and values. With the gated delta rule also the states of all chunks and their gradients,
    and per value head four tensors of keys and three of values.
    """
    linear = local.linear
    if linear is None:
        return 0.0
    word = local.tokens * local.width / local.tp
    if not linear.delta:
        return word * linear.channels
    states = 2 * linear.key_dim * linear.value_dim / linear.chunk
    return word * (linear.channels + linear.value_heads * (states + 4 * linear.key_dim + 3 * linear.value_dim))
