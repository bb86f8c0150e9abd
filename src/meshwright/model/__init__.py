"""The transformer on one device: arithmetic only."""

from meshwright.model.cache import Cache
from meshwright.model.transformer import Loss, Transformer, build

__all__ = ["Cache", "Loss", "Transformer", "build"]
