"""What the layers of a model keep of a sequence while it is served: keys and values, latents, windows, states."""

from collections import Counter
from typing import NamedTuple

from meshwright.spec.shape import ModelShape


class CachedLayers(NamedTuple):
    """So many layers that keep the same of a sequence."""

    layers: int
    window: int = 0
    """Positions that are kept at most; 0 = all."""
    state_elements: int = 0
    """Of a layer that keeps a state of one size in place of keys and values (spec/linear_attention.py)."""


class ServedModel(NamedTuple):
    """A shape, and what its layers keep where a shape cannot say so."""

    shape: ModelShape
    groups: tuple[CachedLayers, ...]
    selected: int = 0
    """Positions that attention reads at most, out of all that are kept (sparse attention); 0 = all."""

    @property
    def attending(self) -> tuple[CachedLayers, ...]:
        """Layers with keys and values."""
        return tuple(one for one in self.groups if not one.state_elements)

    @property
    def state_layers(self) -> int:
        """Layers with states."""
        return sum(one.layers for one in self.groups if one.state_elements)


def served(shape: ModelShape) -> ServedModel:
    """A shape that says all there is to say: every layer keeps keys and values, some within a window, or a
    state."""
    kept: Counter[tuple[int, int]] = Counter()
    for layer in range(shape.layers):
        linear = shape.linear_of(layer)
        kept[(0, linear.state_elements) if linear else (shape.window_of(layer), 0)] += 1
    return ServedModel(shape, tuple(CachedLayers(layers, *each) for each, layers in kept.items()))


def elements_per_position(shape: ModelShape, tp: int = 1) -> int:
    """Numbers that one layer keeps of one position on one of `tp` ranks: a key and a value of each of its key heads,
    of which a rank has at least one. Latent attention keeps one latent and one rotated key, whole on every rank
    (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.3)."""
    if shape.mla:
        return shape.mla.kv_rank + shape.mla.rope_dim
    return 2 * -(-shape.kv_heads // tp) * shape.head_dim


def sequence_bytes(model: ServedModel, positions: float, cache_width: float, tp: int = 1) -> float:
    """Bytes that one sequence of so many positions takes on one of `tp` ranks. `cache_width`: bytes of a number;
    states stay in 2 bytes."""
    each = elements_per_position(model.shape, tp) * cache_width
    kept = sum(one.layers * min(positions, one.window or positions) for one in model.attending)
    states = sum(one.layers * one.state_elements for one in model.groups)
    return each * kept + 2.0 * states / tp
