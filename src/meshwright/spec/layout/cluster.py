"""Cluster: the hardware of a plan, or the name of a file that describes it.

Peaks and measured ceilings stand side by side, each with its source.
"""

import math
from dataclasses import dataclass

from meshwright.spec.errors import ArgumentError, PlanError

CORES = " cores"
"""Suffix that `calibrate` gives to the name of a machine's own processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One chip. 0 = unknown: nothing is derived from an unknown number."""

    name: str
    """Name in reports."""
    memory_bytes: int = 0
    """Memory of the chip. The driver takes a part of it."""
    bf16_flop_per_s: float = 0.0
    """Data sheet peak of dense bf16 products."""
    bf16_matmul_flop_per_s: float = 0.0
    """Best measured bf16 matrix product."""
    fp16_flop_per_s: float = 0.0
    """Data sheet peak of dense fp16 products, for devices without bf16 (before Ampere). Elsewhere it equals that of
    bf16."""
    fp16_matmul_flop_per_s: float = 0.0
    """Best measured fp16 matrix product."""
    fp8_flop_per_s: float = 0.0
    """Data sheet peak of dense fp8 products."""
    fp8_matmul_flop_per_s: float = 0.0
    """Best measured fp8 matrix product."""
    memory_bytes_per_s: float = 0.0
    """Bandwidth of its own memory, reading or writing."""
    link_bytes_per_s: float = 0.0
    """Bandwidth to neighbours in the same node, one direction."""
    network_bytes_per_s: float = 0.0
    """Bandwidth to other nodes, per device, one direction."""
    host_bytes_per_s: float = 0.0
    """Bandwidth to or from the memory of its host, one direction."""
    watts: float = 0.0
    """Data sheet maximum of the board power, without a share of the host."""
    watts_source: str = ""
    """Source of the power figure."""
    source: str = ""
    """Source of the other figures."""
    certainty: str = ""
    """Origin of the figures: read from the source, recalled or measured."""
    plan_only: str = ""
    """Reason why the engine cannot run on it, without a final period. Empty = it can."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            number = getattr(self, field)
            if not isinstance(number, str) and not 0 <= number < math.inf:
                raise PlanError(f"cluster.device.{field}={number} must be a number of 0 (not known) or more")

    @property
    def half_flop_per_s(self) -> float:
        """Data sheet peak of dense 16-bit products: bf16, or fp16 on devices without bf16."""
        return self.bf16_flop_per_s or self.fp16_flop_per_s

    @property
    def half_matmul_flop_per_s(self) -> float:
        """Best measured 16-bit matrix product: bf16, or fp16 on devices without bf16."""
        return self.bf16_matmul_flop_per_s if self.bf16_flop_per_s else self.fp16_matmul_flop_per_s

    @property
    def is_gpu(self) -> bool:
        """Device runs GPU kernels: its peak is known, and it is not a processor measured by `calibrate`."""
        return self.half_flop_per_s > 0 and not self.name.endswith(CORES)

    @property
    def runs_triton(self) -> bool:
        """Device runs this package's Triton kernels: NVIDIA from Ampere on, the first generation with bf16.

        This repeats for a plan the decision of kernels/chooser.py at run time. AMD's names share a prefix.
        """
        return self.is_gpu and self.bf16_flop_per_s > 0 and not self.name.startswith(("MI", "AMD"))

    def without(self, precision: str) -> str:
        """Return why products of this recipe.precision are not planned on the device. Empty = they are."""
        if precision != "bf16" or self.bf16_flop_per_s or not self.fp16_flop_per_s:
            return ""
        return (
            f"recipe.precision=bf16: a {self.name} has no bf16 products; take recipe.precision=fp16 or another device"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices."""

    device: Device = Device(name="local")
    """Name of a known device, or its figures."""
    devices_per_node: int = 1
    """Devices per host."""
    nodes: int = 1
    """Hosts."""

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise PlanError(
                f"cluster.devices_per_node={self.devices_per_node} and cluster.nodes={self.nodes} must be at least 1"
            )

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.devices_per_node * self.nodes


def names_file(name: str) -> bool:
    """Return whether `cluster` names a file: FILE.toml, or FILE.tomlxN with N devices in a node."""
    return split_file(name)[0].endswith(".toml")


def split_file(name: str) -> tuple[str, int]:
    """Return (FILE.toml, N) of FILE.tomlxN. N is 0 where the name has none."""
    path, x, number = name.rpartition("x")
    if x and path.endswith(".toml") and number.isdecimal() and 0 < int(number) < 10**6:
        return path, int(number)
    if x and path.endswith(".toml"):
        raise ArgumentError("cluster", name, remedy=f"{number or 'nothing'} devices in a node cannot be; as {path}x8")
    return name, 0
