"""Formats of weights in serving: bytes of an element with its scales, and the precision of a product."""

from typing import NamedTuple

from meshwright.spec.errors import PlanError, argument
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme


class NumberFormat(NamedTuple):
    """Format of one kind of matrices."""

    name: str
    width: float
    """Bytes of a weight, its share of scales included."""
    computes: float
    """Bytes of the operands of the product itself: 2 = 16 bit, 1 = 8 bit, 0.5 = 4 bit."""


BF16 = NumberFormat("bf16", 2.0, 2.0)
FP8 = NumberFormat("fp8", 1.0, 1.0)
FP8_BLOCK = NumberFormat("fp8_block", 1.0 + 4 / 128**2, 1.0)
NVFP4 = NumberFormat("nvfp4", 0.5 + 1 / 16, 0.5)
INT4 = NumberFormat("int4_wo", 0.5 + 2 / 32, 2.0)
FP32 = NumberFormat("fp32", 4.0, 4.0)
FORMATS = {each.name: each for each in (FP32, BF16, FP8, FP8_BLOCK, NVFP4, INT4)}
"""Formats by name.
nvfp4: 4-bit floating point, an fp8 scale for 16 (NVIDIA). int4_wo: integers, a bf16 scale for 32, products in 16 bit.
"""


class WeightFormats(NamedTuple):
    """Formats of a served model. Embedding, head and norms stay in 16 bit."""

    attention: NumberFormat = BF16
    mlp: NumberFormat = BF16
    """Format of dense MLPs and shared experts."""
    experts: NumberFormat = BF16
    other: float = 2.0
    """Bytes of an element of embedding, head, router and norms."""


def formats_of(name: str, *, experts: bool) -> WeightFormats:
    """Return the formats that a name stands for: one of FORMATS, or a scheme of `quantize`.

    fp32 and bf16 apply to everything. As in published checkpoints, 8 bits apply to all matrices. 4 bits apply to all
    matrices of a dense model, and to the routed experts of a mixture, whose attention stays in 16 bit. Raises PlanError
    for other names.
    """
    chosen = FORMATS.get(name) or _of_scheme(name)
    if chosen.width > 2:
        return WeightFormats(chosen, chosen, chosen, chosen.width)
    if chosen.width < 0.9 and experts:
        return WeightFormats(BF16, BF16, chosen)
    return WeightFormats(chosen, chosen, chosen)


def _of_scheme(name: str) -> NumberFormat:
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise PlanError(
            f"{argument('quantization', name)} is not known: take one of "
            f"{', '.join(dict.fromkeys((*FORMATS, *SCHEMES)))}"
        )
    return NumberFormat(name, bytes_per_weight(scheme), 2.0 if scheme.activations == "same" else 1.0)


SIDE = 4096
"""Side of the matrix by which a scheme's bytes of a weight are counted: scales are a few percent at most."""


def bytes_per_weight(scheme: Scheme) -> float:
    """Return the bytes of codes, scales and zeros of a matrix, per element."""
    return scheme.nbytes((SIDE, SIDE)) / SIDE**2
