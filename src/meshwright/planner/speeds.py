"""Seconds of an operation on a device: matrix products by shape, attention cores, passes over memory.

A product runs in tiles, one a processor and wave: the last wave is as long as the others, a short inner dim leaves the
pipeline of a tile half empty, and small products are bound by memory. The ceiling is the best product anybody measured.
"""

from dataclasses import dataclass, replace
from math import ceil

from meshwright.planner.work import Attention, Product, Work
from meshwright.spec.cluster import Device

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.80), (64, 64, 0.6))
"""(rows, columns, share of the ceiling a full wave reaches): the shapes cuBLAS chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a device reaches. Calibration replaces these figures; `speeds_of` has them from data sheets."""

    matmul_flop_per_s: float
    """Best matrix product."""
    peak_flop_per_s: float
    """Data sheet: attention's shares are of it."""
    memory_bytes_per_s: float
    processors: int = 132
    """Streaming multiprocessors, or cores."""
    product_share: float = 0.95
    """Of the best product, in a training run: clocks, power, layouts."""
    inner_half: float = 384.0
    """Inner dim at which a tile reaches half of what a long one does is this; k / (k + inner_half) otherwise."""
    wave_share: float = 0.5
    """1 = a started wave costs a whole one; 0 = tiles are spread without a rest (stream-K)."""
    attention_forward: float = 0.55
    attention_backward: float = 0.45
    memory_share: float = 0.80
    launch_s: float = 2.0e-6
    """Of a kernel on the device, however little it does."""

    def seconds(self, work: Work) -> float:
        """Of one operation, alone on the device."""
        if isinstance(work, Product):
            return self._product(work)
        if isinstance(work, Attention):
            share = self.attention_backward if work.backward else self.attention_forward
            return work.flop / (self.peak_flop_per_s * share) + self.launch_s
        return work.moved_bytes / (self.memory_bytes_per_s * self.memory_share) + work.launches * self.launch_s

    def _product(self, work: Product) -> float:
        m, k, n, batch = work
        rate = self.matmul_flop_per_s * self.product_share
        best = float("inf")
        for rows, columns, share in TILES:
            tiles = ceil(m / rows) * ceil(n / columns) * batch
            waves = tiles / self.processors
            waves = self.wave_share * ceil(waves) + (1 - self.wave_share) * max(waves, 1.0)
            flop = 2.0 * rows * columns * k * self.processors * waves
            best = min(best, flop / (rate * share))
        moved = 2.0 * batch * (m * k + k * n + m * n)
        busy = best * (k + self.inner_half) / k
        return max(busy, moved / (self.memory_bytes_per_s * self.memory_share)) + self.launch_s


ARCHITECTURES = {
    "A100": {"processors": 108, "attention_forward": 0.62, "attention_backward": 0.52},
    "H100": {"processors": 132, "attention_forward": 0.55, "attention_backward": 0.45},
    "H200": {"processors": 132, "attention_forward": 0.55, "attention_backward": 0.45},
    "B200": {"processors": 148, "attention_forward": 0.55, "attention_backward": 0.45},
}


def speeds_of(device: Device, **changes: float) -> Speeds:
    """From a device's figures; unknown ones are guessed from the others."""
    peak = device.bf16_flop_per_s or 1e12
    known = next((v for name, v in ARCHITECTURES.items() if device.name.upper().startswith(name)), {})
    base = Speeds(
        matmul_flop_per_s=device.bf16_matmul_flop_per_s or 0.8 * peak,
        peak_flop_per_s=peak,
        memory_bytes_per_s=device.memory_bytes_per_s or 1e11,
        **known,  # type: ignore[arg-type]
    )
    return replace(base, **changes)  # type: ignore[arg-type]
