"""What this device reaches at best, measured at the start: matrix products by dtype, and copies."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import Count
from benchmarks.gpu.timing import Timer
from meshwright.kernels.chooser import dtype_name

ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The roofline: bytes per second read and written by a copy, FLOP per second of a product by dtype."""

    bytes_per_s: float
    flop_per_s: dict[str, float]

    def seconds(self, count: Count, dtype: torch.dtype) -> float:
        """The least that a pass can take."""
        return max(count.bytes_moved / self.bytes_per_s, count.flop / self.flop_per_s[dtype_name(dtype)])

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _best(run: Any, timer: Timer, rounds: int = ROUNDS) -> float:
    """The shortest of some runs: a ceiling is what nothing disturbed."""
    rates = []
    for _ in range(rounds + 2):
        begin = timer.mark()
        run()
        end = timer.mark()
        timer.settle()
        rates.append(timer.seconds(begin, end))
    return min(rates[2:])


def _product_s(size: int, dtype: torch.dtype, device: torch.device, timer: Timer) -> float:
    """Random numbers: products of zeros draw less power and run faster than any training's."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return _best(lambda: torch.mm(a, b.t(), out=out), timer)


def _copied(source: Tensor, to: Tensor) -> Tensor:
    return to.copy_(source)


def measure(device: torch.device, timer: Timer, dtypes: tuple[torch.dtype, ...], tiny: bool) -> Ceilings:
    """8,192^3 (4,096^3 where that is faster) and 1 GiB; small sizes for a test."""
    sizes, elements = ((64, 96), 2**14) if tiny else ((4096, 8192), 2**29)
    rates = {
        dtype_name(dtype): max(2 * size**3 / _product_s(size, dtype, device, timer) for size in sizes)
        for dtype in dtypes
    }
    source, to = (torch.randn(elements, device=device).to(torch.float16) for _ in range(2))
    moved = 2 * source.numel() * source.element_size()
    return Ceilings(moved / _best(lambda: _copied(source, to), timer), rates)
