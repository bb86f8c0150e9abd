"""Where frozen matrices can be codes and scales (model.lora.base): restored for each product, cut as numbers are by
tensor and expert parallelism (spec/code_cuts.py). No stage of ZeRO shards them."""

from collections.abc import Iterator

from meshwright.spec.layout import Layout
from meshwright.spec.lora import SAME
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape


def holds_codes(shape: ModelShape) -> bool:
    """Whether frozen matrices are codes and scales."""
    return shape.lora is not None and shape.lora.base != SAME


def frozen_code_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Why codes cannot be laid out so; nothing where there are none."""
    if shape.lora is None or not holds_codes(shape):
        return
    base = f"model.lora.base={shape.lora.base}"
    if layout.compile == "on":
        yield f"{base} restores matrices in parts, which layout.compile=on does not compile: take layout.compile=off"
    if layout.cuda_graphs == "on":
        yield f"{base} restores matrices in each pass, and layout.cuda_graphs=on would keep room for all: leave it out"
    if recipe.products != "same":
        yield (
            f"recipe.products={recipe.products} rounds matrices to 8 bits, and {base} has fewer already: take "
            "recipe.products=same"
        )
