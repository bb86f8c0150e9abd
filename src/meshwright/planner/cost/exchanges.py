"""Exchanges of tensor, context and expert parallelism inside a layer. Letters as in block.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import Exchange, LayerOperation

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local

Exchanges = tuple[tuple[Exchange, ...], tuple[Exchange, ...]]
"""(forward, backward)."""


def enter(
    of: "Local", inputs: int = 1, *, alone: bool = False, readers: Sequence[LayerOperation] = ()
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """f or g in front of column-split matrices: (forward, backward). With sp the input is gathered again backward, but
    where f and g stand `alone`, in front of something else that reads it too. In this package's engine it is gathered
    beside the products of `readers` with their weights, and its gradient summed beside those of the weights, unless
    a split backward pass leaves these for later. Compiled blocks leave none."""
    if of.tp == 1:
        return (), ()
    beside = readers if of.stack.own and not alone else ()
    inner = tuple(work for op in beside for work in op.inputs)
    after = tuple(work for op in beside for work in op.weights) if of.compiled or not of.splits else ()
    if not of.sp:
        return (), (Exchange("tp", "all-reduce", of.hidden_bytes, inputs, after),)
    again = (Exchange("tp", "all-gather", of.hidden_bytes, 1.0, inner),) if of.stack.regather and not alone else ()
    return (Exchange("tp", "all-gather", of.hidden_bytes),), (
        Exchange("tp", "reduce-scatter", of.hidden_bytes, 1.0, after),
        *again,
    )


def leave(of: "Local", share: float) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """f* or g* behind row-split matrices."""
    if of.tp == 1:
        return (), ()
    size = of.hidden_bytes * share
    if not of.sp:
        return (Exchange("tp", "all-reduce", size),), ()
    return (Exchange("tp", "reduce-scatter", size),), (Exchange("tp", "all-gather", size),)


def ring(of: "Local", keys_values: float) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Context parallelism: all keys and values pass by; backward also their gradients, in fp32."""
    if of.cp == 1:
        return (), ()
    size = of.batch * of.sequence * keys_values * of.width
    if not of.ring:
        return (Exchange("cp", "all-gather", size),), (
            Exchange("cp", "all-gather", size),
            Exchange("cp", "reduce-scatter", size * 4 / of.width),
        )
    return (Exchange("cp", "ring", size),), (
        Exchange("cp", "ring", size),
        Exchange("cp", "ring", size * 4 / of.width),
    )


def balance(of: "Local") -> tuple[Exchange, ...]:
    """Shares and probabilities of the experts in each sequence, where ranks see a part of it."""
    assert of.shape.moe is not None
    size = 2.0 * of.batch * of.shape.moe.experts * 4
    axes = [axis for axis, parts in (("cp", of.cp), ("tp", of.tp if of.ep > 1 else 1)) if parts > 1]
    return tuple(Exchange(axis, "all-reduce", size) for axis in axes)  # type: ignore[arg-type]  # two of the axes
