"""Which plans may round weights in every product (recipe.fake_quantize): each refusal with the nearest legal change."""

from collections.abc import Iterator

from meshwright.spec.errors import printable
from meshwright.spec.layout import Layout
from meshwright.spec.quantization_schemes import SCHEMES
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.schedule_kinds import SPLIT
from meshwright.spec.shape import ModelShape


def learnable() -> tuple[str, ...]:
    """Schemes whose rounding a model can be trained against: without text, whole numbers or nf4, of weights alone or of
    activations too; columns that stay in 16 bit would be chosen anew as weights move."""
    whole = (name for name, one in SCHEMES.items() if not one.calibrated and one.outliers == "none")
    return tuple(name for name in whole if SCHEMES[name].codes != "e4m3")


def fake_quantization_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Of a plan; nothing where no weight is rounded. A matrix is rounded as a whole, as it will be when it is written,
    and in each product anew."""
    if recipe.fake_quantize == NO_SCHEME:
        return
    said, off = f"recipe.fake_quantize={printable(recipe.fake_quantize)}", f"recipe.fake_quantize={NO_SCHEME}"
    if recipe.fake_quantize not in learnable():
        yield f"{said} is no scheme that weights are trained for: take one of {', '.join(learnable())}, or {off}"
        return
    for axis, ranks in {"tp": layout.tp, "ep": layout.ep}.items():
        if ranks > 1:
            yield f"{said} rounds whole matrices, and layout.{axis}={ranks} cuts them: take layout.{axis}=1, or {off}"
    if shape.moe is not None:
        yield f"{said} is for matrices of one layer each, and experts are stacks: take a model without, or {off}"
    if shape.lora is not None:
        beside = SCHEMES[recipe.fake_quantize].trains_beside
        held = f"model.lora.base={recipe.fake_quantize}, which holds them as codes beside the adapters, or "
        yield f"{said} trains the matrices that are rounded, and model.lora freezes them: take {held * beside}{off}"
    if recipe.products != "same":
        yield f"{said} and recipe.products={recipe.products} both round weights: take recipe.products=same, or {off}"
    if layout.compile == "on":
        yield f"{said} rounds matrices in each product, which is not compiled: take layout.compile=off, or {off}"
    if layout.cuda_graphs == "on":
        yield f"{said} makes new weights in each pass: take layout.cuda_graphs=off, or {off}"
    if layout.pp > 1 and layout.schedule in SPLIT:
        yield (
            f"{said} has gradients of weights pass through their rounding, and layout.schedule={layout.schedule} makes "
            f"those later: take layout.schedule=1f1b, or {off}"
        )
