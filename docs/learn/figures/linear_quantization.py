"""Absmax and zero-point on a list of numbers, by the package's own functions: the lecture's example."""

from typing import Any

import torch

from meshwright.kernels.quantized.rounding import absmax, zero_point

TITLE = "Absmax and zero-point by hand"
EXAMPLE = (15.0, 0.1, 0.02, 1.0, 0.01)
BITS = (8, 4, 3, 2)


def data() -> dict[str, Any]:
    """The example's S, Z and codes by each method and number of bits."""
    numbers = torch.tensor([EXAMPLE])
    methods = {"absmax": absmax, "zero-point": zero_point}
    return {
        "example": EXAMPLE,
        "methods": {
            name: {
                bits: {
                    "scale": float(quantized.scale), "zero": int(quantized.zero), "codes": quantized.codes[0].tolist(),
                }
                for bits in BITS
                for quantized in (method(numbers, bits),)
            }
            for name, method in methods.items()
        },
    }  # fmt: skip
