"""Which blocks are compiled, and which of those keep what norms make."""

from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.layout import Layout
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.shape import ModelShape


def can_be_compiled(shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether blocks of a shape can be: matrices that are restored from codes or rounded in each product are not."""
    return not holds_codes(shape) and fake_quantize == NO_SCHEME


def leaves_compiler_out(recipe: Recipe) -> bool:
    """Whether a GPU repeats the bits of a recipe fastest without compiled blocks: the compiler tries no kernels then,
    and loses what it gains. Products in fp8 are the exception: uncompiled, each rounds operands in several passes."""
    return recipe.deterministic and recipe.products == "same"


def compiles_blocks(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether a layout compiles blocks of a shape on a kind of device (cpu, cuda), where that has the tools."""
    return layout.compiles(device) and can_be_compiled(shape, fake_quantize)


def experts_stay_apart(layout: Layout) -> bool:
    """Whether compiled blocks leave their experts alone: where rows travel to other ranks, as many as the step brings,
    and where the products are the plain ones, which want lengths."""
    return layout.ep > 1 or layout.kernels == "reference"


def keeps_no_norms(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether blocks that recompute nothing yet keep no result of a norm. Of routed blocks whose experts stay apart the
    compiler sees only the parts around these, whose borders are kept."""
    apart = shape.moe is not None and experts_stay_apart(layout)
    return compiles_blocks(layout, shape, device, fake_quantize) and not apart


def is_lowered(layout: Layout, shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Whether a plan and a dry run of a GPU count compiled blocks as the compiler lowers them. Where ranks share a
    block or a step, and in passes that are captured, they are counted as uncompiled ones that make norms again."""
    alone = layout.tp == layout.cp == layout.ep == layout.pp == 1 and layout.cuda_graphs != "on"
    return alone and keeps_no_norms(layout, shape, "cuda", fake_quantize)
