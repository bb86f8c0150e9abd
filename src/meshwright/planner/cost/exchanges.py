"""Exchanges of tensor, context and expert parallelism inside a layer. Letters as in block.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import NO_EXCHANGES, Exchange, Exchanges, LayerOperation

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local


def enter(of: "Local", inputs: int = 1, *, alone: bool = False, readers: Sequence[LayerOperation] = ()) -> Exchanges:
    """f or g in front of column-split matrices. With sp the input is gathered again backward, but
    where f and g stand `alone`, in front of something else that reads it too. In this package's engine it is gathered
    beside the products of `readers` with their weights, and its gradient summed beside those of the weights, unless
    a split backward pass leaves these for later. Compiled blocks leave none."""
    if of.tp == 1:
        return NO_EXCHANGES
    beside = readers if of.stack.own and not alone else ()
    inner = tuple(work for op in beside for work in op.inputs)
    after = tuple(work for op in beside for work in op.weights) if of.compiled or not of.splits else ()
    if not of.sp:
        return Exchanges((), (Exchange("tp", "all-reduce", of.hidden_bytes, inputs, after),))
    again = (Exchange("tp", "all-gather", of.hidden_bytes, 1.0, inner),) if of.stack.regather and not alone else ()
    summed = Exchange("tp", "reduce-scatter", of.hidden_bytes, 1.0, after)
    return Exchanges((Exchange("tp", "all-gather", of.hidden_bytes),), (summed, *again))


def leave(of: "Local") -> Exchanges:
    """f* or g* behind row-split matrices."""
    if of.tp == 1:
        return NO_EXCHANGES
    if not of.sp:
        return Exchanges((Exchange("tp", "all-reduce", of.hidden_bytes),))
    gathered = Exchange("tp", "all-gather", of.hidden_bytes)
    return Exchanges((Exchange("tp", "reduce-scatter", of.hidden_bytes),), (gathered,))


def ring(of: "Local", keys_values: float) -> Exchanges:
    """Context parallelism: all keys and values pass by; backward also their gradients, in fp32."""
    if of.cp == 1:
        return NO_EXCHANGES
    size = of.batch * of.sequence * keys_values * of.width
    there, back = ("ring", "ring") if of.ring else ("all-gather", "reduce-scatter")
    keys = Exchange("cp", there, size)  # type: ignore[arg-type]  # two of the collectives
    gradients = Exchange("cp", back, size * 4 / of.width)  # type: ignore[arg-type]  # likewise
    return Exchanges((keys,), (keys, gradients))


def balance(of: "Local") -> tuple[Exchange, ...]:
    """Shares and probabilities of the experts in each sequence, where ranks see a part of it."""
    assert of.shape.moe is not None
    size = 2.0 * of.batch * of.shape.moe.experts * 4
    axes = [axis for axis, parts in (("cp", of.cp), ("tp", of.tp if of.ep > 1 else 1)) if parts > 1]
    return tuple(Exchange(axis, "all-reduce", size) for axis in axes)  # type: ignore[arg-type]  # two of the axes
