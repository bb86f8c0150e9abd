"""The transformer on one device: arithmetic only.

transformer      embed, blocks, norm, head, and predictions, which objectives read; the file to read first
attention        both kinds of self-attention, and the cache of keys and values
feed_forward     MLPs and mixtures of experts
layers           linear layers and norms, of which both are made
seams            every point where a layout replaces the arithmetic
low_rank, quantized_weights, fake_quantized     other kinds of weights in these layers
init             initial weights
generate         text generation, for one prompt or several
"""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.model.attention import Cache
    from meshwright.model.generate import Generation, Sampling
    from meshwright.model.transformer import Loss, Transformer, build

__all__ = ["Cache", "Generation", "Loss", "Sampling", "Transformer", "build"]

# Loaded on first use: the configs of folders are read without torch.
__getattr__ = lazy_names(__name__, {
    "Cache": "attention", "Generation": "generate", "Loss": "transformer", "Sampling": "generate",
    "Transformer": "transformer", "build": "transformer",
})  # fmt: skip
