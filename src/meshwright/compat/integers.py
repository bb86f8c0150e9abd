"""Products of 8-bit and 4-bit whole numbers on a CPU, which torch has under private names only."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from meshwright.compat import HAS_VECTORS, cpu_multiplies, real_tensors

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
    Sums are exact. `zeros` (N,) int64 are 0."""
    way = _exact_way()
    if way == "offset":
        return _product(x, 128, packed, scales, zeros)
    if way == "signed":
        return _product((x ^ 128).view(torch.int8), 0, packed, scales, zeros)
    half, ones = x >> 1, torch.ones_like(scales)
    return _product(half, 64, packed, ones, zeros).add_(_product(x - half, 64, packed, ones, zeros)).mul_(scales)


def _product(x: Tensor, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found


@cache
def _exact_way() -> Literal["offset", "signed", "halves"]:
    """How oneDNN multiplies without a rounded sum. Asked of products themselves: its environment decides, too.

    - `halves`: CPUs without VNNI add two products in 16 bits, and 2 x 255 x 127 is cut to 32,767. Halves of a row are
      at most 128, and 2 x 128 x 127 is not.
    - `signed`: with AMX, sums are made fp32 before what 128 adds is taken away, and beyond 2^24 fp32 has even numbers
      alone. Rows with a sign have nothing to take away; other CPUs multiply them some hundred times slower.
    - `offset`: elsewhere."""
    with real_tensors():
        if not _is_exact(64):
            return "halves"
        return "offset" if _is_exact(1024) else "signed"


def _is_exact(inputs: int) -> bool:
    """Whether the largest sum of so many products but one is exact. It is odd, before and after 128 is taken away."""
    x, codes = torch.full((32, inputs), 255, dtype=torch.uint8), torch.full((16, inputs), 127, dtype=torch.int8)
    x[:, 0] = 254
    found = _product(
        x, 128, packed_int8(codes), torch.ones(16, dtype=torch.float32), torch.zeros(16, dtype=torch.int64)
    )
    return bool((found.double() == (x.double() - 128) @ codes.double().t()).all())


def has_int4_product() -> bool:
    """Whether this torch multiplies 16-bit activations with 4-bit weights on this CPU, and by vectors."""
    by_vectors = HAS_VECTORS or cpu_multiplies(torch.bfloat16)
    return by_vectors and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")


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
