"""Formulas of kernels, fitted to measurements: constants, curves that correct them, and the figures of each chip.

`data/DEVICE.json` holds constants and curves for each operation. A curve is a grid of positive factors over the
logarithms of a shape; it multiplies the formula. benchmarks/kernel_times.py writes the files. A device without a file
uses the constants and curves of a stand-in of its generation, with its own peaks, bandwidths, processors and cache. Its
latencies last as many cycles.

Device presets hold peaks and bandwidths. Processors, clocks and caches stand here. They are from NVIDIA's and AMD's
data sheets (hardware.csv of stas00/ml-engineering for most; clocks are the highest boost clocks, recalled).
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from math import exp, log
from typing import Any, NamedTuple

from meshwright.spec.layout.cluster import Device

Axis = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RateGrid:
    """Positive values at every combination of points on one or more increasing axes. The last axis runs fastest."""

    axes: tuple[Axis, ...]
    values: tuple[float, ...]

    def at(self, *where: float) -> float:
        """Interpolate linearly in the logarithms of coordinates and values. Outside, take the nearest edge."""
        sides = [_between(axis, x) for axis, x in zip(self.axes, where, strict=True)]
        logarithm = 0.0
        for corner in product(*sides):
            index, weight = 0, 1.0
            for axis, (point, share) in zip(self.axes, corner, strict=True):
                index, weight = index * len(axis) + point, weight * share
            logarithm += weight * log(self.values[index])
        return exp(logarithm)


def _between(axis: Axis, x: float) -> tuple[tuple[int, float], ...]:
    """Return the neighbouring points of a coordinate, each with its share."""
    if x <= axis[0]:
        return ((0, 1.0),)
    if x >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_right(axis, x)
    low, high = axis[above - 1], axis[above]
    share = log(x / low) / log(high / low)
    return (above - 1, 1 - share), (above, share)


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


FLAT = RateGrid((), (1.0,))
"""A curve that changes nothing."""


class Kernel(NamedTuple):
    """One operation on one device."""

    chip: Chip
    figures: Mapping[str, float]
    curve: RateGrid = FLAT


def kernel_of(device: Device, operation: str) -> Kernel:
    """Return a kernel. `operation`: product.bf16, product.fp8, prefill, decode, experts, collective."""
    return _kernel(device, operation)


@cache
def _kernel(device: Device, operation: str) -> Kernel:
    chip, name = chip_of(device), device.name if _known(device.name) else silicon_of(device).stand_in
    fit = _file(name).get(operation) or _file(_nearest(name, operation))[operation]
    slower = silicon_of(Device(name=fit["device"])).clock_ghz / chip.clock_ghz
    values = tuple(exp(number / 1000) for row in fit["per_mille"] for number in row)
    curve = RateGrid(tuple(tuple(map(float, axis)) for axis in fit["axes"]), values)
    return Kernel(chip, adapted(fit["figures"], slower), curve)


def adapted(figures: Mapping[str, float], slower: float) -> dict[str, float]:
    """Adapt the constants of one chip to another whose cycle is longer: times count cycles, `feed` bytes per cycle."""
    return {
        name: figure * slower if name.endswith("_us") else figure / slower if name == "feed" else figure
        for name, figure in figures.items()
    }


STAND_INS = ("H100-SXM-80", "GB200", "H200-SXM", "B200-SXM", "A100-SXM-80")


def _nearest(name: str, operation: str) -> str:
    """Return the device to use when a device's file lacks an operation: the next of its generation, then any."""
    near = {"H200-SXM": "H100-SXM-80", "B200-SXM": "GB200", "GB200": "B200-SXM"}.get(name, "")
    return next(device for device in (near, *STAND_INS) if device and operation in _file(device))


def _known(name: str) -> bool:
    return files(__package__).joinpath("data", f"{name}.json").is_file()


@cache
def _file(name: str) -> dict[str, Any]:
    text = files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    operations: dict[str, Any] = json.loads(text)["operations"]
    return {operation: {"device": name, **fit} for operation, fit in operations.items()}
