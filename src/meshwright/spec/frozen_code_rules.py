"""Where frozen matrices can be codes and scales (model.lora.base): whole on each rank that has their layer, restored
for each product. No stage of ZeRO shards them."""

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
    cut = {"tp": layout.tp, "ep": layout.ep}
    for axis, ranks in cut.items():
        if ranks > 1:
            yield (
                f"{base} holds every matrix whole on its rank, and layout.{axis}={ranks} would cut it: take "
                f"layout.{axis}=1, or model.lora.base={SAME}"
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
