"""Formats of numbers: bits, largest and smallest numbers, and the table of NF4, from torch and the package."""

from typing import Any

import torch

from meshwright.spec.model.quantization_schemes import NF4

TITLE = "Any number in seven formats"
FORMATS = {
    "fp32": (torch.float32, 8, 23), "fp16": (torch.float16, 5, 10), "bf16": (torch.bfloat16, 8, 7),
    "fp8 e4m3": (torch.float8_e4m3fn, 4, 3), "fp8 e5m2": (torch.float8_e5m2, 5, 2),
}  # fmt: skip
"""Name -> dtype of torch, bits of the exponent, and bits of the mantissa."""


def data() -> dict[str, Any]:
    """Floating-point formats with their limits, and the numbers of NF4."""
    floats = {
        name: {
            "exponent": exponent, "mantissa": mantissa, "largest": torch.finfo(dtype).max,
            "smallest": torch.finfo(dtype).smallest_normal, "infinite": dtype != torch.float8_e4m3fn,
        }
        for name, (dtype, exponent, mantissa) in FORMATS.items()
    }  # fmt: skip
    return {"floats": floats, "nf4": list(NF4)}
