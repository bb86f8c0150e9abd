"""What adapters add to a layer, and what frozen weights take away: thin products beside the matrices, no gradients of
the matrices, and of what only these gradients need nothing kept. Without adapters nothing here changes a figure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshwright.planner.cost.activations import MASK_BYTES, HeadWidths, Routed
from meshwright.planner.cost.states import largest_coded
from meshwright.planner.cost.work import KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.quantization_schemes import PIECE

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local


@dataclass(frozen=True, slots=True)
class ThinWork:
    """Of the adapters beside one operation's matrices."""

    forward: tuple[Work, ...] = ()
    inputs: tuple[Work, ...] = ()
    weights: tuple[Work, ...] = ()


NONE = ThinWork()


def adapted(of: "Local", name: str) -> float:
    """Of the outputs of an operation (`qkv`, `mlp up`, `o`) the share that has an adapter; 0 without any."""
    lora = of.shape.lora
    if lora is None:
        return 0.0
    last = name.rpartition(" ")[2]
    together = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - of.gates :]}.get(last, (last,))
    return sum(lora.adapts(one) for one in together) / len(together)


def thin(of: "Local", name: str, tokens: float, into: float, out: float, batch: float = 1.0) -> ThinWork:
    """x A^T and B^T of it, and their sum with x W^T; of `batch` experts at once, `tokens` of each."""
    share, lora = adapted(of, name), of.shape.lora
    if not share or lora is None:
        return NONE
    last = name.rpartition(" ")[2]
    rank = lora.rank * (of.gates if last == "up" else 3 if last == "qkv" else 1) * share
    made, width = out * share, of.product_width
    added = MemoryPass(3 * tokens * batch * made * of.width * (2 if lora.dora else 1))
    return ThinWork(
        forward=(Product(tokens, into, rank, batch, width), Product(tokens, lora.rank, made, batch, width), added),
        inputs=(Product(tokens, made, lora.rank, batch, width), Product(tokens, rank, into, batch, width)),
        weights=(Product(into, tokens, rank, batch, width), Product(lora.rank, tokens, made, batch, width)),
    )


def behind_frozen(operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """A model's first layer, whose input no trained weight has made: no gradient is sent in front of the first weight
    that is trained. What this weight reads is gathered again."""
    reached = next((place for place, op in enumerate(operations) if op.weights), len(operations))
    return (*map(_unreached, operations[: reached + 1]), *operations[reached + 1 :])


def _unreached(op: LayerOperation) -> LayerOperation:
    reads = op.name.startswith("enter ")
    again = tuple(one for one in op.exchanges.backward if reads and one.collective == "all-gather")
    return op._replace(exchanges=op.exchanges._replace(backward=again))


RESTORING_PASSES = 5
"""Operations that restore some rows of a matrix from codes (kernels/quantized_matrix.py): codes as indices, the numbers
they name, zeros, scales, the rounding into its place."""


def restored(of: "Local", name: str, into: float, out: float, batch: float = 1.0) -> tuple[Work, ...]:
    """A frozen matrix, or one of each of `batch` experts, made of its codes for one product."""
    lora = of.shape.lora
    if lora is None or lora.scheme is None or name == "router":
        return ()
    elements = into * out
    read = lora.scheme.bits / 8
    if of.gpu and lora.scheme.bits == 4:  # a kernel of its own, and one for scales
        return (MemoryPass((read + of.width) * elements * batch, 2 * batch),)
    of_numbers = 8 * (1 + (lora.scheme.zeros != "fixed"))
    moved = (read + 2 * read * 4) + (2 * read * 2 + 4) + of_numbers + 4 + of.width
    return (MemoryPass(moved * elements * batch, RESTORING_PASSES * batch * ceil(elements / PIECE)),)


def restored_bytes(of: "Local", group: str) -> float:
    """The largest frozen matrix of a part of a layer (attention, mlp, expert) while it is restored from codes: itself,
    and indices and numbers of some rows. 0 where none is."""
    if of.shape.lora is None or of.shape.lora.scheme is None:
        return 0.0
    elements = largest_coded(of.shape, of.tp, of.ep, group)
    return elements * of.width + 6.0 * min(elements, PIECE)


def kept(
    of: "Local", widths: HeadWidths, routed: Routed | None, plain: Sequence[KeptBytes]
) -> tuple[KeptBytes, ...]:  # fmt: skip
    """What a layer keeps, of what it keeps where all its weights are trained."""
    lora = of.shape.lora
    if lora is None:
        return tuple(plain)
    latent = ("q_down", "q", "kv_down") if of.shape.mla else ("q", "k", "v")
    reads = {"attention norm output": latent, "mlp norm output": ("gate", "up"), "dispatched": ("gate", "up")}
    unread = [name for name, readers in reads.items() if lora.dropout or not any(map(lora.adapts, readers))]
    unread += ["router input in fp32"]
    down = lora.adapts("down") and not lora.dropout
    if not down and of.gates == 1:
        unread += ["mlp activation", "experts activation", "shared activation"]
    if not down and routed:
        unread += ["experts activation"]
    if lora.dropout:
        unread += ["normed low ranks"]
    return (*(one for one in plain if one.name not in unread), *_added(of, widths, routed))


def _added(of: "Local", widths: HeadWidths, routed: Routed | None) -> Iterator[KeptBytes]:
    """What B multiplies, of each adapter; the products of gated MLPs, which no kernel makes again for A's gradient;
    what DoRA scales; and with dropout what A reads of each, and which of it was dropped."""
    lora, shape = of.shape.lora, of.shape
    assert lora is not None
    for name, out in _dense(of, widths, routed):
        if lora.adapts(name):
            narrow, result = of.tokens * lora.rank * of.width, of.tokens * out * of.width
            yield KeptBytes(f"adapter of {name}", narrow, narrow + result)  # both are results of products
            if lora.dora:
                yield KeptBytes(f"scaled result of {name}", result, 0.0)
            if lora.dropout:
                dropped = of.tokens * _read(of, widths, routed, name) * (of.width + MASK_BYTES)
                yield KeptBytes(f"dropped input of {name}", dropped, 0.0)
    gated = of.gates == 2 and lora.adapts("down") and not lora.dropout and not of.lowered
    if gated and not routed:
        yield KeptBytes("mlp product", of.tokens * shape.ffn / of.tp * of.width, 0.0)
    if routed and shape.moe:
        narrow = routed.copies * lora.rank * of.width
        for name in ("gate", "up", "down")[2 - of.gates :]:
            if lora.adapts(name):
                result = routed.copies * (shape.hidden if name == "down" else routed.ffn) * of.width
                yield KeptBytes(f"adapter of experts' {name}", narrow, narrow + result)
                if lora.dropout:
                    read = routed.copies * (routed.ffn if name == "down" else shape.hidden)
                    yield KeptBytes(f"dropped input of experts' {name}", read * (of.width + MASK_BYTES), 0.0)
        if gated and shape.moe.shared_experts:
            yield KeptBytes(
                "shared product", of.tokens * shape.moe.shared_experts * shape.moe.ffn / of.tp * of.width, 0
            )


def _dense(of: "Local", widths: HeadWidths, routed: Routed | None) -> Iterator[tuple[str, float]]:
    """(matrix, its outputs on a rank) of a layer, but for routed experts."""
    shape, mla, moe = of.shape, of.shape.mla, of.shape.moe
    if mla:
        low = (("q_down", mla.q_rank), ("q_up", widths.queries)) if mla.q_rank else (("q", widths.queries),)
        yield from (*low, ("kv_down", mla.kv_rank + mla.rope_dim))
        yield "kv_up", shape.heads * (mla.nope_dim + mla.v_dim) / of.tp
    else:
        yield from (("q", widths.queries), ("k", widths.keys_values / 2), ("v", widths.keys_values / 2))
    yield "o", shape.hidden
    ffn = shape.ffn / of.tp if not routed else moe.shared_experts * moe.ffn / of.tp if moe else 0.0
    if ffn:
        yield from [(name, ffn) for name in ("gate", "up")[2 - of.gates :]]
        yield "down", shape.hidden


def _read(of: "Local", widths: HeadWidths, routed: Routed | None, name: str) -> float:
    """The inputs on a rank of a matrix of `_dense`."""
    low = {"q_up": of.shape.mla.q_rank, "kv_up": of.shape.mla.kv_rank} if of.shape.mla else {}
    inner = dict(_dense(of, widths, routed)).get("up", 0.0)
    return low.get(name) or {"o": widths.out, "down": inner}.get(name, of.shape.hidden)


READS = ({"q", "k", "v", "q_down", "kv_down"}, {"gate", "up"})
"""Matrices of one input."""


def queued(of: "Local", widths: HeadWidths, routed: Routed | None) -> float:
    """From a split backward pass to the gradients of adapters: of each its input, once where several read it and
    dropout leaves it as it is, what B multiplies, and the gradients of both results."""
    lora, inputs = of.shape.lora, dict[str, float]()
    assert lora is not None
    found = 0.0
    for name, out in _dense(of, widths, routed):
        if lora.adapts(name):
            read = name if lora.dropout else next((min(group) for group in READS if name in group), name)
            inputs[read] = _read(of, widths, routed, name)
            found += of.tokens * (out + 2 * lora.rank) * of.width
    found += of.tokens * sum(inputs.values()) * of.width
    for name in ("gate", "up", "down")[2 - of.gates :]:
        if routed and lora.adapts(name):
            shared = name == "gate" and lora.adapts("up") and not lora.dropout
            wide = routed.ffn if shared else routed.ffn + of.shape.hidden
            found += routed.copies * (wide + 2 * lora.rank) * of.width
    return found
