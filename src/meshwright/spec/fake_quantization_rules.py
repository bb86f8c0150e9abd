"""Which plans may round weights in every product (recipe.fake_quantize): each refusal with the nearest legal change."""

from collections.abc import Iterator

from meshwright.spec.errors import printable
from meshwright.spec.layout import Layout
from meshwright.spec.quantization_schemes import SCHEMES
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.shape import ModelShape
from meshwright.spec.shared_scales import rounded_matrices, shared_scales


def learnable() -> tuple[str, ...]:
    """Schemes whose rounding a model can be trained against: without text, whole numbers or nf4, of weights alone or of
    activations too; columns that stay in 16 bit would be chosen anew as weights move."""
    whole = (name for name, one in SCHEMES.items() if not one.calibrated and one.outliers == "none")
    return tuple(name for name in whole if SCHEMES[name].codes != "e4m3")


def fake_quantization_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Of a plan; nothing where no weight is rounded. A matrix is rounded as it will be when it is written, whichever
    ranks hold its parts, and in each product anew."""
    if recipe.fake_quantize == NO_SCHEME:
        return
    said, off = f"recipe.fake_quantize={printable(recipe.fake_quantize)}", f"recipe.fake_quantize={NO_SCHEME}"
    if recipe.fake_quantize not in learnable():
        yield f"{said} is no scheme that weights are trained for: take one of {', '.join(learnable())}, or {off}"
        return
    yield from _cut_groups(shape, recipe.fake_quantize, layout, said)
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


def _cut_groups(shape: ModelShape, name: str, layout: Layout, said: str) -> Iterator[str]:
    """Real zeros are found by turns over all numbers of a group: a rank needs them all."""
    scheme = SCHEMES[name]
    if scheme.zeros != "real" or layout.tp == 1:
        return
    for one in rounded_matrices(shape):
        if shared_scales(one, shape, scheme, layout.tp, layout.ep).within_groups:
            inputs = one.shape[-1]
            yield (
                f"{said} finds zeros of {scheme.group} inputs together, and layout.tp={layout.tp} cuts the {inputs} "
                f"inputs of {one.name} within these: take recipe.fake_quantize=int4-rtn, or layout.tp=1"
            )
            return
