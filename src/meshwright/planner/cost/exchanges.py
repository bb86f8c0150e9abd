"""Exchanges of tensor, context and expert parallelism inside a layer. Letters as in block.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import (
    NO_EXCHANGES,
    Collective,
    Exchange,
    Exchanges,
    LayerOperation,
    MemoryPass,
    Work,
)
from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.objective_traits import most_answers

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local


def enter(of: "Local", inputs: int = 1, *, alone: bool = False, readers: Sequence[LayerOperation] = ()) -> Exchanges:
    """f or g in front of column-split matrices. With sp the input is gathered again backward, but where the `readers`
    are frozen, or f and g stand `alone`: in front of something else that reads it too, or of codes. In this package's
    engine it is gathered beside the products of `readers`, forward piece by piece, and its gradient summed beside
    those of the weights, unless a split backward pass leaves these for later."""
    if of.tp == 1:
        return NO_EXCHANGES
    alone = alone or holds_codes(of.shape)
    beside = readers if of.stack.own and not alone else ()
    products, inner = (tuple(work for op in beside for work in getattr(op, side)) for side in ("forward", "inputs"))
    after = tuple(work for op in beside for work in op.weights) if not of.splits else ()
    if not of.sp:
        return Exchanges((), (Exchange("tp", "all-reduce", of.hidden_bytes, inputs, after),))
    read_again = of.stack.regather and not alone and any(op.weights for op in readers)
    again = (in_pieces(of, "all-gather", inner),) if read_again else ()
    summed = in_pieces(of, "reduce-scatter", after)
    return Exchanges((in_pieces(of, "all-gather", products, waits=True),), (summed, *again))


def leave(of: "Local", writer: LayerOperation | None = None) -> Exchanges:
    """f* or g* behind row-split matrices; in this package's engine beside the product of the `writer`, piece by piece.
    Backward the gradient is gathered likewise."""
    if of.tp == 1:
        return NO_EXCHANGES
    forward, inputs = (writer.forward, writer.inputs) if writer and of.stack.own else ((), ())
    if not of.sp:
        whole = Exchange("tp", "all-reduce", of.hidden_bytes)
        return Exchanges((in_pieces(of, "all-reduce", forward, waits=True) if writer else whole,))
    gathered = in_pieces(of, "all-gather", inputs, waits=True)
    return Exchanges((in_pieces(of, "reduce-scatter", forward, waits=True),), (gathered,))


def in_pieces(of: "Local", collective: Collective, beside: tuple[Work, ...] = (), *, waits: bool = False) -> Exchange:
    """Of the hidden states, a call for each piece of the sequence. `waits`: the work `beside` is of the same pieces,
    each of which it must have, or makes."""
    whole = Exchange("tp", collective, of.hidden_bytes / of.pieces, of.pieces)
    if not waits:
        return whole._replace(beside=beside)
    return whole._replace(within=beside, share=1 - 1 / of.pieces) if of.pieces > 1 else whole


def together(of: "Local", columns: float) -> tuple[Work, ...]:
    """A pass over memory: what products made of pieces of a sequence, so many columns, is put together."""
    return (MemoryPass(2 * of.tokens * columns * of.width),) if of.pieces > 1 else ()


def ring(of: "Local", keys_values: float) -> Exchanges:
    """Context parallelism: all keys and values pass by; backward also their gradients, in fp32."""
    if of.cp == 1:
        return NO_EXCHANGES
    size = of.batch * of.sequence * keys_values * of.width
    there, back = ("ring", "ring") if of.ring else ("all-gather", "reduce-scatter")
    keys = Exchange("cp", there, size)  # type: ignore[arg-type]  # two of the collectives
    gradients = Exchange("cp", back, size * 4 / of.width)  # type: ignore[arg-type]  # likewise
    return Exchanges((keys,), (keys, gradients))


def exchange_passes(
    of: "Local", size_bytes: float, experts: Sequence[LayerOperation], shared: Sequence[LayerOperation]
) -> tuple[Exchanges, Exchanges]:
    """Rows of so many bytes to their experts and back, forward in front of and behind the experts' operations, whose
    pieces hide both passes, backward the other way round. In this package's engine the first product of the shared
    experts runs beside the one that comes, the rest of them beside the one that returns."""
    if of.ep == 1:
        return NO_EXCHANGES, NO_EXCHANGES
    assert of.shape.moe is not None
    tell = Exchange("ep", "all-to-all", 8.0 * of.shape.moe.experts)
    parts = (shared[:2], shared[2:]) if of.stack.own else ((), ())  # the border in front and the product; the rest
    narrow = (of.stack.dispatch_bytes or of.width) / of.width
    there, back = (
        Exchanges(
            *(_exchange_pass(of, size_bytes * (narrow if side == out else 1), experts, part, side) for side in (0, 1))
        )
        for out, part in enumerate(parts)
    )
    return there._replace(forward=(tell, *there.forward)), back


def _exchange_pass(
    of: "Local", size_bytes: float, experts: Sequence[LayerOperation], shared: Sequence[LayerOperation], back: int
) -> tuple[Exchange]:
    """Of a forward pass, or of a backward pass (1)."""
    later = of.splits and not of.compiled
    sides = ("inputs",) if back and later else ("inputs", "weights") if back else ("forward",)

    def works(operations: Sequence[LayerOperation]) -> tuple[Work, ...]:
        return tuple(work for op in operations for side in sides for work in getattr(op, side))

    pieces = of.ep_pieces
    whole = Exchange("ep", "all-to-all", size_bytes / pieces, pieces, beside=works(shared))
    others = tuple(one for op in shared for one in op.exchanges[back] if one.beside or one.within)
    return (whole._replace(first=others, within=works(experts) if pieces > 1 else (), share=0.5),)


def balance(of: "Local") -> tuple[Exchange, ...]:
    """Shares and probabilities of the experts in each sequence, where ranks see a part of it."""
    assert of.shape.moe is not None
    size = 2.0 * of.batch * of.shape.moe.experts * 4
    axes = [axis for axis, parts in (("cp", of.cp), ("tp", of.tp if of.ep > 1 else 1)) if parts > 1]
    return tuple(Exchange(axis, "all-reduce", size) for axis in axes)  # type: ignore[arg-type]  # two of the axes


def answer_sums(of: "Local") -> tuple[Exchange, ...]:
    """Log-probability and tokens of each answer that rows have room for, and of what fills them up, in fp64."""
    size = of.batch * (most_answers(of.sequence) + 1) * 2 * 8
    return (Exchange("cp", "all-reduce", size),) if of.cp > 1 else ()
