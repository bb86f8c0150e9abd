"""Clusters that are tried: each device with a price, parts of one node, and nodes in powers of two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.rent.prices import Price, Prices
from meshwright.spec import presets
from meshwright.spec.layout.cluster import Cluster, Device
from meshwright.spec.rules.legal import divisors

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Node counts that are tried by default."""
NEEDED = ("memory_bytes", "memory_bytes_per_s")
"""Figures of a device that every prediction needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A cluster and its price."""

    price: Price
    devices_per_node: int
    nodes: int

    @property
    def cluster(self) -> Cluster:
        """The cluster, as the planner takes it."""
        device = presets.device(self.price.key)
        return Cluster(device=device, devices_per_node=self.devices_per_node, nodes=self.nodes)

    @property
    def name(self) -> str:
        """Name as `--cluster` takes it: h100x8."""
        return f"{self.price.key}x{self.devices_per_node}"

    @property
    def title(self) -> str:
        """Name for people: 8 H100-SXM-80, or 4 nodes x 8 H100-SXM-80."""
        node = f"{self.devices_per_node} {self.price.device}"
        return f"{self.nodes} nodes x {node}" if self.nodes > 1 else node

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.devices_per_node * self.nodes

    def usd_per_s(self, spares: int = 0) -> float:
        """Return the price of all its nodes, with some spare ones."""
        return self.price.usd_per_hour * self.devices_per_node * (self.nodes + spares) / 3600


def lacks(device: Device) -> str:
    """Return the figures that are needed and not known of a device. Empty = none."""
    missing = [name for name in NEEDED if not getattr(device, name)]
    if not (device.bf16_matmul_flop_per_s or device.bf16_flop_per_s):
        missing.append("bf16_flop_per_s")
    return ", ".join(missing)


def left_out(prices: Prices) -> dict[str, str]:
    """Return {device with a price on which nothing can be predicted: missing figures}."""
    named = {price.device: lacks(presets.device(price.key)) for price in prices.offers}
    return {device: missing for device, missing in named.items() if missing}


def offers_of(name: str, prices: Prices, nodes: Sequence[int]) -> Iterator[Offer]:
    """Yield all clusters of one device, the smallest first.

    Several nodes need a price with a network between them, and a device whose network is known. Several devices of a
    node need its links.
    """
    alone, joined = prices.lowest(name, many=False), prices.lowest(name, many=True)
    if alone is None:
        return
    device = presets.device(alone.key)
    if lacks(device):
        return
    if 1 in nodes:
        for number in divisors(alone.per_node):
            if number == 1 or device.link_bytes_per_s:
                yield Offer(price=alone, devices_per_node=number, nodes=1)
    if joined is None or not (device.network_bytes_per_s and (device.link_bytes_per_s or joined.per_node == 1)):
        return
    for number in sorted(set(nodes) - {1}):
        yield Offer(price=joined, devices_per_node=joined.per_node, nodes=number)
