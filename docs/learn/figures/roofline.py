"""The roofline of a matrix product (m x k) (k x n) on a device: what bounds it, and what the planner says it takes."""

from typing import Any

from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec import presets

TITLE = "The roofline of a matrix product"
DEVICES = ("a100", "h100", "h200", "b200")
ROWS = (1, 8, 64, 256, 1024, 4096, 16384)
WIDTHS = (1024, 4096, 14336)
BYTES = {"bf16": 2, "fp8": 1}
"""Bytes of an operand. Answers are bf16."""
ANSWER_BYTES = 2
EDGES = (0.25, 16384.0)
"""FLOP per byte at both ends of the drawing."""


def point(m: int, n: int, k: int, width: int, peak: float, rate: float) -> list[float]:
    """FLOP, bytes, FLOP per byte, microseconds of computing alone, and of moving alone."""
    flop = 2.0 * m * n * k
    moved = float(width * (m * k + k * n) + ANSWER_BYTES * m * n)
    return [flop, moved, round(flop / moved, 4), round(1e6 * flop / peak, 4), round(1e6 * moved / rate, 4)]


def roof(device: Any, dtype: str) -> dict[str, Any] | None:
    """The lines of one device, and a point for each product. None = it has no such products."""
    peak = {"bf16": device.bf16_flop_per_s, "fp8": device.fp8_flop_per_s}[dtype]
    if not peak:
        return None
    rate, speeds = device.memory_bytes_per_s, speeds_of(device)
    products = {}
    for m in ROWS:
        for n in WIDTHS:
            for k in WIDTHS:
                planned = 1e6 * speeds.seconds(Product(m, k, n)) if dtype == "bf16" else None
                numbers = point(m, n, k, BYTES[dtype], peak, rate)
                products[f"{m} {n} {k}"] = [*numbers, planned and round(planned, 3)]
    left, right = EDGES
    return {
        "peak": peak, "rate": rate, "ridge": peak / rate,
        "line": [[left, left * rate], [peak / rate, peak], [right, peak]],
        "products": products,
    }  # fmt: skip


def data() -> dict[str, Any]:
    """Choices, and device -> dtype -> its roof."""
    devices = {name: presets.device(name) for name in DEVICES}
    return {
        "rows": ROWS, "widths": WIDTHS, "edges": EDGES,
        "devices": {
            name: {"title": device.name, "roofs": {dtype: roof(device, dtype) for dtype in BYTES}}
            for name, device in devices.items()
        },
    }  # fmt: skip
