"""The products of a rank's experts with their rows, and the passes over memory around them."""

from dataclasses import replace

from meshwright.planner.cost import adapters, operands
from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.work import LayerOperation, MemoryPass
from meshwright.planner.kernels.kernel_operations import Product

TILE, STEP = 128, 64
"""Rows of a tile of the grouped kernel, and of its steps over an inner dim: experts have any number of rows, so that
each computes half of one in vain on average."""


def grouped(of: Local, name: str, copies: float, into: float, out: float) -> LayerOperation:
    """Those of each piece in one. What they make of the gradients of a stack is put together. What rounds operands
    is no compiled code (kernels.experts). Other software multiplies at the width of its recipe; fused experts round
    what lies between their products inside them."""
    assert of.shape.moe is not None
    experts, pieces = of.shape.moe.experts / of.ep, of.ep_pieces
    each = copies / experts
    grouped = of.stack.own and of.gpu
    rows, inner = (each + TILE / 2, each + STEP / 2) if grouped else (each, each)
    put = (MemoryPass(2 * experts * into * out * of.width, pieces),) if pieces > 1 else ()
    thin = adapters.thin(of, name, each, into, out, experts / pieces)
    restored = adapters.restored(of, name, into, out, experts)
    matrices, width = experts * into * out, 1.0 if of.fp8_all else 2.0 if of.stack.own else min(2.0, of.product_width)
    enters, returns = (
        () if of.stack.fused_experts and name.endswith(inside) else operands.cast(of, copies * size)
        for inside, size in (("down", into), ("up", out))
    )
    forward, inputs, turned = (
        operands.rounded(replace(of, compiled=False), *elements) if of.fp8_all else ()
        for elements in ((copies * into, matrices), (copies * out, matrices), (copies * into, copies * out))
    )
    learned = turned + (Product(into, inner, out, experts / pieces, width, grouped=grouped),) * pieces + put
    return LayerOperation(
        name=name,
        forward=enters
        + forward
        + restored
        + (Product(rows, into, out, experts / pieces, width, grouped=grouped),) * pieces
        + thin.forward * pieces,
        inputs=returns
        + inputs
        + restored
        + (Product(rows, out, into, experts / pieces, width, grouped=grouped),) * pieces
        + thin.inputs * pieces,
        weights=thin.weights * pieces if of.shape.lora else learned,
    )
