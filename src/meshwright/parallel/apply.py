"""How a layout is put onto a model: one screen, in a stated order."""

import torch
from torch import Tensor

from meshwright.model import Transformer
from meshwright.model.attention import Sight
from meshwright.model.cache import LayerCache
from meshwright.model.transformer import Block, BlockCall, call_block
from meshwright.parallel.recompute import block_call
from meshwright.spec.layout import Layout


def parallelize(model: Transformer, layout: Layout, device: torch.device) -> Transformer:
    """Apply a layout to a built model, in this order: recomputation around each block, then compilation of both.

    The compiler must see the recomputation: around a compiled block, whose operations nobody sees any more, selective
    would keep nothing.
    """
    call = block_call(layout.recompute)
    if layout.compile == "on" or (layout.compile == "auto" and device.type == "cuda"):
        call = _compiled(call)
    model.call_block = call
    return model


def _compiled(call: BlockCall) -> BlockCall:
    """With a cache every token has another length, and would be compiled anew: generation stays as it is."""
    compiled = torch.compile(call, dynamic=False)

    def run(block: Block, x: Tensor, sight: Sight, cache: LayerCache | None) -> tuple[Tensor, Tensor | None]:
        return compiled(block, x, sight, None) if cache is None else call_block(block, x, sight, cache)

    return run
