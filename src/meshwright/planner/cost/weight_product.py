"""A product of activations with a matrix of weights, and the products of its gradients."""

from dataclasses import replace

from meshwright.planner.cost import adapters, operands
from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.work import LayerOperation, MemoryPass
from meshwright.planner.kernels.kernel_operations import Product


def linear(of: Local, name: str, tokens: float, into: float, out: float, bias: bool = False) -> LayerOperation:
    """(tokens, into) x (into, out) and its two gradients, with what rounds, adapts or adds up beside."""
    width, low = of.product_width, 1.0 if of.fp8 else of.product_width
    least = 1.0 if of.fp8_all else width
    moved = tokens * out * of.width
    apart = (MemoryPass(2 * moved),) if bias and of.stack.passes > 1 else ()
    summed = (MemoryPass(moved),) if bias else ()
    adapts = of.shape.lora is not None
    thin = adapters.thin(of, name, tokens, into, out) if adapts else adapters.NONE
    restored = adapters.restored(of, name, into, out) if adapts else ()
    back = replace(of, compiled=False) if of.fp8_all else of  # by an operator of its own (kernels.linear)
    turned = operands.rounded(back, tokens * into, tokens * out) if of.fp8_all else ()
    learned = (*turned, Product(into, tokens, out, 1.0, least), *summed, *operands.accumulated(of, into * out))
    return LayerOperation(
        name=name,
        forward=(*operands.cast(of, tokens * into), *operands.rounded(of, tokens * into, into * out), *restored,
                 Product(tokens, into, out, 1.0, low), *apart, *thin.forward),
        inputs=(*operands.cast(of, tokens * out), *operands.rounded(back, tokens * out, into * out), *restored,
                Product(tokens, out, into, 1.0, low), *thin.inputs),
        weights=thin.weights if of.shape.lora else learned,
    )  # fmt: skip
