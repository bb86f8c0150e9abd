"""Figures of a chip that decide the time of a kernel: processors, clock, cache, peaks.

Device presets hold peaks and bandwidths. The counts below are from NVIDIA's and AMD's data sheets (hardware.csv of
stas00/ml-engineering for most; clocks are the highest boost clocks, recalled).
"""

from typing import NamedTuple

from meshwright.spec.layout.cluster import Device

REACHED, LOW_REACHED = 0.8, 0.72
"""Best measured product over the data sheet's peak, bf16 and fp8, for devices without a measurement.
Measured: 0.73 (GB200) to 0.87 (A100); 0.71 (H100) to 0.76 (B200).
"""


class Chip(NamedTuple):
    """One device. Rates are per microsecond, as kernels are short."""

    processors: int
    """Streaming multiprocessors."""
    clock_ghz: float
    cache_bytes: float
    """Bytes of the last cache level."""
    peak: float
    """bf16 FLOP per microsecond of the data sheet."""
    best: float
    """FLOP per microsecond of the best measured bf16 product."""
    low_best: float
    """FLOP per microsecond of the best measured fp8 product. Without fp8: `best`."""
    memory: float
    """Bytes per microsecond."""
    link: float
    """Bytes per microsecond to the neighbours in a node, one direction."""


class Silicon(NamedTuple):
    """Figures of a chip that no preset holds."""

    processors: int
    clock_ghz: float
    cache_mb: float
    stand_in: str
    """Measured device whose curves and constants serve a device without its own."""


KNOWN: dict[str, Silicon] = {
    "A100": Silicon(108, 1.41, 40, "A100-SXM-80"),
    "H100-PCIe": Silicon(114, 1.755, 50, "H100-SXM-80"),
    "H100": Silicon(132, 1.98, 50, "H100-SXM-80"),
    "H200": Silicon(132, 1.98, 50, "H200-SXM"),
    "H800": Silicon(132, 1.98, 50, "H100-SXM-80"),
    "H20": Silicon(78, 1.98, 60, "H200-SXM"),
    "GH200": Silicon(132, 1.98, 50, "H200-SXM"),
    "B200": Silicon(148, 1.965, 126, "B200-SXM"),
    "B300": Silicon(148, 1.92, 126, "B200-SXM"),
    "GB200": Silicon(152, 2.062, 126, "GB200"),
    "GB300": Silicon(152, 1.92, 126, "GB200"),
    "L40S": Silicon(142, 2.52, 96, "A100-SXM-80"),
    "L40": Silicon(142, 2.49, 96, "A100-SXM-80"),
    "L4": Silicon(58, 2.04, 48, "A100-SXM-80"),
    "V100": Silicon(80, 1.53, 6, "A100-SXM-80"),
    "T4": Silicon(40, 1.59, 4, "A100-SXM-80"),
    "A10": Silicon(72, 1.695, 6, "A100-SXM-80"),
    "A10G": Silicon(80, 1.71, 6, "A100-SXM-80"),
    "RTX-3090": Silicon(82, 1.695, 6, "A100-SXM-80"),
    "RTX-A6000": Silicon(84, 1.8, 6, "A100-SXM-80"),
    "RTX-6000-Ada": Silicon(142, 2.505, 96, "A100-SXM-80"),
    "RTX-4090": Silicon(128, 2.52, 72, "A100-SXM-80"),
    "RTX-5090": Silicon(170, 2.41, 96, "A100-SXM-80"),
    "MI250X": Silicon(110, 1.7, 8, "A100-SXM-80"),
    "MI355X": Silicon(256, 2.4, 256, "H200-SXM"),
    "MI": Silicon(304, 2.1, 256, "H200-SXM"),
}
"""Beginning of a device's name -> its silicon. The longest match counts."""
UNKNOWN = Silicon(132, 1.98, 50, "H100-SXM-80")
"""Silicon of a device that no line above names."""


def silicon_of(device: Device) -> Silicon:
    """Return the silicon of a device by the beginning of its name."""
    name = device.name.upper()
    fits = [known for known in KNOWN if name.startswith(known.upper())]
    return KNOWN[max(fits, key=len)] if fits else UNKNOWN


def chip_of(device: Device) -> Chip:
    """Return a chip from a preset's figures. Unknown ones are guessed from the others."""
    silicon = silicon_of(device)
    peak = device.half_flop_per_s or 1e12
    best = device.half_matmul_flop_per_s or REACHED * peak
    memory = device.memory_bytes_per_s or 1e11
    return Chip(
        processors=silicon.processors,
        clock_ghz=silicon.clock_ghz,
        cache_bytes=silicon.cache_mb * 1e6,
        peak=peak / 1e6,
        best=best / 1e6,
        low_best=(device.fp8_matmul_flop_per_s or LOW_REACHED * device.fp8_flop_per_s or best) / 1e6,
        memory=memory / 1e6,
        link=(device.link_bytes_per_s or memory / 10) / 1e6,
    )
