"""Where frozen matrices can be codes and scales (model.lora.base): restored for each product, cut as numbers are by
tensor and expert parallelism, and shared by ZeRO-3 (spec/code_cuts.py)."""

from collections.abc import Iterator

from meshwright.spec.layout import Layout
from meshwright.spec.lora import SAME
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape


def holds_codes(shape: ModelShape) -> bool:
    """Whether frozen matrices are codes and scales."""
    return shape.lora is not None and shape.lora.base != SAME


def shares_codes(layout: Layout) -> bool:
    """Whether data-parallel ranks share codes: where ZeRO gathers weights for each pass and frees them behind it. Where
    weights stay whole within a step (ZeRO 1 and 2, a pipeline), a share would stand beside the whole."""
    return layout.zero == 3 and layout.pp == 1


def frozen_code_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Why codes cannot be laid out so; nothing where there are none."""
    if shape.lora is None or not holds_codes(shape):
        return
    base = f"model.lora.base={shape.lora.base}"
    if layout.tp > 1 and shape.lora.scheme is not None and shape.lora.scheme.activations != "same":
        yield (
            f"{base} rounds each row of activations as a whole, and layout.tp={layout.tp} cuts rows: take layout.tp=1, "
            "or model.lora.base=nf4-double"
        )
    if layout.compile == "on":
        yield f"{base} restores matrices in parts, which layout.compile=on does not compile: take layout.compile=off"
    if layout.cuda_graphs == "on":
        yield f"{base} restores matrices in each pass, and layout.cuda_graphs=on would keep room for all: leave it out"
    if recipe.products != "same":
        yield (
            f"recipe.products={recipe.products} rounds matrices to 8 bits, and {base} has fewer already: take "
            "recipe.products=same"
        )
