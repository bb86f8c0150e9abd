"""Passes over memory around a matrix product: operands made narrower, gradients added to those before."""

from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.work import MemoryPass, Work


def cast(of: Local, elements: float) -> tuple[Work, ...]:
    """An operand narrowed to the width of products, and turned, since both later products read it along other rows."""
    width = of.product_width
    return (MemoryPass((of.width + 2 * width) * elements),) if width < of.width else ()


def rounded(of: Local, *elements: float) -> tuple[Work, ...]:
    """Operands of so many `elements` rounded to 8 bits (kernels.fp8.narrow). By Triton or compiled code in two passes:
    the first reads for the largest numbers, the second reads and writes. Else sizes, the largest, the scaled copy and
    the cast are passes of their own."""
    if not of.fp8:
        return ()
    moved, launches = (2 * of.width + 1, 2.0) if of.compiled or of.stack.rounds_in_place else (6 * of.width + 1, 4.0)
    return tuple(MemoryPass(moved * each, launches) for each in elements)


def accumulated(of: Local, elements: float) -> tuple[Work, ...]:
    """Adding new gradients to those of the micro-batches before."""
    return (MemoryPass(elements * (of.width + 2 * of.stack.gradient_bytes)),) if of.stack.accumulates else ()
