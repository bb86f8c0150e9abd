"""Scales of inputs that make a matrix easier to round: W x = (W s) (x / s), found on what it reads.

    AWQ          (Lin et al. 2023, arXiv:2306.00978)   s = mean |x| ^ a: weights of strong inputs are rounded finer
    SmoothQuant  (Xiao et al. 2022, arXiv:2211.10438)  s = max |x| ^ a / max |W| ^ (1 - a): outliers move to weights

The exponent a is what makes the error of the outputs smallest, of those tried; 0 is no scaling for AWQ.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.kernels.quantized_linear import row_codes
from meshwright.kernels.weight_codes import coded
from meshwright.spec.quantization_schemes import Scheme

Tied = Callable[[Tensor], Tensor]
EXPONENTS = 20
"""Tried between 0 and 1."""
LARGEST = 1e4
"""Of a scale, and 1 over it."""


def awq_scales(
    weights: Sequence[Tensor], gram: Tensor, mean: Tensor, schemes: Sequence[Scheme], tied: Tied
) -> Tensor:  # fmt: skip
    """s (K,) for matrices (N, K) that read the same inputs, of mean products gram (K, K) and mean magnitude (K,).
    `tied`: (K,) made equal where inputs have one scale together."""

    def error(scales: Tensor) -> Tensor:
        found = torch.zeros((), device=gram.device)
        for weight, scheme in zip(weights, schemes, strict=True):
            wrong = _restored(weight * scales, scheme) / scales - weight
            found = found + ((wrong @ gram) * wrong).sum()
        return found

    strength = tied(mean).clamp(min=1e-8)
    return _best([_centred(strength**a) for a in _exponents()], error)


def smooth_scales(
    weights: Sequence[Tensor], peaks: Tensor, sample: Tensor, schemes: Sequence[Scheme], tied: Tied
) -> Tensor:  # fmt: skip
    """s (K,) for matrices (N, K) that read the same inputs, of largest magnitude peaks (K,), some of them sample
    (R, K). `tied` as above."""
    largest = tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)).clamp(min=1e-5)
    wanted = [sample @ weight.t() for weight in weights]

    def error(scales: Tensor) -> Tensor:
        codes, steps = row_codes(sample / scales)
        found = torch.zeros((), device=sample.device)
        for weight, scheme, y in zip(weights, schemes, wanted, strict=True):
            found = found + ((codes * steps) @ _restored(weight * scales, scheme).t() - y).square().sum()
        return found

    strength = tied(peaks).clamp(min=1e-5)
    tried = [_centred(strength**a / largest ** (1 - a)) for a in _exponents()]
    return _best([torch.ones_like(strength), *tried], error)


def _exponents() -> list[float]:
    return [place / EXPONENTS for place in range(EXPONENTS)]


def _centred(scales: Tensor) -> Tensor:
    """Times what makes the largest and the smallest equally far from 1."""
    found: Tensor = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1 / LARGEST, LARGEST)
    return found


def _best(tried: Sequence[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    errors = torch.stack([error(scales) for scales in tried])
    return tried[int(errors.nan_to_num(nan=torch.inf).argmin())]


def _restored(weight: Tensor, scheme: Scheme) -> Tensor:
    return coded(weight, scheme).dequantized()
