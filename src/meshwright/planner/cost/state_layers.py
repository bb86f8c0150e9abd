"""Core of a linear-attention layer: its operations, kept tensors, and bytes inside its backward pass.

Products are those of spec/model/unbuilt_parts.py, timed by the kernels' curves. Convolution, norms and gates move
bytes. The wait of one chunk's state for the previous one's is not counted, since no times of it are published.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape


def core(local: "LocalShape") -> Iterator[LayerOperation]:
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
    yield gated(local, linear.values / local.tp)


def _products(local: "LocalShape", backward: bool) -> tuple[Work, ...]:
    linear = local.linear
    assert linear is not None
    chunks = local.tokens / linear.chunk * linear.value_heads / local.tp
    return tuple(Product(*size, chunks, float(local.width)) for size in linear.products(backward=backward))


def gated(local: "LocalShape", dims: float) -> LayerOperation:
    """Return the gating of an attention output of `dims` columns, normed if it comes from states."""
    moved = local.tokens * dims * local.width * local.stack.passes
    return _moving("gate", 3 * moved, 5 * moved)


def _moving(name: str, forward: float, inputs: float, launches: float = 1.0) -> LayerOperation:
    return LayerOperation(
        name=name, forward=(MemoryPass(forward, launches),), inputs=(MemoryPass(inputs, launches),), again=True
    )


def kept_tensors(local: "LocalShape") -> Iterator[KeptBytes]:
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


def inside_bytes(local: "LocalShape") -> float:
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
