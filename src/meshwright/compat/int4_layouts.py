"""4-bit GPU products of other libraries with their own code layouts: torch's and gemlite's."""

from collections.abc import Callable
from importlib import import_module, metadata

import torch
from torch import Tensor

INT4_GROUPS_OF_GPU = (32, 64, 128, 256)
"""Group sizes that torch's product supports."""


def gpu_int4_missing(inputs: int, outputs: int) -> str:
    """Return why torch's 4-bit product cannot take a matrix of this size, or an empty string."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm"):
        return "this torch has no 4-bit product"
    return "" if inputs % 32 == 0 and outputs % 8 == 0 else "it takes multiples of 32 inputs and 8 outputs"


def gpu_packed_int4(codes: Tensor) -> Tensor:
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
