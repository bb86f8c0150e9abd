"""Input scales that make a matrix easier to round, W x = (W s) (x / s), chosen on calibration inputs.

    AWQ          (Lin et al. 2023, arXiv:2306.00978)   s = mean |x| ^ a: weights of strong inputs are rounded finer
    SmoothQuant  (Xiao et al. 2022, arXiv:2211.10438)  s = max |x| ^ a / max |W| ^ (1 - a): outliers move to weights

Of the exponents tried, the one with the smallest output error is taken. For AWQ, a = 0 means no scaling.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.kernels.quantized.quantize import coded
from meshwright.kernels.quantized.quantized_linear import row_codes
from meshwright.spec.model.quantization_schemes import Scheme

Tied = Callable[[Tensor], Tensor]
EXPONENTS = 20
"""Number of exponents tried between 0 and 1."""
LARGEST = 1e4
"""Largest scale; its inverse is the smallest."""


def awq_scales(
    weights: Sequence[Tensor], gram: Tensor, mean: Tensor, schemes: Sequence[Scheme], tied: Tied
) -> Tensor:  # fmt: skip
    """Return AWQ scales (K,) for matrices (N, K) that share inputs with mean products gram (K, K) and magnitudes (K,).

    `tied` makes entries of a (K,) equal where inputs must share one scale.
    """

    def error(scales: Tensor) -> Tensor:
        total = torch.zeros((), device=gram.device)
        for weight, scheme in zip(weights, schemes, strict=True):
            wrong = _restored(weight * scales, scheme) / scales - weight
            total = total + ((wrong @ gram) * wrong).sum()
        return total

    # columns with large inputs count most: larger weights there make their rounding errors smaller
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
    # no scale at all is a candidate, too, so the result is never worse
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
