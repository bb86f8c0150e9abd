"""Where scales of inputs go, so that nothing is left to do when a model runs: into what makes the inputs.

    norm gain, and bias, / s       attention_norm -> q, k, v;  mlp_norm -> gate, up;  q_norm -> q_up;  kv_norm -> kv_up
    rows of a matrix / s           up -> down where a gate multiplies between;  v -> o, one s for all queries of a head

The readers' columns are multiplied by s: no logit changes but by rounding. A routed layer's norm keeps its gain: the
router reads it, too. So do the inputs of a matrix behind GELU, which is not linear.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.spec.shape import ModelShape

SHARED_INPUT = (("q", "k", "v", "q_down", "kv_down"), ("q_up",), ("kv_up",), ("o",), ("gate", "up"), ("down",))
"""Matrices of one part that read the same, in the order in which they are applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One place where scales can go."""

    source: str
    """The norm, or the matrix, whose outputs are divided: the path of a module, or of a stack of experts."""
    readers: tuple[str, ...]
    """Matrices, by name, whose columns are multiplied."""
    heads: tuple[int, int] = (0, 0)
    """Of v: key heads, and queries of each; (0, 0) elsewhere."""

    def tied(self, strength: Tensor) -> Tensor:
        """(K,) with the largest of those that have one scale together in place of each."""
        keys, queries = self.heads
        if not keys:
            return strength
        largest = strength.view(keys, queries, -1).amax(1, keepdim=True)
        return largest.expand(keys, queries, -1).flatten()

    def of_source(self, scales: Tensor) -> Tensor:
        """Of the source's outputs, from those of the readers' inputs (K,)."""
        keys, queries = self.heads
        return scales.view(keys, queries, -1)[:, 0].flatten() if keys else scales


def input_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Names of a layer's matrices by what they read, in the order in which they are applied."""
    parts = dict.fromkeys(_part(name) for name in names)
    found = []
    for part in parts:
        for leaves in SHARED_INPUT:
            own = tuple(name for name in names if _part(name) == part and _leaf(name) in leaves)
            found += [own] if own else []
    return found


def folds(shape: ModelShape, layer: int, quantized: Collection[str]) -> list[Fold]:
    """Of one layer, those whose matrices are all quantized."""
    return [
        one
        for one in _every(shape, f"layers.{layer}.", shape.is_moe_layer(layer))
        if all(name in quantized for name in one.readers)
        and (one.source.endswith("_norm") or not {one.source, f"{one.source}.weight"}.isdisjoint(quantized))
    ]


def _every(shape: ModelShape, layer: str, routed: bool) -> Iterator[Fold]:
    attention, mlp = layer + "attention.", layer + "mlp."
    gated = shape.mlp == "swiglu"
    mla = shape.mla
    first = ("q", "k", "v") if mla is None else ("q_down" if mla.q_rank else "q", "kv_down")
    yield Fold(source=layer + "attention_norm", readers=tuple(f"{attention}{leaf}.weight" for leaf in first))
    if mla is None:
        heads = shape.kv_heads, shape.heads // shape.kv_heads
        yield Fold(source=attention + "v", readers=(attention + "o.weight",), heads=heads)
    else:
        if mla.q_rank:
            yield Fold(source=attention + "q_norm", readers=(attention + "q_up.weight",))
        yield Fold(source=attention + "kv_norm", readers=(attention + "kv_up.weight",))
    if not routed:
        leaves = ("gate", "up") if gated else ("up",)
        yield Fold(source=layer + "mlp_norm", readers=tuple(f"{mlp}{leaf}.weight" for leaf in leaves))
    if gated and routed:
        yield Fold(source=mlp + "experts.up", readers=(mlp + "experts.down",))
        yield Fold(source=mlp + "shared.up", readers=(mlp + "shared.down.weight",))
    elif gated:
        yield Fold(source=mlp + "up", readers=(mlp + "down.weight",))


@torch.no_grad()
def fold(model: nn.Module, place: Fold, scales: list[Tensor], stored: torch.dtype) -> None:
    """Put scales (K,), of a stack one for each, into a model, whose norms are kept in the dtype `stored`."""
    parent, _, leaf = place.source.rpartition(".")
    owner = model.get_submodule(parent)
    source = getattr(owner, leaf)
    if isinstance(source, nn.Parameter):  # a stack of experts
        for number, one in enumerate(scales):
            source[number].div_(one.unsqueeze(1))
            _reader(model, place.readers[0])[number].mul_(one)
        return
    (one,) = scales
    if place.source.endswith("_norm"):
        one = _norm_divided(source.weight, one, stored)
    else:
        source.weight.div_(place.of_source(one).unsqueeze(1))
    if getattr(source, "bias", None) is not None:
        source.bias.div_(place.of_source(one))
        source.bias.copy_(source.bias.to(stored))
    for name in place.readers:
        _reader(model, name).mul_(one)


def _norm_divided(gain: Tensor, scales: Tensor, stored: torch.dtype) -> Tensor:
    """Divide a gain, rounded as it is stored, and give the scales that this is exactly."""
    wanted = (gain / scales).to(stored).to(gain.dtype)
    exact = torch.where((wanted == 0) | ~wanted.isfinite(), torch.ones_like(gain), gain / wanted)
    gain.copy_(torch.where(exact == 1, gain, wanted))
    return exact


def _reader(model: nn.Module, name: str) -> Tensor:
    where, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(where), leaf)
    return found


def _part(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
