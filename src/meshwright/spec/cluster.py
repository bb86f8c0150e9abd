"""Cluster: what the plan runs on. Peaks and measured ceilings stand side by side; every number carries its source."""

import math
from dataclasses import dataclass

from meshwright.spec.errors import PlanError

CORES = " cores"
"""How the name of a machine's own processor ends, as `calibrate` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One chip. Zero = not known; nothing is derived from an unknown number."""

    name: str
    """What reports call it."""
    memory_bytes: int = 0
    """Of the chips; what a program can have is less by what the driver keeps."""
    bf16_flop_per_s: float = 0.0
    """Datasheet, dense."""
    bf16_matmul_flop_per_s: float = 0.0
    """Best measured matrix product."""
    fp16_flop_per_s: float = 0.0
    """Datasheet, dense, of a device without bf16 products (before Ampere); elsewhere it is that of bf16."""
    fp16_matmul_flop_per_s: float = 0.0
    """Best measured matrix product."""
    fp8_flop_per_s: float = 0.0
    """Datasheet, dense."""
    fp8_matmul_flop_per_s: float = 0.0
    """Best measured matrix product."""
    memory_bytes_per_s: float = 0.0
    """Reading or writing its own memory."""
    link_bytes_per_s: float = 0.0
    """To neighbours in the same node, one direction."""
    network_bytes_per_s: float = 0.0
    """To other nodes, per device, one direction."""
    host_bytes_per_s: float = 0.0
    """To or from the memory of its host, one direction."""
    watts: float = 0.0
    """Datasheet: the most that the board draws, without its host's part."""
    watts_source: str = ""
    """Where that stands."""
    source: str = ""
    """Where the numbers stand."""
    certainty: str = ""
    """Which of them were read there, recalled or measured."""
    plan_only: str = ""
    """Why no run of the engine can be on it, as a sentence without its end; empty where one can."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            value = getattr(self, field)
            if not isinstance(value, str) and not 0 <= value < math.inf:
                raise PlanError(f"cluster.device.{field}={value} must be a number of 0 (not known) or more")

    @property
    def half_flop_per_s(self) -> float:
        """Datasheet, dense, of 16-bit products: bf16, or fp16 where it has no others."""
        return self.bf16_flop_per_s or self.fp16_flop_per_s

    @property
    def half_matmul_flop_per_s(self) -> float:
        """The same of the best product that was measured."""
        return self.bf16_matmul_flop_per_s if self.bf16_flop_per_s else self.fp16_matmul_flop_per_s

    @property
    def is_gpu(self) -> bool:
        """Whether a program on it runs a GPU's kernels: its peak is known, and `calibrate` did not measure it as the
        cores of a machine. Planner and dry run ask here."""
        return self.half_flop_per_s > 0 and not self.name.endswith(CORES)

    @property
    def runs_triton(self) -> bool:
        """Whether the kernels of this package run on it, as kernels/chooser.py finds out there: on NVIDIA's from Ampere
        on, the first with bf16. Names of AMD's begin alike."""
        return self.is_gpu and self.bf16_flop_per_s > 0 and not self.name.startswith(("MI", "AMD"))

    def without(self, precision: str) -> str:
        """Why products of this recipe.precision are not planned on it; empty where they are."""
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
    """Chips of one host."""
    nodes: int = 1
    """Hosts."""

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise PlanError(
                f"cluster.devices_per_node={self.devices_per_node} and cluster.nodes={self.nodes} must be at least 1"
            )

    @property
    def devices(self) -> int:
        """Number of chips."""
        return self.devices_per_node * self.nodes
