"""Memory of a sequence in the layers of a served model: keys and values, latents, windows, states."""

from collections import Counter
from typing import NamedTuple

from meshwright.spec.model.shape import ModelShape


class CachedLayers(NamedTuple):
    """A number of layers that keep the same of a sequence."""

    layers: int
    window: int = 0
    """Most positions that are kept. 0 = all."""
    state_elements: int = 0
    """Elements of a state of constant size in place of keys and values (spec/model/unbuilt_parts.py)."""


class ServedModel(NamedTuple):
    """A shape, and the layers that keep something its fields cannot describe."""

    shape: ModelShape
    groups: tuple[CachedLayers, ...]
    selected: int = 0
    """Most positions that attention reads, out of all that are kept (sparse attention). 0 = all."""

    @property
    def attending(self) -> tuple[CachedLayers, ...]:
        """Layers with keys and values."""
        return tuple(group for group in self.groups if not group.state_elements)

    @property
    def state_layers(self) -> int:
        """Number of layers with states."""
        return sum(group.layers for group in self.groups if group.state_elements)


def served(shape: ModelShape) -> ServedModel:
    """Describe a shape by its fields alone: every layer keeps keys and values, some within a window, or a state."""
    kinds: Counter[tuple[int, int]] = Counter()
    for layer in range(shape.layers):
        linear = shape.linear_of(layer)
        kinds[(0, linear.state_elements) if linear else (shape.window_of(layer), 0)] += 1
    return ServedModel(shape, tuple(CachedLayers(layers, *each) for each, layers in kinds.items()))


def elements_per_position(shape: ModelShape, tp: int = 1) -> int:
    """Return the elements that one layer keeps of one position on one of `tp` ranks.

    These are a key and a value of each key head, of which a rank has at least one. Latent attention keeps one latent
    and one rotated key, whole on every rank (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.3).
    """
    if shape.mla:
        return shape.mla.kv_rank + shape.mla.rope_dim
    return 2 * -(-shape.kv_heads // tp) * shape.head_dim


def sequence_bytes(model: ServedModel, positions: float, cache_width: float, tp: int = 1) -> float:
    """Return a sequence's bytes on one of `tp` ranks. `cache_width`: of an element. States have 2 bytes."""
    each = elements_per_position(model.shape, tp) * cache_width
    cached = sum(group.layers * min(positions, group.window or positions) for group in model.attending)
    states = sum(group.layers * group.state_elements for group in model.groups)
    return each * cached + 2.0 * states / tp
