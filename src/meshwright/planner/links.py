"""Seconds of an exchange between ranks: latency by ring steps, bandwidth by span.

A group's ring runs over the fast links inside a node and, where it spans nodes, over as many network cards as the group
has ranks in a node. Sources: NCCL's tuner (latencies); nccl-tests of A100, H100, H200, B200 nodes (bandwidths).
"""

from dataclasses import dataclass
from math import log2

from meshwright.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the links of a cluster reach."""

    per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    link_share: float = 0.78
    """Bus bandwidth a ring reaches with large messages, of the datasheet's one-direction figure."""
    network_share: float = 0.75
    base_s: float = 3.0e-5
    """Of any collective."""
    link_step_s: float = 4.0e-6
    """Of a step of the ring inside a node."""
    network_step_s: float = 1.4e-5
    """Of a step between nodes."""
    crowding: float = 0.0
    """Loss of bandwidth for each doubling of nodes beyond one."""

    def seconds(self, collective: str, size_bytes: float, ranks: int, stride: int = 1) -> float:
        """Of one collective over `ranks` ranks that lie `stride` ranks apart; `size_bytes` as in work.Exchange."""
        if ranks <= 1 or not size_bytes:
            return 0.0
        inside = max(1, min(ranks, self.per_node // stride)) if stride < self.per_node else 1
        nodes = -(-ranks // inside)
        rounds = 2 if collective == "all-reduce" else 1
        bandwidth = self.bandwidth(inside, nodes)
        steps = (inside - 1) * self.link_step_s + (log2(nodes) if nodes > 1 else 0.0) * self.network_step_s
        if collective == "all-to-all" and nodes > 1:
            bandwidth = self.network_bytes_per_s * self.network_share
        moved = size_bytes * (ranks - 1) / ranks
        return self.base_s + rounds * (steps + moved / bandwidth)

    def bandwidth(self, inside: int, nodes: int) -> float:
        """Bytes a second of a rank's ring: the network's cards together, at most the links."""
        link = self.link_bytes_per_s * self.link_share
        if nodes == 1:
            return link
        network = inside * self.network_bytes_per_s * self.network_share
        return min(link, network) / (1 + self.crowding * log2(nodes))

    def send_seconds(self, size_bytes: float, stride: int) -> float:
        """Of one transfer to a rank `stride` away."""
        near = stride < self.per_node
        rate = self.link_bytes_per_s * self.link_share if near else self.network_bytes_per_s * self.network_share
        return self.base_s / 2 + size_bytes / rate


def links_of(cluster: Cluster, **changes: float) -> Links:
    """From a cluster's figures."""
    device = cluster.device
    link = device.link_bytes_per_s or device.memory_bytes_per_s / 10 or 1e10
    return Links(
        per_node=cluster.devices_per_node,
        link_bytes_per_s=link,
        network_bytes_per_s=device.network_bytes_per_s or link / 10,
        **changes,  # type: ignore[arg-type]
    )
