"""Fits to measured kernels, as package data: constants of the formulas, and curves that correct them.

`data/DEVICE.json` holds both for each operation. A curve is a grid of factors over the logarithms of a shape; it
multiplies the formula. benchmarks/kernel_times.py writes the files. A device without a file uses the constants and
curves of a stand-in of its generation, with its own peaks, bandwidths, processors and cache. Its latencies last as many
cycles.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import exp
from typing import Any, NamedTuple

from meshwright.planner.kernels.chips import Chip, chip_of, silicon_of
from meshwright.planner.kernels.rate_grid import RateGrid
from meshwright.spec.layout.cluster import Device

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
