"""Cluster: what the plan runs on. Peaks and measured ceilings stand side by side; every number carries its source."""

from dataclasses import dataclass

from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One chip. Zero = not known; nothing is derived from an unknown number."""

    name: str
    memory_bytes: int = 0
    bf16_flop_per_s: float = 0.0
    """Datasheet, dense."""
    bf16_matmul_flop_per_s: float = 0.0
    """Best measured matrix product."""
    fp8_flop_per_s: float = 0.0
    fp8_matmul_flop_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    """To neighbours in the same node, one direction."""
    network_bytes_per_s: float = 0.0
    """To other nodes, per device, one direction."""
    source: str = ""
    certainty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices."""

    device: Device = Device(name="local")
    devices_per_node: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise PlanError(
                f"cluster.devices_per_node={self.devices_per_node} and cluster.nodes={self.nodes} must be at least 1"
            )

    @property
    def devices(self) -> int:
        """Number of chips."""
        return self.devices_per_node * self.nodes
