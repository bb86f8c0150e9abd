"""Exchanges of tensor, context and expert parallelism inside a layer. Letters as in block.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.cost.work import NO_EXCHANGES, Collective, Exchange, Exchanges, LayerOperation, MemoryPass, Work
from meshwright.spec.recipe.recipe import most_answers
from meshwright.spec.rules.quantized_weights import holds_codes

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape


def enter(
    local: "LocalShape", inputs: int = 1, *, alone: bool = False, readers: Sequence[LayerOperation] = ()
) -> Exchanges:
    """Return f or g before column-split matrices.

    With sp the input is gathered again in the backward pass, unless the `readers` are frozen. It is not either if f and
    g stand `alone`: before another reader too, or before quantized weights.

    Meshwright's engine gathers the input beside the products of `readers`, piece by piece in the forward pass. It sums
    the gradient beside the weight gradients, unless a split backward pass defers these.
    """
    if local.tp == 1:
        return NO_EXCHANGES
    alone = alone or holds_codes(local.shape)
    beside = readers if local.stack.is_meshwright and not alone else ()
    products, inner = (tuple(work for op in beside for work in getattr(op, side)) for side in ("forward", "inputs"))
    # a split backward pass computes weight gradients later, so nothing is left to hide the sum
    after = tuple(work for op in beside for work in op.weights) if not local.splits else ()
    if not local.sp:
        return Exchanges((), (Exchange("tp", "all-reduce", local.hidden_bytes, inputs, after),))
    read_again = local.stack.regather and not alone and any(op.weights for op in readers)
    again = (in_pieces(local, "all-gather", inner),) if read_again else ()
    summed = in_pieces(local, "reduce-scatter", after)
    return Exchanges((in_pieces(local, "all-gather", products, waits=True),), (summed, *again))


def leave(local: "LocalShape", writer: LayerOperation | None = None) -> Exchanges:
    """Return f* or g* after row-split matrices.

    Meshwright's engine runs it beside the product of the `writer`, piece by piece, and gathers the gradient likewise.
    """
    if local.tp == 1:
        return NO_EXCHANGES
    forward, inputs = (writer.forward, writer.inputs) if writer and local.stack.is_meshwright else ((), ())
    if not local.sp:
        whole = Exchange("tp", "all-reduce", local.hidden_bytes)
        return Exchanges((in_pieces(local, "all-reduce", forward, waits=True) if writer else whole,))
    gathered = in_pieces(local, "all-gather", inputs, waits=True)
    return Exchanges((in_pieces(local, "reduce-scatter", forward, waits=True),), (gathered,))


def in_pieces(
    local: "LocalShape", collective: Collective, beside: tuple[Work, ...] = (), *, waits: bool = False
) -> Exchange:
    """Return an exchange of the hidden states, one call per piece of the sequence.

    `waits`: the work `beside` has the same pieces, and each needs or produces the piece that is exchanged.
    """
    whole = Exchange("tp", collective, local.hidden_bytes / local.pieces, local.pieces)
    if not waits:
        return whole._replace(beside=beside)
    return whole._replace(within=beside, share=1 - 1 / local.pieces) if local.pieces > 1 else whole


def together(local: "LocalShape", columns: float) -> tuple[Work, ...]:
    """Return the memory pass that joins the pieces of a sequence, for this number of columns."""
    return (MemoryPass(2 * local.tokens * columns * local.width),) if local.pieces > 1 else ()


def ring(local: "LocalShape", keys_values: float) -> Exchanges:
    """Return the exchanges of context parallelism.

    They are keys and values in both passes, and in the backward pass also their gradients, in fp32.
    """
    if local.cp == 1:
        return NO_EXCHANGES
    size = local.batch * local.sequence * keys_values * local.width
    there, back = ("ring", "ring") if local.ring else ("all-gather", "reduce-scatter")
    keys = Exchange("cp", there, size)  # type: ignore[arg-type]  # two of the collectives
    gradients = Exchange("cp", back, size * 4 / local.width)  # type: ignore[arg-type]  # likewise
    return Exchanges((keys,), (keys, gradients))


def exchange_passes(
    local: "LocalShape", size_bytes: float, experts: Sequence[LayerOperation], shared: Sequence[LayerOperation]
) -> tuple[Exchanges, Exchanges]:
    """Return the exchanges of `size_bytes` of rows to their experts and back.

    In the forward pass they stand before and behind the experts' operations, whose pieces hide both, in the backward
    pass the other way round. In Meshwright's engine the shared experts' first product runs beside the one that arrives,
    the rest beside the one that returns.
    """
    if local.ep == 1:
        return NO_EXCHANGES, NO_EXCHANGES
    assert local.shape.moe is not None
    # ranks first tell each other how many rows come: 8 bytes per expert
    tell = Exchange("ep", "all-to-all", 8.0 * local.shape.moe.experts)
    parts = (
        (shared[:2], shared[2:]) if local.stack.is_meshwright else ((), ())
    )  # entry and first product, then the rest
    # only what goes to experts may be narrowed: rows in the forward pass, gradients of outputs in the backward pass
    narrow = (local.stack.dispatch_bytes or local.width) / local.width
    there, back = (
        Exchanges(
            *(
                _exchange_pass(local, size_bytes * (narrow if side == out else 1), experts, part, side)
                for side in (0, 1)
            )
        )
        for out, part in enumerate(parts)
    )
    return there._replace(forward=(tell, *there.forward)), back


def _exchange_pass(
    local: "LocalShape",
    size_bytes: float,
    experts: Sequence[LayerOperation],
    shared: Sequence[LayerOperation],
    back: int,
) -> tuple[Exchange]:
    """Return the exchange of the forward pass, or of the backward pass (1)."""
    # compiled blocks compute weight gradients at once even in a split pass
    later = local.splits and not local.compiled
    sides = ("inputs",) if back and later else ("inputs", "weights") if back else ("forward",)

    def works(operations: Sequence[LayerOperation]) -> tuple[Work, ...]:
        return tuple(work for op in operations for side in sides for work in getattr(op, side))

    pieces = local.ep_pieces
    whole = Exchange("ep", "all-to-all", size_bytes / pieces, pieces, beside=works(shared))
    others = tuple(exchange for op in shared for exchange in op.exchanges[back] if exchange.beside or exchange.within)
    # each exchange hides behind half of the experts' pieces; the other half hides the way back
    return (whole._replace(first=others, within=works(experts) if pieces > 1 else (), share=0.5),)


def balance(local: "LocalShape") -> tuple[Exchange, ...]:
    """Return the exchange of experts' shares and probabilities per sequence, where ranks see only a part of it."""
    assert local.shape.moe is not None
    size = 2.0 * local.batch * local.shape.moe.experts * 4
    axes = [axis for axis, parts in (("cp", local.cp), ("tp", local.tp if local.ep > 1 else 1)) if parts > 1]
    return tuple(Exchange(axis, "all-reduce", size) for axis in axes)  # type: ignore[arg-type]  # two of the axes


def answer_sums(local: "LocalShape") -> tuple[Exchange, ...]:
    """Return the exchange of log-probability and tokens of each answer, and of padding, in fp64."""
    size = local.batch * (most_answers(local.sequence) + 1) * 2 * 8
    return (Exchange("cp", "all-reduce", size),) if local.cp > 1 else ()
