"""The memories that a chosen device can reach, from the fastest to the slowest: bytes, bytes per second, time of 1 MB.

Sizes and rates are those of the package's presets, and of its table of silicon (planner/kernels/fitted_kernel.py). Two
figures are added here, from NVIDIA's CUDA C++ Programming Guide (technical specifications by compute capability): the
SRAM of a processor, shared memory and L1 together, and the 128 bytes that it delivers per clock.
"""

from typing import Any

from meshwright.planner.kernels.fitted_kernel import silicon_of
from meshwright.spec import presets

TITLE = "The memories of a device"
SRAM_KIB = {"v100": 128, "a100": 192, "h100": 256, "h200": 256, "b200": 256}
"""Device -> KiB of shared memory and L1 in one processor."""
SRAM_BYTES_PER_CLOCK = 128
"""Bytes per clock of the 32 banks of a processor."""
MOVED = 1e6
"""Bytes of the example."""


def levels(name: str) -> list[dict[str, Any]]:
    """Each memory with its bytes and bytes per second. None = the presets do not say."""
    device = presets.device(name)
    silicon = silicon_of(device)
    rows = [
        ("SRAM, all processors", silicon.processors * SRAM_KIB[name] * 1024,
         silicon.processors * SRAM_BYTES_PER_CLOCK * silicon.clock_ghz * 1e9),
        ("L2 cache", silicon.cache_mb * 1e6, None),
        ("HBM, its own memory", device.memory_bytes, device.memory_bytes_per_s),
        ("a neighbour in the node", None, device.link_bytes_per_s or None),
        ("host memory", None, device.host_bytes_per_s or None),
        ("another node", None, device.network_bytes_per_s or None),
    ]  # fmt: skip
    return [
        {"name": level, "bytes": size, "rate": rate, "microseconds": rate and 1e6 * MOVED / rate}
        for level, size, rate in rows
    ]


def data() -> dict[str, Any]:
    """Device -> its title, and its memories."""
    return {name: {"title": presets.device(name).name, "levels": levels(name)} for name in SRAM_KIB}
