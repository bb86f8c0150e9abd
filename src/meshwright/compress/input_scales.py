"""Input scales that make a matrix easier to round, W x = (W s) (x / s), chosen on calibration inputs.

    AWQ          (Lin et al. 2023, arXiv:2306.00978)   s = mean |x| ^ a: weights of strong inputs are rounded finer
    SmoothQuant  (Xiao et al. 2022, arXiv:2211.10438)  s = max |x| ^ a / max |W| ^ (1 - a): outliers move to weights

Of the exponents tried, the one with the smallest output error is taken. For AWQ, a = 0 means no scaling. Scales are
folded into the modules that produce the inputs, so that inference costs nothing extra:

    norm gain, and bias, / s       attention_norm -> q, k, v;  mlp_norm -> gate, up;  q_norm -> q_up;  kv_norm -> kv_up
    rows of a matrix / s           up -> down where a gate multiplies between;  v -> o, one s for all queries of a head

The readers' columns are multiplied by s, so logits change by rounding only. A routed layer's norm is not scaled, since
the router reads it too. Nor are the inputs of a matrix after GELU, which is not linear.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.kernels.quantized.quantize import coded
from meshwright.kernels.quantized.quantized_linear import row_codes
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.model.shape import ModelShape

Tied = Callable[[Tensor], Tensor]
EXPONENTS = 20
"""Number of exponents tried between 0 and 1."""
LARGEST = 1e4
"""Largest scale; its inverse is the smallest."""


def awq_scales(weights: Sequence[Tensor], gram: Tensor, mean: Tensor, schemes: Sequence[Scheme], tied: Tied) -> Tensor:
    """Return AWQ scales (K,) for matrices (N, K) that share inputs with mean products gram (K, K) and magnitudes (K,).

    `tied` makes entries of a (K,) equal where inputs must share one scale.
    """

    def error(scales: Tensor) -> Tensor:
        total = torch.zeros((), device=gram.device)
        for weight, scheme in zip(weights, schemes, strict=True):
            wrong = _restored(weight * scales, scheme) / scales - weight
            total = total + ((wrong @ gram) * wrong).sum()
        return total

    # Columns with large inputs count most: larger weights there make their rounding errors smaller.
    strength = tied(mean).clamp(min=1e-8)
    return _best([_centred(strength**a) for a in _exponents()], error)


def smooth_scales(
    weights: Sequence[Tensor], peaks: Tensor, sample: Tensor, schemes: Sequence[Scheme], tied: Tied
) -> Tensor:  # fmt: skip
    """Return SmoothQuant scales (K,) for matrices (N, K) that share inputs with peaks (K,) and sampled rows (R, K).

    `tied` is as in `awq_scales`.
    """
    largest = tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)).clamp(min=1e-5)
    wanted = [sample @ weight.t() for weight in weights]

    def error(scales: Tensor) -> Tensor:
        codes, steps = row_codes(sample / scales)
        total = torch.zeros((), device=sample.device)
        for weight, scheme, y in zip(weights, schemes, wanted, strict=True):
            total = total + ((codes * steps) @ _restored(weight * scales, scheme).t() - y).square().sum()
        return total

    strength = tied(peaks).clamp(min=1e-5)
    tried = [_centred(strength**a / largest ** (1 - a)) for a in _exponents()]
    # No scale at all is a candidate, too, so the result is never worse.
    return _best([torch.ones_like(strength), *tried], error)


def _exponents() -> list[float]:
    return [step / EXPONENTS for step in range(EXPONENTS)]


def _centred(scales: Tensor) -> Tensor:
    """Normalize scales so that the largest and the smallest are equally far from 1, as factors."""
    centred: Tensor = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1 / LARGEST, LARGEST)
    return centred


def _best(tried: Sequence[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    errors = torch.stack([error(scales) for scales in tried])
    return tried[int(errors.nan_to_num(nan=torch.inf).argmin())]


def _restored(weight: Tensor, scheme: Scheme) -> Tensor:
    return coded(weight, scheme).dequantized()


SHARED_INPUT = (("q", "k", "v", "q_down", "kv_down"), ("q_up",), ("kv_up",), ("o",), ("gate", "up"), ("down",))
"""Matrices of one module that read the same inputs, in the order in which they are applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A module that can absorb scales, and the matrices that read its outputs."""

    source: str
    """Path of the norm, matrix, or stack of experts whose outputs are divided."""
    readers: tuple[str, ...]
    """Names of the matrices whose columns are multiplied."""
    heads: tuple[int, int] = (0, 0)
    """Key heads and queries per key head when the source is v, else (0, 0)."""

    def tied(self, strength: Tensor) -> Tensor:
        """Replace each entry of (K,) by the largest of those that must share one scale."""
        keys, queries = self.heads
        if not keys:
            return strength
        largest = strength.view(keys, queries, -1).amax(1, keepdim=True)
        return largest.expand(keys, queries, -1).flatten()

    def source_scales(self, scales: Tensor) -> Tensor:
        """Return the scales of the source's outputs from those of the readers' inputs (K,)."""
        keys, queries = self.heads
        return scales.view(keys, queries, -1)[:, 0].flatten() if keys else scales


def input_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Group the names of a layer's matrices by the inputs that they read, in the order in which they are applied."""
    parts = dict.fromkeys(_part(name) for name in names)
    groups = []
    for part in parts:
        for leaves in SHARED_INPUT:
            group = tuple(name for name in names if _part(name) == part and _leaf(name) in leaves)
            groups += [group] if group else []
    return groups


def list_folds(shape: ModelShape, layer: int, quantized: Collection[str]) -> list[Fold]:
    """List the folds of one layer whose matrices are all quantized."""
    return [
        target
        for target in _every_fold(shape, f"layers.{layer}.", shape.is_moe_layer(layer))
        if all(name in quantized for name in target.readers)
        and (target.source.endswith("_norm") or not {target.source, f"{target.source}.weight"}.isdisjoint(quantized))
    ]


def _every_fold(shape: ModelShape, layer: str, routed: bool) -> Iterator[Fold]:
    attention, mlp = layer + "attention.", layer + "mlp."
    gated = shape.mlp == "swiglu"
    mla = shape.mla
    first = ("q", "k", "v") if mla is None else ("q_down" if mla.q_rank else "q", "kv_down")
    yield Fold(source=layer + "attention_norm", readers=tuple(f"{attention}{leaf}.weight" for leaf in first))
    # Values go through attention unchanged, so a scale of "o" can move into "v". Query and key scales cannot.
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
    # A gated product is linear in "up", so its scale moves there. Behind a GELU it cannot.
    if gated and routed:
        yield Fold(source=mlp + "experts.up", readers=(mlp + "experts.down",))
        yield Fold(source=mlp + "shared.up", readers=(mlp + "shared.down.weight",))
    elif gated:
        yield Fold(source=mlp + "up", readers=(mlp + "down.weight",))


@torch.no_grad()
def fold(model: nn.Module, target: Fold, scales: list[Tensor], stored: torch.dtype) -> None:
    """Fold scales (K,), one per matrix of a stack, into a model whose norms are stored in dtype `stored`."""
    parent, _, leaf = target.source.rpartition(".")
    owner = model.get_submodule(parent)
    source = getattr(owner, leaf)
    if isinstance(source, nn.Parameter):  # a stack of experts
        for number, scale in enumerate(scales):
            source[number].div_(scale.unsqueeze(1))
            _reader(model, target.readers[0])[number].mul_(scale)
        return
    (scale,) = scales
    if target.source.endswith("_norm"):
        scale = _divide_norm(source.weight, scale, stored)
    else:
        source.weight.div_(target.source_scales(scale).unsqueeze(1))
    if getattr(source, "bias", None) is not None:
        source.bias.div_(target.source_scales(scale))
        source.bias.copy_(source.bias.to(stored))
    for name in target.readers:
        _reader(model, name).mul_(scale)


def _divide_norm(gain: Tensor, scales: Tensor, stored: torch.dtype) -> Tensor:
    """Divide a gain, rounded to its stored dtype, and return the scales that this division realizes exactly."""
    wanted = (gain / scales).to(stored).to(gain.dtype)
    exact = torch.where((wanted == 0) | ~wanted.isfinite(), torch.ones_like(gain), gain / wanted)
    gain.copy_(torch.where(exact == 1, gain, wanted))
    return exact


def _reader(model: nn.Module, name: str) -> Tensor:
    where, _, leaf = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(where), leaf)
    return weight


def _part(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
