"""Effect of adapters on a layer.

They add thin products beside the matrices. Frozen matrices have no gradient, and tensors that only such gradients read
are not kept. Without adapters nothing here changes a figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshwright.planner.cost.activations import MASK_BYTES, HeadWidths, Routed
from meshwright.planner.cost.states import largest_coded
from meshwright.planner.cost.work import KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.model.quantization_schemes import PIECE

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape


@dataclass(frozen=True, slots=True)
class ThinWork:
    """Work of the adapters beside one operation's matrices."""

    forward: tuple[Work, ...] = ()
    inputs: tuple[Work, ...] = ()
    weights: tuple[Work, ...] = ()


NONE = ThinWork()


def adapted(local: "LocalShape", name: str) -> float:
    """Return the share of an operation's outputs (`qkv`, `mlp up`, `o`) that has an adapter. 0 without adapters."""
    lora = local.shape.lora
    if lora is None:
        return 0.0
    last = name.rpartition(" ")[2]
    matrices = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - local.gates :]}.get(last, (last,))
    return sum(lora.adapts(matrix) for matrix in matrices) / len(matrices)


def thin(local: "LocalShape", name: str, tokens: float, into: float, out: float, batch: float = 1.0) -> ThinWork:
    """Return the products with A and B and the sum with x W^T, for `batch` experts of `tokens` each."""
    share, lora = adapted(local, name), local.shape.lora
    if not share or lora is None:
        return NONE
    last = name.rpartition(" ")[2]
    rank = lora.rank * (local.gates if last == "up" else 3 if last == "qkv" else 1) * share
    made, width = out * share, local.product_width
    added = MemoryPass(3 * tokens * batch * made * local.width * (2 if lora.dora else 1))
    return ThinWork(
        forward=(Product(tokens, into, rank, batch, width), Product(tokens, lora.rank, made, batch, width), added),
        inputs=(Product(tokens, made, lora.rank, batch, width), Product(tokens, rank, into, batch, width)),
        weights=(Product(into, tokens, rank, batch, width), Product(lora.rank, tokens, made, batch, width)),
    )


def behind_frozen(operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """Return the operations of a model's first layer, whose input no trained weight has produced.

    No gradient is sent before the first trained weight. That weight's input is still gathered again.
    """
    reached = next((index for index, op in enumerate(operations) if op.weights), len(operations))
    return (*map(_without_gradient, operations[: reached + 1]), *operations[reached + 1 :])


def _without_gradient(op: LayerOperation) -> LayerOperation:
    reads = op.name.startswith("enter ")
    again = tuple(exchange for exchange in op.exchanges.backward if reads and exchange.collective == "all-gather")
    return op._replace(exchanges=op.exchanges._replace(backward=again))


RESTORING_PASSES = 5
"""Operations that restore some rows of a matrix from codes (kernels/quantized/matrix.py).

Codes as indices, the numbers they name, zeros, scales, and the rounding into place.
"""


def restored(local: "LocalShape", name: str, into: float, out: float, batch: float = 1.0) -> tuple[Work, ...]:
    """Return the work of dequantizing a frozen matrix, or one of each of `batch` experts, for one product."""
    lora = local.shape.lora
    if lora is None or lora.scheme is None or name == "router":
        return ()
    elements = into * out
    read = lora.scheme.bits / 8
    if local.gpu and lora.scheme.bits == 4:  # one kernel for codes, one for scales
        return (MemoryPass((read + local.width) * elements * batch, 2 * batch),)
    numbers_bytes = 8 * (1 + (lora.scheme.zeros != "fixed"))
    moved = (read + 2 * read * 4) + (2 * read * 2 + 4) + numbers_bytes + 4 + local.width
    return (MemoryPass(moved * elements * batch, RESTORING_PASSES * batch * ceil(elements / PIECE)),)


def restored_bytes(local: "LocalShape", group: str) -> float:
    """Return the bytes of the largest frozen matrix of a part (attention, mlp, expert) while it is dequantized.

    They are the matrix itself, and indices and numbers of some rows. 0 = nothing is quantized.
    """
    if local.shape.lora is None or local.shape.lora.scheme is None:
        return 0.0
    elements = largest_coded(local.shape, local.tp, local.ep, group)
    return elements * local.width + 6.0 * min(elements, PIECE)


def with_adapters(
    local: "LocalShape", widths: HeadWidths, routed: Routed | None, plain: Sequence[KeptBytes]
) -> tuple[KeptBytes, ...]:  # fmt: skip
    """Return what a layer with adapters keeps, from what it keeps when all weights are trained."""
    lora = local.shape.lora
    if lora is None:
        return tuple(plain)
    # a frozen matrix needs its input for nothing: only those that an adapter reads stay
    latent = ("q_down", "q", "kv_down") if local.shape.mla else ("q", "k", "v")
    reads = {"attention norm output": latent, "mlp norm output": ("gate", "up"), "dispatched": ("gate", "up")}
    unread = [name for name, readers in reads.items() if lora.dropout or not any(map(lora.adapts, readers))]
    unread += ["router input in fp32"]
    # the MLP's activation is the input of "down": without an adapter there, or with dropout, no one reads it
    down = lora.adapts("down") and not lora.dropout
    if not down and local.gates == 1:
        unread += ["mlp activation", "experts activation", "shared activation"]
    if not down and routed:
        unread += ["experts activation"]
    if lora.dropout:
        unread += ["normed low ranks"]
    return (*(tensor for tensor in plain if tensor.name not in unread), *_adapter_tensors(local, widths, routed))


def _adapter_tensors(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> Iterator[KeptBytes]:
    """Yield the tensors that adapters add.

    They are the input of each B, and the product of a gated MLP, since no kernel recomputes it for A's gradient. DoRA
    adds the outputs that it scales. Dropout adds each A's input and its mask.
    """
    lora, shape = local.shape.lora, local.shape
    assert lora is not None
    for name, out in _dense_outputs(local, widths, routed):
        if lora.adapts(name):
            narrow, output = local.tokens * lora.rank * local.width, local.tokens * out * local.width
            yield KeptBytes(f"adapter of {name}", narrow, narrow + output)  # both are outputs of products
            if lora.dora:
                yield KeptBytes(f"scaled result of {name}", output, 0.0)
            if lora.dropout:
                dropped = local.tokens * _inputs(local, widths, routed, name) * (local.width + MASK_BYTES)
                yield KeptBytes(f"dropped input of {name}", dropped, 0.0)
    # the fused kernel recomputes silu(gate) * up for the matrix, but A's gradient needs it, too
    gated = local.gates == 2 and lora.adapts("down") and not lora.dropout and not local.lowered
    if gated and not routed:
        yield KeptBytes("mlp product", local.tokens * shape.ffn / local.tp * local.width, 0.0)
    if routed and shape.moe:
        narrow = routed.copies * lora.rank * local.width
        for name in ("gate", "up", "down")[2 - local.gates :]:
            if lora.adapts(name):
                output = routed.copies * (shape.hidden if name == "down" else routed.ffn) * local.width
                yield KeptBytes(f"adapter of experts' {name}", narrow, narrow + output)
                if lora.dropout:
                    read = routed.copies * (routed.ffn if name == "down" else shape.hidden)
                    yield KeptBytes(f"dropped input of experts' {name}", read * (local.width + MASK_BYTES), 0.0)
        if gated and shape.moe.shared_experts:
            yield KeptBytes(
                "shared product", local.tokens * shape.moe.shared_experts * shape.moe.ffn / local.tp * local.width, 0
            )


def _dense_outputs(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> Iterator[tuple[str, float]]:
    """Yield (matrix, its outputs on a rank) of a layer, except routed experts."""
    shape, mla, moe = local.shape, local.shape.mla, local.shape.moe
    if mla:
        low = (("q_down", mla.q_rank), ("q_up", widths.queries)) if mla.q_rank else (("q", widths.queries),)
        yield from (*low, ("kv_down", mla.kv_rank + mla.rope_dim))
        yield "kv_up", shape.heads * (mla.nope_dim + mla.v_dim) / local.tp
    else:
        yield from (("q", widths.queries), ("k", widths.keys_values / 2), ("v", widths.keys_values / 2))
    yield "o", shape.hidden
    ffn = shape.ffn / local.tp if not routed else moe.shared_experts * moe.ffn / local.tp if moe else 0.0
    if ffn:
        yield from [(name, ffn) for name in ("gate", "up")[2 - local.gates :]]
        yield "down", shape.hidden


def _inputs(local: "LocalShape", widths: HeadWidths, routed: Routed | None, name: str) -> float:
    """Return the inputs on a rank of a matrix of `_dense_outputs`."""
    low = {"q_up": local.shape.mla.q_rank, "kv_up": local.shape.mla.kv_rank} if local.shape.mla else {}
    inner = dict(_dense_outputs(local, widths, routed)).get("up", 0.0)
    return low.get(name) or {"o": widths.out, "down": inner}.get(name, local.shape.hidden)


READS = ({"q", "k", "v", "q_down", "kv_down"}, {"gate", "up"})
"""Groups of matrices that share an input."""


def queued(local: "LocalShape", widths: HeadWidths, routed: Routed | None) -> float:
    """Return the bytes from a split backward pass to the gradients of adapters.

    They are each adapter's input, the input of B, and the gradients of both outputs. Matrices that share an input keep
    it once, unless dropout alters it.
    """
    lora, inputs = local.shape.lora, dict[str, float]()
    assert lora is not None
    elements_bytes = 0.0
    for name, out in _dense_outputs(local, widths, routed):
        if lora.adapts(name):
            read = name if lora.dropout else next((min(group) for group in READS if name in group), name)
            inputs[read] = _inputs(local, widths, routed, name)
            elements_bytes += local.tokens * (out + 2 * lora.rank) * local.width
    elements_bytes += local.tokens * sum(inputs.values()) * local.width
    for name in ("gate", "up", "down")[2 - local.gates :]:
        if routed and lora.adapts(name):
            shared = name == "gate" and lora.adapts("up") and not lora.dropout
            wide = routed.ffn if shared else routed.ffn + local.shape.hidden
            elements_bytes += routed.copies * (wide + 2 * lora.rank) * local.width
    return elements_bytes
