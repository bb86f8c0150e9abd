"""The attention core of Meshwright's own engine: which kernel its masks and its context parallelism leave, and what
they move beside it (kernels/attention.py, kernels/partial.py, parallel/ring.py). Letters as in block.py."""

from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.cost.work import MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import AttentionCore, CoreKind, Product

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local

BACKWARD = 2.5
"""FLOP of the backward pass of a fused kernel over those of the forward pass: five products for two."""
ROWS, COLUMNS = 64, 2048
"""Of a tile of the plain form (kernels/partial.py, parallel/context.py)."""
STRIP = 512
"""Queries of a strip (kernels/strips.py)."""
MERGED_BYTES = 18
"""Of an element of a part's result as it is merged: the fp32 sum read and written twice, the part read."""
ADDED_BYTES = 10
"""Of an element of a gradient that is added to an fp32 sum."""
EAGER_MERGED, EAGER_ONCE = 38, 28
"""The same where each step of a merge is a kernel of its own: a part's result widened (6 bytes), its difference to the
sum, the difference weighed, the new sum (32); and once, copies of keys and values before they are sent and the result
rounded. torch/distributed/tensor/experimental/_attention.py, _SDPAMerger and _templated_ring_attention."""
EAGER_ADDED, EAGER_TURNED, EAGER_ZEROED = 10, 21, 46
"""There, _templated_ring_attention_backward: of a gradient of queries that is added to an fp32 sum; of one of keys or
values that is added to a half of what arrives, put together with the other half and copied to be sent; and once, of a
query: sums set to zero, copies, results rounded."""


class Core(NamedTuple):
    """Work of both passes."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def core(of: "Local", queries: float, keys_values: float, value: float) -> Core:
    """queries, keys and values together, values: dims of a rank's heads."""
    if of.cp > 1:
        return _plain(of, queries, keys_values, value) if of.masked else _parts(of, queries, keys_values, value)
    return _masked(of, queries, value) if of.masked else fused(of, queries, value, 1)


def _seen(of: "Local") -> float:
    """Keys that a query sees, on average."""
    row = min(of.document_tokens or of.sequence, of.sequence)
    span = min(of.window or row, row)
    return span - span * span / (2 * row)


def _dim(of: "Local", value: float) -> float:
    return value / (of.shape.heads / of.tp)


def fused(of: "Local", queries: float, value: float, parts: float) -> Core:
    """The kernel that skips what lies above the diagonal; in `parts` it is called for as much shorter rows."""
    keys, dim = _seen(of), _dim(of, value)
    flop, rows = 2 * of.tokens * keys * (queries + value) * of.uneven, 2 * keys / parts
    kernel: CoreKind = "documents" if of.documents else "window" if 0 < of.window < of.sequence else "rows"
    if of.cp > 1:
        kernel = "parts of documents" if of.documents else "parts"
    forward = AttentionCore(flop, sequence=rows, dim=dim, width=of.width, kernel=kernel)
    return Core((forward,), (forward._replace(flop=BACKWARD * flop, backward=True),))


def _masked(of: "Local", queries: float, value: float) -> Core:
    """Strips of queries (kernels/strips.py): each with the keys up to its last query, keys and values once for each
    head, and numbers that hide pairs, in both passes."""
    keys, strips = strip_keys(of), max(1.0, of.sequence / STRIP)
    flop, dim = 2 * of.tokens * keys * (queries + value), _dim(of, value)
    mask = MemoryPass(of.tokens * keys * (2 * of.width + 2), 4 * strips)
    repeated = MemoryPass(2 * of.batch * strips * keys * (queries + value) * of.width, 2 * strips)
    added = MemoryPass(of.batch * strips * keys * (queries + value) * (of.width + 8), 4 * strips)
    back = AttentionCore(BACKWARD * flop, backward=True, sequence=keys, dim=dim, masked=True, width=of.width)
    return Core((AttentionCore(flop, sequence=keys, dim=dim, masked=True, width=of.width), mask, repeated),
                (back, mask, repeated, added))  # fmt: skip


def strip_keys(of: "Local") -> float:
    """Keys of a strip, on average: up to its last query, and of a window those that its first query sees. How long
    documents are depends on the text: they are taken for whole rows."""
    strip, reach = min(STRIP, of.sequence), min(of.window or of.sequence, of.sequence)
    return (reach * (reach + strip) / 2 + (of.sequence - reach) * (reach + strip)) / of.sequence


def widest_strip(of: "Local") -> float:
    """Keys of the strip that has most."""
    return float(min(of.sequence, min(of.window or of.sequence, of.sequence) + STRIP))


def _parts(of: "Local", queries: float, keys_values: float, value: float) -> Core:
    """One part for each rank's keys (ring, stripes), or one of all (all-gather): results are merged in fp32; gradients
    are added up in fp32, and in a ring once more with those that arrive."""
    parts = of.cp if of.ring or of.context_split == "striped" else 1
    met = _met(of, parts)
    kernels = fused(of, queries, value, met if met < parts else of.cp)  # rows of a call: of met keys, or of a rank's
    tiles = 2 * parts
    keys = of.tokens * keys_values * (1 if of.ring else of.cp)
    pack = MemoryPass(2 * keys * of.width * (1 if of.ring else 3), 4)
    merge = MemoryPass(met * of.tokens * value * MERGED_BYTES, 4 * tiles)
    travel = 12 if of.ring else 8
    back = met * (of.tokens * queries + keys) * ADDED_BYTES + parts * keys * (4 + travel)
    added = MemoryPass(back, 6 * tiles)
    return Core((*kernels.forward, pack, merge), (*kernels.backward, pack, added))


def _met(of: "Local", parts: int) -> float:
    """Parts in which a query sees keys, on average: with a window those of its own chunk and of as many before it as
    the window reaches; of stripes all."""
    chunk = of.sequence / of.cp / (2 if of.context_split == "zigzag" else 1)
    reached = parts if of.context_split == "striped" or not of.window else 1 + of.window / chunk
    return min(float(parts), reached)


def without_weights(of: "Local", queries: float, keys_values: float, value: float) -> Core:
    """As a software computes it that never writes the S x S weights."""
    if of.stack.own:
        return core(of, queries, keys_values, value)
    return eager_parts(of, queries, value) if of.stack.merges == "eager" else fused(of, queries, value, 1)


def eager_parts(of: "Local", queries: float, value: float) -> Core:
    """One part for each rank's keys, with as many heads as queries have, merged and added up by torch's own kernels:
    of the rank whose parts are of all its queries."""
    if of.cp == 1:
        return fused(of, queries, value, 1)
    kernels, elements = fused(of, queries, value, of.cp), of.tokens * queries
    merge = MemoryPass(elements * (EAGER_ONCE + (of.cp - 1) * EAGER_MERGED), 8.0 * of.cp)
    added = MemoryPass(elements * (EAGER_ZEROED + of.cp * (EAGER_ADDED + 2 * EAGER_TURNED)), 12.0 * of.cp)
    return Core((*kernels.forward, merge), (*kernels.backward, added))


def _plain(of: "Local", queries: float, keys_values: float, value: float) -> Core:
    """Under masks, tile by tile: products and softmax in fp32, each an operation of its own."""
    heads = of.shape.heads / of.tp * of.batch
    rows, keys, dim = of.sequence / of.cp, _seen(of) * of.uneven, queries / (of.shape.heads / of.tp)
    scores = heads * rows * keys * 4
    tiles = max(1.0, rows / ROWS) * max(float(of.cp), keys / COLUMNS)
    weigh, mix = Product(rows, dim, keys, heads, 4.0), Product(rows, keys, _dim(of, value), heads, 4.0)
    return Core(
        (weigh, MemoryPass(7 * scores, 12 * tiles), mix),
        (weigh, mix, mix, weigh, weigh, MemoryPass(9 * scores, 16 * tiles)),
    )
