"""How a layout is put onto a model: one screen, in a stated order."""

import torch
from torch import Tensor

from meshwright.model import Transformer
from meshwright.model.attention import Sight
from meshwright.model.cache import LayerCache
from meshwright.model.moe import Experts
from meshwright.model.transformer import Block, BlockCall, call_block
from meshwright.parallel.recompute import block_call
from meshwright.spec.layout import Layout


def parallelize(model: Transformer, layout: Layout, device: torch.device) -> Transformer:
    """Apply a layout to a built model, in this order: recomputation around each block, then compilation of both."""
    if layout.compile == "on" or (layout.compile == "auto" and device.type == "cuda"):
        _keep_from_compiler(model)
        model.call_block = _compiled(layout.recompute)
    else:
        model.call_block = block_call(layout.recompute)
    return model


def _compiled(recompute: str) -> BlockCall:
    """Dense blocks are compiled together with their recomputation: around compiled code, whose operations nobody sees
    any more, selective would keep nothing. Routed ones cannot be, since the compiler does not recompute a part that it
    must leave alone: their recomputation is around what is compiled of them, and selective keeps the experts' products
    only. With a cache every token has another length and would be compiled anew: generation stays as it is."""
    dense = torch.compile(block_call(recompute), dynamic=False)
    routed = block_call(recompute, torch.compile(call_block, dynamic=False))

    def run(block: Block, x: Tensor, sight: Sight, cache: LayerCache | None) -> tuple[Tensor, Tensor | None]:
        if cache is not None:
            return call_block(block, x, sight, cache)
        return routed(block, x, sight, None) if block.routed else dense(block, x, sight, None)

    return run


def _keep_from_compiler(model: Transformer) -> None:
    """Experts take runs of rows whose lengths would become constants of the code: every step would compile anew."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
