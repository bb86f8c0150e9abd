"""How far a layout may be from one device, by precision."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """How far a layout may be from one device: of each number, of every gradient and of every weight, relatively."""

    loss: float
    norm: float
    gradient: float
    weight: float
    by_length: bool = False
    """Tensors by the length of the difference; else by its largest element."""


BANDS = {
    "fp32": Band(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    "bf16": Band(loss=1.5e-3, norm=4e-3, gradient=5e-2, weight=4e-3, by_length=True),
    "fp8": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True),
    "fp8-all": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True),
    "fp16": Band(loss=4e-4, norm=1e-3, gradient=1.5e-2, weight=1e-3, by_length=True),
    "rounded rows": Band(loss=3e-4, norm=2e-3, gradient=2e-2, weight=1e-3, by_length=True),
    "narrow states": Band(loss=1e-5, norm=1e-5, gradient=5e-3, weight=1e-4, by_length=True),
}
"""By precision. A product in bf16 is rounded to 2**-9, and whether before or after a sum over ranks is what layouts
differ in: two to three times what was measured (docs/decisions/0005-gradient-precision.md). Narrow states in an fp32
run: where two layouts' moments differ by a rounding, a few are stored as neighbouring numbers. Rounded rows: where
activations do, a few are the next of 127 numbers; up to 2.4e-3 of a gradient was seen. What a layout rounds is held to
the bit elsewhere (tests/kernels/test_matrix_parts.py)."""
