"""Adapters that say something, for models that are compared: they begin as nothing."""

import torch

from meshwright.model.init import fill_initial, width_deviation
from meshwright.parallel import Engine
from meshwright.parallel.data import local


@torch.no_grad()
def begin_adapters(engine: Engine, seed: int) -> None:
    """Adapters begin as nothing, so that A has no gradient and B is nothing but its first update: give B numbers, as
    large in the sum as a weight's."""
    shape, parameters = engine.model.shape, engine.parameters
    for name, box in engine.local_boxes().items():
        if name.endswith("lora.b") and shape.lora is not None:
            part, drawn = local(parameters[name]), f"{name.removesuffix('b')}a"
            fill_initial(part, drawn, shape, seed + 1, whole=box.whole, offsets=box.offsets)
            part.mul_(width_deviation(shape.hidden) / shape.lora.scale)
