"""Rules for frozen matrices held as codes and scales (model.lora.base).

They are restored for each product, cut like numbers by tensor and expert parallelism, and sharded by ZeRO-3
(spec/weights/code_cuts.py).
"""

from collections.abc import Iterator

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.lora import SAME
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe


def holds_codes(shape: ModelShape) -> bool:
    """Return whether frozen matrices are codes and scales."""
    return shape.lora is not None and shape.lora.base != SAME


def shares_codes(layout: Layout) -> bool:
    """Return whether data-parallel ranks shard the codes.

    Only ZeRO-3 without a pipeline does, which gathers weights for each pass and frees them afterwards. If weights stay
    whole within a step (ZeRO 1 and 2, a pipeline), a shard would only be stored in addition.
    """
    return layout.zero == 3 and layout.pp == 1


def frozen_code_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why this layout or recipe cannot hold frozen matrices as codes."""
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
