"""Tolerances of a layout against one device, by precision."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Relative tolerances of scalars, of every gradient and of every weight."""

    loss: float
    norm: float
    gradient: float
    weight: float
    by_length: bool = False
    """Compare tensors by the length of the difference. False = by its largest element."""


BANDS = {
    "fp32": Band(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    "bf16": Band(loss=1.5e-3, norm=4e-3, gradient=5e-2, weight=4e-3, by_length=True),
    "fp8": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True),
    "fp8-all": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True),
    "fp16": Band(loss=4e-4, norm=1e-3, gradient=1.5e-2, weight=1e-3, by_length=True),
    "rounded rows": Band(loss=3e-4, norm=2e-3, gradient=2e-2, weight=1e-3, by_length=True),
    "narrow states": Band(loss=1e-5, norm=1e-5, gradient=5e-3, weight=1e-4, by_length=True),
}
"""Tolerances by precision.

A product in bf16 is rounded to 2**-9, before or after a sum over ranks depending on the layout. The bands are two to
three times the measured differences (docs/decisions/0005-gradient-precision.md). Narrow states in an fp32 run: where
moments differ by a rounding, a few are stored as neighbouring numbers. Rounded rows: where activations differ, a few
become the next of 127 numbers, which changed up to 2.4e-3 of a gradient. The rounding of a layout itself is compared
bit by bit elsewhere (tests/kernels/test_matrix_parts.py).
"""
