"""Weights that are rounded in every product (recipe.fake_quantize), on ranks that hold parts of them."""

from functools import partial

from meshwright.kernels.matrix_parts import MatrixPart
from meshwright.model.fake_quantized import FakeQuantized, put_fake_quantization
from meshwright.parallel.engine import Engine
from meshwright.spec.code_cuts import CodesCut
from meshwright.spec.inventory import Parameter, parameters
from meshwright.spec.quantization_schemes import SCHEMES
from meshwright.spec.recipe import NO_SCHEME
from meshwright.spec.shared_scales import SharedScales, shared_scales


def round_weights(engine: Engine, scheme: str) -> None:
    """Have an engine round every matrix that `meshwright quantize` rounds, to the numbers that the whole matrix would
    be rounded to; recipe.fake_quantize as it is."""
    if scheme == NO_SCHEME:
        return
    shape, layout = engine.model.shape, engine.mesh.layout
    found = {
        one: shared_scales(one, shape, SCHEMES[scheme], layout.tp, layout.ep)
        for one in parameters(shape)
        if one.matrices is not None
    }
    cut = {one.name: _rounding(engine, one, shared, scheme) for one, shared in found.items() if any(shared)}
    put_fake_quantization(engine.stages, shape, scheme, cut)


def _rounding(engine: Engine, parameter: Parameter, shared: SharedScales, scheme: str) -> FakeQuantized:
    largest = partial(engine.mesh["tp"].all_reduce, op="max")
    codes = CodesCut(scheme=SCHEMES[scheme], box=engine.boxes[parameter.name])
    part = MatrixPart(codes, largest) if shared.numbers else None
    return FakeQuantized(SCHEMES[scheme], part, largest if shared.rows else None)
