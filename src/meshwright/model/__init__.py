"""The transformer on one device: arithmetic only."""

from meshwright.model.generate import Generation, Sampling, generate
from meshwright.model.kv_cache import Cache
from meshwright.model.transformer import Loss, Transformer, build

__all__ = ["Cache", "Generation", "Loss", "Sampling", "Transformer", "build", "generate"]
