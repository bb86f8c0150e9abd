"""How a layout is put onto a model: one screen, in a stated order."""

import torch

from meshwright.model import Transformer
from meshwright.parallel.recompute import block_call
from meshwright.spec.layout import Layout


def parallelize(model: Transformer, layout: Layout, device: torch.device) -> Transformer:
    """Apply a layout to a built model, in this order: compile each block, then recomputation around it.

    Recomputation wraps the compiled block, so that what is made again is the compiled code.
    """
    if layout.compile == "on" or (layout.compile == "auto" and device.type == "cuda"):
        for block in model.layers:
            block.compile(dynamic=False)
    model.call_block = block_call(layout.recompute)
    return model
