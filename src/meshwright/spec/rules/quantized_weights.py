"""Rules for frozen matrices held as codes (model.lora.base) and for weights rounded in products (recipe.fake_quantize).

Codes are restored for each product, cut like numbers by tensor and expert parallelism, and sharded by ZeRO-3
(spec/weights/boxes.py). Each refusal names the nearest legal change.
"""

from collections.abc import Iterator

from meshwright.spec.errors import printable
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import SAME_BASE, ModelShape
from meshwright.spec.recipe.recipe import NO_SCHEME, Recipe
from meshwright.spec.weights.boxes import rounded_matrices, shared_scales


def holds_codes(shape: ModelShape) -> bool:
    """Return whether frozen matrices are codes and scales."""
    return shape.lora is not None and shape.lora.base != SAME_BASE


def shares_codes(layout: Layout) -> bool:
    """Return whether data-parallel ranks shard the codes.

    Only ZeRO-3 without a pipeline does, which gathers weights for each pass and frees them afterwards. If weights stay
    whole within a step (ZeRO 1 and 2, a pipeline), a shard would only be stored in addition.
    """
    return layout.gathers_each_pass


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


def learnable() -> tuple[str, ...]:
    """Return the schemes that a model can be trained for: whole numbers or nf4, without calibration text.

    Schemes with outlier columns in 16 bits are excluded, because the columns would change as weights move.
    """
    return tuple(
        name
        for name, scheme in SCHEMES.items()
        if not scheme.calibrated and scheme.outliers == "none" and scheme.codes != "e4m3"
    )


def fake_quantization_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why a plan cannot round weights in its products.

    A matrix is rounded anew in each product, exactly as it will be when written, whichever ranks hold its parts.
    """
    if recipe.fake_quantize == NO_SCHEME:
        return
    setting, off = f"recipe.fake_quantize={printable(recipe.fake_quantize)}", f"recipe.fake_quantize={NO_SCHEME}"
    if recipe.fake_quantize not in learnable():
        yield f"{setting} is no scheme that weights are trained for: take one of {', '.join(learnable())}, or {off}"
        return
    yield from _cut_groups(shape, recipe.fake_quantize, layout, setting)
    if shape.lora is not None:
        # Offer codes beside the adapters, if the scheme can hold them.
        beside = SCHEMES[recipe.fake_quantize].trains_beside
        held = f"model.lora.base={recipe.fake_quantize}, which holds them as codes beside the adapters, or "
        yield f"{setting} trains the matrices that are rounded, and model.lora freezes them: take {held * beside}{off}"
    if recipe.products != "same":
        yield f"{setting} and recipe.products={recipe.products} both round weights: take recipe.products=same, or {off}"
    if layout.compile == "on":
        yield f"{setting} rounds matrices in each product, which is not compiled: take layout.compile=off, or {off}"
    if layout.cuda_graphs == "on":
        yield f"{setting} makes new weights in each pass: take layout.cuda_graphs=off, or {off}"


def _cut_groups(shape: ModelShape, name: str, layout: Layout, setting: str) -> Iterator[str]:
    """Yield a refusal when real zeros need all numbers of a group and a rank has only a part of it."""
    scheme = SCHEMES[name]
    if scheme.zeros != "real" or layout.tp == 1:
        return
    for matrix in rounded_matrices(shape):
        if shared_scales(matrix, shape, scheme, layout.tp, layout.ep).within_groups:
            inputs = matrix.shape[-1]
            yield (
                f"{setting} finds zeros of {scheme.group} inputs together, and layout.tp={layout.tp} cuts the {inputs} "
                f"inputs of {matrix.name} within these: take recipe.fake_quantize=int4-rtn, or layout.tp=1"
            )
            return
