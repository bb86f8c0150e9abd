"""Weights that are rounded in every product (recipe.fake_quantize), on ranks that hold parts of them."""

from functools import partial

from meshwright.kernels.quantized.parts import MatrixPart
from meshwright.model.fake_quantized import FakeQuantized, put_fake_quantization
from meshwright.parallel.engine import Engine
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.recipe.recipe import NO_SCHEME
from meshwright.spec.weights.inventory import Parameter, parameters
from meshwright.spec.weights.quantized_parts import CodesCut, SharedScales, shared_scales


def round_weights(engine: Engine, scheme: str) -> None:
    """Have an engine round every matrix that `meshwright quantize` rounds, as recipe.fake_quantize asks.

    Each part is rounded to the numbers that the whole matrix would be rounded to.
    """
    if scheme == NO_SCHEME:
        return
    shape, layout = engine.model.shape, engine.mesh.layout
    scales = {
        parameter: shared_scales(parameter, shape, SCHEMES[scheme], layout.tp, layout.ep)
        for parameter in parameters(shape)
        if parameter.matrices is not None
    }
    cut = {each.name: _rounding(engine, each, shared, scheme) for each, shared in scales.items() if any(shared)}
    put_fake_quantization(engine.stages, shape, scheme, cut)


def _rounding(engine: Engine, parameter: Parameter, shared: SharedScales, scheme: str) -> FakeQuantized:
    largest = partial(engine.mesh["tp"].all_reduce, op="max")
    codes = CodesCut(scheme=SCHEMES[scheme], box=engine.boxes[parameter.name])
    part = MatrixPart(codes, largest) if shared.numbers else None
    return FakeQuantized(SCHEMES[scheme], part, largest if shared.rows else None)
