"""Products with weight matrices, their gradients and memory passes, with adapters or rounded weights.

Adapters add thin products to those with the matrices. Frozen matrices have no gradient, and tensors that only such
gradients read are not kept. Without adapters nothing here changes a figure.

Weights may be rounded in every product (recipe.fake_quantize). A rounded copy of each matrix is kept from forward to
backward. Layers that are recomputed round theirs again, all of one layer at once. Each forward pass adds rounding
passes over memory, and tensor-parallel ranks share some scales.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from meshwright.planner.cost.micro_batch import MASK_BYTES, HeadWidths, LocalShape, MicroBatchCost, Routed
from meshwright.planner.cost.recorded import with_fields
from meshwright.planner.cost.states import largest_coded
from meshwright.planner.cost.work import Exchange, Exchanges, KeptBytes, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import PIECE, Scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import Box, boxes_of, rounded_matrices, shared_scales
from meshwright.spec.weights.inventory import Parameter


@dataclass(frozen=True, slots=True)
class ThinWork:
    """Work of the adapters on one operation's matrices."""

    forward: tuple[Work, ...] = ()
    inputs: tuple[Work, ...] = ()
    weights: tuple[Work, ...] = ()


NONE = ThinWork()


def adapted(local: LocalShape, name: str) -> float:
    """Return the share of an operation's outputs (`qkv`, `mlp up`, `o`) that has an adapter. 0 without adapters."""
    lora = local.shape.lora
    if lora is None:
        return 0.0
    last = name.rpartition(" ")[2]
    matrices = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - local.gates :]}.get(last, (last,))
    return sum(lora.adapts(matrix) for matrix in matrices) / len(matrices)


def thin_products(local: LocalShape, name: str, tokens: float, into: float, out: float, batch: float = 1.0) -> ThinWork:
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


def restored_weights(local: LocalShape, name: str, into: float, out: float, batch: float = 1.0) -> tuple[Work, ...]:
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


def restored_bytes(local: LocalShape, group: str) -> float:
    """Return the bytes of the largest frozen matrix of a part (attention, mlp, expert) while it is dequantized.

    They are the matrix itself, and indices and numbers of some rows. 0 = nothing is quantized.
    """
    if local.shape.lora is None or local.shape.lora.scheme is None:
        return 0.0
    elements = largest_coded(local.shape, local.tp, local.ep, group)
    return elements * local.width + 6.0 * min(elements, PIECE)


def with_adapters(
    local: LocalShape, widths: HeadWidths, routed: Routed | None, plain: Sequence[KeptBytes]
) -> tuple[KeptBytes, ...]:  # fmt: skip
    """Return what a layer with adapters keeps, from what it keeps when all weights are trained."""
    lora = local.shape.lora
    if lora is None:
        return tuple(plain)
    # A frozen matrix needs its input for nothing: only those that an adapter reads stay.
    latent = ("q_down", "q", "kv_down") if local.shape.mla else ("q", "k", "v")
    reads = {"attention norm output": latent, "mlp norm output": ("gate", "up"), "dispatched": ("gate", "up")}
    unread = [name for name, readers in reads.items() if lora.dropout or not any(map(lora.adapts, readers))]
    unread += ["router input in fp32"]
    # The MLP's activation is the input of "down": without an adapter there, or with dropout, no one reads it.
    down = lora.adapts("down") and not lora.dropout
    if not down and local.gates == 1:
        unread += ["mlp activation", "experts activation", "shared activation"]
    if not down and routed:
        unread += ["experts activation"]
    if lora.dropout:
        unread += ["normed low ranks"]
    return (*(tensor for tensor in plain if tensor.name not in unread), *_adapter_tensors(local, widths, routed))


def _adapter_tensors(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> Iterator[KeptBytes]:
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
    # The fused kernel recomputes silu(gate) * up for the matrix, but A's gradient needs it, too.
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


def _dense_outputs(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> Iterator[tuple[str, float]]:
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


def _inputs(local: LocalShape, widths: HeadWidths, routed: Routed | None, name: str) -> float:
    """Return the inputs on a rank of a matrix of `_dense_outputs`."""
    low = {"q_up": local.shape.mla.q_rank, "kv_up": local.shape.mla.kv_rank} if local.shape.mla else {}
    inner = dict(_dense_outputs(local, widths, routed)).get("up", 0.0)
    return low.get(name) or {"o": widths.out, "down": inner}.get(name, local.shape.hidden)


READS = ({"q", "k", "v", "q_down", "kv_down"}, {"gate", "up"})
"""Groups of matrices that share an input."""


def queued(local: LocalShape, widths: HeadWidths, routed: Routed | None) -> float:
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


def cast(local: LocalShape, elements: float) -> tuple[Work, ...]:
    """Return the pass that narrows an operand and transposes it, since both later products read it along other rows."""
    width = local.product_width
    return (MemoryPass((local.width + 2 * width) * elements),) if width < local.width else ()


def rounded(local: LocalShape, *elements: float) -> tuple[Work, ...]:
    """Return the passes that round operands of these `elements` to 8 bits (kernels.fp8.narrow).

    Triton and compiled code take two passes: one reads the maxima, one reads and writes. Otherwise magnitudes, maxima,
    the scaled copy and the cast are separate passes.
    """
    if not local.fp8:
        return ()
    two_passes = local.compiled or local.stack.rounds_in_place
    moved, launches = (2 * local.width + 1, 2.0) if two_passes else (6 * local.width + 1, 4.0)
    return tuple(MemoryPass(moved * each, launches) for each in elements)


def accumulated(local: LocalShape, elements: float) -> tuple[Work, ...]:
    """Return the pass that adds new gradients to those of earlier micro-batches."""
    return (MemoryPass(elements * (local.width + 2 * local.stack.gradient_bytes)),) if local.stack.accumulates else ()


def linear(local: LocalShape, name: str, tokens: float, into: float, out: float, bias: bool = False) -> LayerOperation:
    """Return (tokens, into) x (into, out) as an operation with its gradients, rounding, adapters and accumulation."""
    width, low = local.product_width, 1.0 if local.fp8 else local.product_width
    least = 1.0 if local.fp8_all else width
    # A bias is a kernel of its own only in eager code; its gradient is a sum over rows everywhere.
    moved = tokens * out * local.width
    apart = (MemoryPass(2 * moved),) if bias and local.stack.passes > 1 else ()
    summed = (MemoryPass(moved),) if bias else ()
    adapts = local.shape.lora is not None
    thin = thin_products(local, name, tokens, into, out) if adapts else NONE
    restored = restored_weights(local, name, into, out) if adapts else ()
    # With fp8-all a separate, uncompiled operator rounds in the backward pass (kernels.linear).
    back = with_fields(local, compiled=False) if local.fp8_all else local
    turned = rounded(back, tokens * into, tokens * out) if local.fp8_all else ()
    learned = (*turned, Product(into, tokens, out, 1.0, least), *summed, *accumulated(local, into * out))
    return LayerOperation(
        name=name,
        forward=(*cast(local, tokens * into), *rounded(local, tokens * into, into * out), *restored,
                 Product(tokens, into, out, 1.0, low), *apart, *thin.forward),
        inputs=(*cast(local, tokens * out), *rounded(back, tokens * out, into * out), *restored,
                Product(tokens, out, into, 1.0, low), *thin.inputs),
        weights=thin.weights if local.shape.lora else learned,
    )  # fmt: skip


TILE, STEP = 128, 64
"""Rows of a tile of the grouped kernel, and of its steps over an inner dim.

Experts have any number of rows, so on average each wastes half a tile and half a step.
"""


def grouped(local: LocalShape, name: str, copies: float, into: float, out: float) -> LayerOperation:
    """Return the grouped products of all experts, one per piece.

    Weight gradients of the pieces are joined. Rounding of operands is not compiled (kernels.experts). Other software
    multiplies at the width of its recipe. Fused experts round the tensors between their products inside them.
    """
    assert local.shape.moe is not None
    experts, pieces = local.shape.moe.experts / local.ep, local.ep_pieces
    rows_each = copies / experts
    grouped = local.stack.is_meshwright and local.gpu
    # Tiles of grouped kernels do not span experts: on average the last of each is half empty.
    rows, inner = (rows_each + TILE / 2, rows_each + STEP / 2) if grouped else (rows_each, rows_each)
    put = (MemoryPass(2 * experts * into * out * local.width, pieces),) if pieces > 1 else ()
    thin = thin_products(local, name, rows_each, into, out, experts / pieces)
    restored = restored_weights(local, name, into, out, experts)
    matrices = experts * into * out
    width = 1.0 if local.fp8_all else float(local.product_width)
    # Fused experts cast nothing between their products: only the first input and the last gradient.
    enters, returns = (
        () if local.stack.fused_experts and name.endswith(inside) else cast(local, copies * size)
        for inside, size in (("down", into), ("up", out))
    )
    forward, inputs, turned = (
        rounded(with_fields(local, compiled=False), *elements) if local.fp8_all else ()
        for elements in ((copies * into, matrices), (copies * out, matrices), (copies * into, copies * out))
    )
    learned = turned + (Product(into, inner, out, experts / pieces, width, grouped=grouped),) * pieces + put
    product = Product(rows, into, out, experts / pieces, width, grouped=grouped)
    product_of_gradient = product._replace(k=out, n=into)
    return LayerOperation(
        name=name,
        forward=(*enters, *forward, *restored, *(product,) * pieces, *thin.forward * pieces),
        inputs=(*returns, *inputs, *restored, *(product_of_gradient,) * pieces, *thin.inputs * pieces),
        weights=thin.weights * pieces if local.shape.lora else learned,
    )


AGAIN = ("full", "all-but-attention")
"""Policies that round copies again."""
FOUND_BYTES = 4
"""Bytes of a number from which scales are computed."""
ROWS = "rows"
PASSES = {
    "int8": (66.0, 70.0, 21), "int4-rtn": (80.1, 84.1, 52), "int4-sym": (76.6, 80.6, 29), "nf4": (56.6, 60.6, 22),
    "nf4-double": (57.9, 61.9, 41), "int4-hqq": (3456.0, 3460.0, 436), "int3": (3545.0, 3549.0, 445),
    ROWS: (48.0, 60.0, 12),
}  # fmt: skip
"""Bytes read and written per element, in fp32 and in 16 bits, and kernels per PIECE of elements.

Counted on meshwright.model.fake_quantized by tests/planner/test_rounded_weights.py. HQQ searches its zeros 20 times. On
a GPU one Triton kernel restores 4-bit codes: about a tenth less than is counted here.
"""


@cache
def _by_name(shape: ModelShape) -> dict[str, Parameter]:
    """Return one matrix of each kind: attention.q, mlp.up, mlp.experts.up."""
    matrices = rounded_matrices(shape)
    return {matrix.name.removeprefix(f"layers.{matrix.layer}.").removesuffix(".weight"): matrix for matrix in matrices}


@cache
def _boxes(shape: ModelShape, tp: int, ep: int) -> dict[str, Box]:
    """Return the first rank's part of each kind of matrix."""
    layout = Layout(tp=tp, sp=ep > 1 and tp > 1, dp_shard=ep, ep=ep)
    return boxes_of(_by_name(shape).values(), shape, layout, 0)


@cache
def _elements(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Return the elements of a layer's matrices on a rank."""
    apart, boxes = ("mlp.experts.", "mlp.shared."), _boxes(shape, tp, ep)
    return sum(
        boxes[matrix.name].numel
        for name, matrix in _by_name(shape).items()
        if name.startswith("attention.") or name.startswith(apart) == routed
    )


def rounding(local: LocalShape, operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """Return a layer's operations, each product preceded by the rounding of its matrices and rows."""
    if local.rounded is None:
        return tuple(operations)
    return tuple(part for op in operations for part in (*_rounding(local, local.rounded, op.name), op))


def _rounding(local: LocalShape, scheme: Scheme, name: str) -> Iterator[LayerOperation]:
    """Yield the rounding before the named product. Nothing if none of its matrices is rounded."""
    part, _, last = name.rpartition(" ")
    # One operation may multiply by several matrices, each rounded with scales of its own.
    names = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - local.gates :]}.get(last, (last,))
    where = {"": "attention.", "mlp": "mlp.", "experts": "mlp.experts.", "shared": "mlp.shared."}.get(part)
    by_name = _by_name(local.shape)
    matrices = [by_name[f"{where}{name}"] for name in names if f"{where}{name}" in by_name]
    if not matrices:
        return
    tokens = local.tokens * (local.shape.moe.top_k if part == "experts" and local.shape.moe else 1)
    boxes = _boxes(local.shape, local.tp, local.ep)
    passes = [_pass_over(scheme.name, boxes[matrix.name].numel, local.width) for matrix in matrices]
    # Where tensor parallelism cuts a row or block of scales, ranks agree on its largest number.
    shared = (
        [shared_scales(matrix, local.shape, scheme, local.tp, local.ep) for matrix in matrices] if local.tp > 1 else []
    )
    numbers = [float(scales.numbers) for scales in shared if scales.numbers]
    if scheme.activations == "int8":
        passes.append(_pass_over(ROWS, tokens * boxes[matrices[0].name].sizes[-1], local.width))
        numbers += [tokens] if any(scales.rows for scales in shared) else []
    sums = tuple(Exchange("tp", "all-reduce", number * FOUND_BYTES) for number in numbers)
    yield LayerOperation(name=f"rounding of {name}", forward=tuple(passes), exchanges=Exchanges(sums, ()), again=True)


def _pass_over(what: str, elements: float, width: float) -> MemoryPass:
    fp32, narrow, launches = PASSES[what]
    return MemoryPass(elements * (narrow if width < 4 else fp32), launches * max(1, round(elements / PIECE)))


def with_rounded_activations(
    local: LocalShape, widths: HeadWidths, routed: bool, plain: Sequence[KeptBytes]
) -> tuple[KeptBytes, ...]:
    """Return what a layer keeps if activations are rounded, from what it keeps otherwise.

    Rounded copies are not outputs of a norm, and no kernel recomputes the product of a gated MLP.
    """
    if local.rounded is None or local.rounded.activations == "same":
        return tuple(plain)
    shape, moe = local.shape, local.shape.moe
    inner = moe.shared_experts * moe.ffn if routed and moe else 0 if routed else shape.ffn
    gated = local.tokens * inner / local.tp * local.width * (local.gates == 2)
    more = (("rounded attention output", local.tokens * widths.out * local.width), ("rounded product", gated))
    return (
        *(tensor._replace(part="") if tensor.part == "norm" else tensor for tensor in plain),
        *(KeptBytes(*tensor, 0.0) for tensor in more),
    )


def with_rounded_weights(
    cost: MicroBatchCost, local: LocalShape, policies: Sequence[tuple[str, int, int]]
) -> MicroBatchCost:
    """Add rounded copies to a stage. `policies`: (recompute policy, its dense layers, its routed layers)."""
    if local.rounded is None:
        return cost
    plain, routed = (_elements(local.shape, local.tp, local.ep, kind) * local.width for kind in (False, True))
    # Copies live as long as activations do: until the backward pass, or within one repeated block.
    standing = sum(dense * plain + experts * routed for policy, dense, experts in policies if policy not in AGAIN)
    again = [(dense, experts) for policy, dense, experts in policies if policy in AGAIN]
    made = max((max(plain * (dense > 0), routed * (experts > 0)) for dense, experts in again), default=0)
    return cost._replace(
        kept_bytes=cost.kept_bytes + standing,
        mlp_bytes=cost.mlp_bytes + made,
        attention_bytes=cost.attention_bytes + made,
    )
