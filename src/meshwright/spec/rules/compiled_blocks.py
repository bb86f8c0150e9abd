"""Rules for compiled blocks: which shapes and layouts have them, and which of them store the results of norms."""

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import NO_SCHEME, Recipe
from meshwright.spec.rules.frozen_codes import holds_codes


def can_be_compiled(shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether blocks can be compiled: without codes to restore or weights to round in each product."""
    return not holds_codes(shape) and fake_quantize == NO_SCHEME


def leaves_compiler_out(recipe: Recipe) -> bool:
    """Return whether a deterministic recipe runs fastest on a GPU without compiled blocks.

    The compiler then tries no alternative kernels and loses its gain. fp8 products are the exception: uncompiled, each
    rounds its operands in several passes.
    """
    return recipe.deterministic and recipe.products == "same"


def compiles_blocks(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether a layout compiles blocks of this shape on a kind of device (cpu, cuda) that has the tools."""
    return layout.compiles(device) and can_be_compiled(shape, fake_quantize)


def experts_stay_apart(layout: Layout) -> bool:
    """Return whether compiled blocks exclude their experts.

    This holds when rows travel to other ranks in numbers that vary by step, and for the reference kernels, which need
    lengths on the host.
    """
    return layout.ep > 1 or layout.kernels == "reference"


def keeps_no_norms(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether blocks without recomputation still store no result of a norm.

    With experts apart, the compiler sees only the parts around them, and the results at their borders are stored.
    """
    apart = shape.moe is not None and experts_stay_apart(layout)
    return compiles_blocks(layout, shape, device, fake_quantize) and not apart


def is_lowered(layout: Layout, shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether plan and dry run count the compiled blocks of a GPU as the compiler lowers them.

    Blocks of several ranks and captured passes are counted as uncompiled blocks that recompute norms.
    """
    alone = layout.tp == layout.cp == layout.ep == layout.pp == 1 and layout.cuda_graphs != "on"
    return alone and keeps_no_norms(layout, shape, "cuda", fake_quantize)
