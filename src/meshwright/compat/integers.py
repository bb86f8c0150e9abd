"""Products of 8-bit and 4-bit whole numbers on a CPU, which torch has under private names only."""

from functools import cache

import torch
from torch import Tensor

from meshwright.compat import real_tensors

INT4_GROUPS = (32, 64, 128, 256)
"""Inputs that share a scale, which the 4-bit product takes."""


def has_int8_product() -> bool:
    """Whether oneDNN multiplies 8-bit numbers in this torch."""
    return hasattr(torch.ops.onednn, "qlinear_pointwise") and hasattr(torch.ops.onednn, "qlinear_prepack")


def packed_int8(codes: Tensor) -> Tensor:
    """Codes (N, K) int8 as oneDNN reads them: opaque memory of the same size."""
    found: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
    return found


def unpacked_int8(packed: Tensor) -> Tensor:
    """The codes (N, K) again."""
    return packed.to_dense().t()


def int8_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x (M, K) uint8, each 128 more than it stands for, times packed codes -> (M, N) fp32, column n times scales[n].
    Sums are exact. `zeros` (N,) int64 are 0. Where pairs of products saturate, x is multiplied in two halves."""
    if not _saturates():
        return _product(x, 128, packed, scales, zeros)
    half, ones = x >> 1, torch.ones_like(scales)
    return _product(half, 64, packed, ones, zeros).add_(_product(x - half, 64, packed, ones, zeros)).mul_(scales)


def _product(x: Tensor, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found


@cache
def _saturates() -> bool:
    """Whether oneDNN adds two products in 16 bits, as it does on CPUs without VNNI: 2 x 255 x 127 is cut to 32,767.
    Halves of a row are at most 128, and 2 x 128 x 127 is not. Asked of the product itself: how oneDNN may multiply is
    also set by its environment."""
    with real_tensors():
        inputs, outputs = 64, 16
        x, codes = torch.full((1, inputs), 255, dtype=torch.uint8), torch.full((outputs, inputs), 127, dtype=torch.int8)
        ones, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
        found = _product(x, 128, packed_int8(codes), ones, zeros)
        return not bool((found == 127 * 127 * inputs).all())


@cache
def has_bf16_units() -> bool:
    """Whether this CPU has instructions for products of bf16. Without them torch's are right and slow: oneDNN supports
    bf16 by widening it (compat.cpu_multiplies), at a third of the rate of fp32."""
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    known = [bool(ask()) for ask in asked if ask is not None]
    return any(known) or not known


def has_int4_product() -> bool:
    """Whether this torch multiplies 16-bit activations with 4-bit weights on a CPU."""
    return hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")


def packed_int4(codes: Tensor) -> Tensor:
    """Codes (N, K) within 0 .. 15 as the product reads them, half a byte each. N is a multiple of 16."""
    found: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return found


def int4_product(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """x (M, K) bf16 times what codes q stand for, (q - 8) s + z -> (M, N) bf16; scales_and_zeros (K / group, N, 2)."""
    found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)
    return found


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) int8 times b (N, K) int8 transposed -> int32 (M, N). A GPU wants more than 16 rows, and multiples of 8
    for K and N."""
    found: Tensor = torch._int_mm(a, b.t())
    return found
