"""Which blocks are compiled, and which of those keep what norms make."""

from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.layout import Layout
from meshwright.spec.recipe import NO_SCHEME
from meshwright.spec.shape import ModelShape


def compiles_blocks(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether a layout compiles blocks of a shape on a kind of device (cpu, cuda), where that has the tools. Matrices
    that are restored from codes or rounded in each product are not compiled."""
    return layout.compiles(device) and not holds_codes(shape) and fake_quantize == NO_SCHEME


def keeps_no_norms(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether blocks that recompute nothing yet keep no result of a norm. Of routed blocks whose rows travel the
    compiler sees only the parts around the experts, whose borders are kept. Of MLPs without a gate, and of experts that
    it sees, compiled code makes the activation again as well, which nobody counts: they keep less than is said."""
    return compiles_blocks(layout, shape, device, fake_quantize) and not (shape.moe is not None and layout.ep > 1)
