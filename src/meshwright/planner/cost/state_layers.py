"""The core of a layer of linear attention: what it computes, what it keeps, what its backward pass makes at once.

The products are those of spec/linear_attention.py, each by the kernels' curves; convolution, norms and gates move
bytes. How one chunk's state waits for that of the chunk before is not counted: nobody published times of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local


def core(of: "Local") -> Iterator[LayerOperation]:
    """Between the products with weights."""
    linear = of.linear
    assert linear is not None
    word = of.tokens * of.width * of.stack.passes / of.tp
    if linear.taps:  # with its activation
        channels = word * linear.channels
        yield _moving("convolution", 2 * channels, 3 * channels)
    if linear.delta:  # lengths of queries and keys, rates
        keys, rates = 2 * word * linear.keys, 2 * word * linear.value_heads
        yield _moving("lengths", 2 * (keys + rates), 3 * (keys + rates), 4.0)
    else:  # the activation of queries, keys and values
        yield _moving("state activation", 2 * word * linear.channels, 3 * word * linear.channels)
    forward, backward = (_products(of, backward) for backward in (False, True))
    yield LayerOperation(name="attention", forward=forward, inputs=backward, again=True)
    yield gated(of, linear.values / of.tp)


def _products(of: "Local", backward: bool) -> tuple[Work, ...]:
    linear = of.linear
    assert linear is not None
    chunks = of.tokens / linear.chunk * linear.value_heads / of.tp
    return tuple(Product(*size, chunks, float(of.width)) for size in linear.products(backward=backward))


def gated(of: "Local", dims: float) -> LayerOperation:
    """A result of attention, normed where it comes of states, times what a gate makes of its own projection."""
    moved = of.tokens * dims * of.width * of.stack.passes
    return _moving("gate", 3 * moved, 5 * moved)


def _moving(name: str, forward: float, inputs: float, launches: float = 1.0) -> LayerOperation:
    return LayerOperation(
        name=name, forward=(MemoryPass(forward, launches),), inputs=(MemoryPass(inputs, launches),), again=True
    )


def kept(of: "Local") -> Iterator[KeptBytes]:
    """From the forward to the backward pass, but for what the gate makes. flash-linear-attention keeps queries, keys,
    values, rates and the inverse of each chunk's triangle (ChunkGatedDeltaRuleFunction); states are made again."""
    linear, core = of.linear, of.stack.selective == "core"
    assert linear is not None
    word = of.tokens * of.width / of.tp
    mixed, values = word * linear.channels, word * linear.values
    if linear.taps or not linear.delta:
        yield KeptBytes("projected queries, keys, values", mixed, mixed)
    yield KeptBytes("queries, keys, values", mixed, mixed if core else 0.0, "core")
    if linear.delta:
        rates = of.tokens * linear.value_heads / of.tp * (2 * of.width + 4)
        yield KeptBytes("rates", rates, rates)
        yield KeptBytes("triangles", word * linear.value_heads * linear.chunk, 0.0, "core")
    made = {"core": values, "products": of.hidden_bytes, "alternate": values}[of.stack.selective]
    yield KeptBytes("attention output", values, made, "core")


def inside_bytes(of: "Local") -> float:
    """At once inside the core's backward pass: gradients of queries, keys and values; of the gated delta rule also the
    states of all chunks, their gradients, and for each value head four tensors of keys and three of values."""
    linear = of.linear
    if linear is None:
        return 0.0
    word = of.tokens * of.width / of.tp
    if not linear.delta:
        return word * linear.channels
    states = 2 * linear.key_dim * linear.value_dim / linear.chunk
    return word * (linear.channels + linear.value_heads * (states + 4 * linear.key_dim + 3 * linear.value_dim))
