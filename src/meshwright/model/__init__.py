"""The transformer on one device: arithmetic only.

transformer      embed, blocks, norm, head; the file to read first
attention, rope, mlp, moe, norm, linear     the parts of a block
seams            every place at which something else may be put
low_rank, quantized_weights, fake_quantized     other weights in these places
init             first weights
generate, kv_cache, prompt_batch     text from a model, one prompt or several
hub, gguf, quantized_formats     folders and files of others
"""

from meshwright.model.generate import Generation, Sampling, generate
from meshwright.model.kv_cache import Cache
from meshwright.model.transformer import Loss, Transformer, build

__all__ = ["Cache", "Generation", "Loss", "Sampling", "Transformer", "build", "generate"]
