"""Products of 8-bit and 4-bit integers: torch's, under private names, and gemlite's."""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import Literal

import torch
from torch import Tensor

from meshwright.compat import HAS_VECTORS, cpu_multiplies, real_tensors

INT4_GROUPS = (32, 64, 128, 256)
"""Group sizes that the 4-bit product supports."""


def has_int8_product() -> bool:
    """Return whether oneDNN multiplies 8-bit integers in this torch."""
    return hasattr(torch.ops.onednn, "qlinear_pointwise") and hasattr(torch.ops.onednn, "qlinear_prepack")


def pack_int8(codes: Tensor) -> Tensor:
    """Pack codes (N, K) int8 into oneDNN's opaque layout of the same size."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
    return packed


def int8_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Multiply x (M, K) uint8, offset by 128, by packed codes -> (M, N) fp32, with column n scaled by scales[n].

    Sums are exact. `zeros` (N,) int64 must be 0.
    """
    way = _exact_way()
    if way == "offset":
        return _product(x, 128, packed, scales, zeros)
    if way == "signed":
        return _product((x ^ 128).view(torch.int8), 0, packed, scales, zeros)
    half, ones = x >> 1, torch.ones_like(scales)
    return _product(half, 64, packed, ones, zeros).add_(_product(x - half, 64, packed, ones, zeros)).mul_(scales)


def _product(x: Tensor, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@cache
def _exact_way() -> Literal["offset", "signed", "halves"]:
    """Find a way in which oneDNN's sums are exact, by trial: its environment variables matter too.

    - `halves`: CPUs without VNNI add two products in 16 bits, where 2 x 255 x 127 saturates at 32,767. The halves of a
      row are at most 128, and 2 x 128 x 127 fits.
    - `signed`: with AMX, sums become fp32 before the offset of 128 is subtracted, and fp32 is inexact beyond 2^24.
      Signed rows need no subtraction, but other CPUs multiply them some hundred times slower.
    - `offset`: all other CPUs.
    """
    with real_tensors():
        if not _is_exact(64):
            return "halves"
        return "offset" if _is_exact(1024) else "signed"


def _is_exact(inputs: int) -> bool:
    """Return whether the largest odd sum of so many products is exact, before and after subtracting the offset."""
    x, codes = torch.full((32, inputs), 255, dtype=torch.uint8), torch.full((16, inputs), 127, dtype=torch.int8)
    x[:, 0] = 254
    product = _product(
        x, 128, pack_int8(codes), torch.ones(16, dtype=torch.float32), torch.zeros(16, dtype=torch.int64)
    )
    return bool((product.double() == (x.double() - 128) @ codes.double().t()).all())


def has_int4_product() -> bool:
    """Return whether this torch multiplies 16-bit activations by 4-bit weights with vectors on this CPU."""
    by_vectors = HAS_VECTORS or cpu_multiplies(torch.bfloat16)
    return by_vectors and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes (N, K) within 0 .. 15 for the product, half a byte each. N must be a multiple of 16."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed


def int4_product(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """Return x (M, K) bf16 times the weights (q - 8) s + z -> (M, N) bf16. scales_and_zeros: (K / group, N, 2)."""
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)
    return product


INT4_GROUPS_OF_GPU = (32, 64, 128, 256)
"""Group sizes that torch's product supports."""


def gpu_int4_missing(inputs: int, outputs: int) -> str:
    """Return why torch's 4-bit product cannot take a matrix of this size, or an empty string."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm"):
        return "this torch has no 4-bit product"
    return "" if inputs % 32 == 0 and outputs % 8 == 0 else "it takes multiples of 32 inputs and 8 outputs"


def pack_gpu_int4(codes: Tensor) -> Tensor:
    """Repack 4-bit codes (N, K / 2), the first in the lower half of a byte, for torch's product."""
    tiles = next(count for count in (8, 4, 2) if codes.shape[1] * 2 % (16 * count) == 0)
    turned = (codes << 4) | (codes >> 4)  # torch has the first code in the upper half
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(turned.contiguous(), tiles)
    return packed


def gpu_int4_product(x: Tensor, packed: Tensor, group: int, scales_and_shifts: Tensor) -> Tensor:
    """Return x (M, K) bf16 times the weights (q - 8) s + z -> (M, N) bf16. Scales and shifts: (K / group, N, 2)."""
    product: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group, scales_and_shifts)
    return product


def gemlite_version() -> str:
    """Return the version of the installed package, or an empty string."""
    try:
        return metadata.version("gemlite")
    except metadata.PackageNotFoundError:
        return ""


def gemlite_product(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, group: int, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], int]:  # fmt: skip
    """Return a product by gemlite's kernels, x (M, K) -> (M, N), and the bytes of its layout.

    codes (N, K), one per byte; scales and zeros (N, K / group). gemlite tunes its kernels at the first product of each
    number of rows.
    """
    gemlite = import_module("gemlite")
    kinds = {torch.bfloat16: gemlite.DType.BF16, torch.float16: gemlite.DType.FP16}
    outputs, inputs = codes.shape
    layer = gemlite.GemLiteLinearTriton(
        W_nbits=4, group_size=group, in_features=inputs, out_features=outputs, input_dtype=kinds[dtype],
        output_dtype=kinds[dtype],
    )  # fmt: skip
    layer.pack(codes, scales.to(dtype), zeros if isinstance(zeros, int) else zeros.to(dtype))
    return layer, sum(tensor.nbytes for tensor in (*layer.buffers(), *layer.parameters()))
