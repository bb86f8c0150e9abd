"""Bus bandwidth of three collectives over nodes, published and planned: the table and the picture of a Learn page."""

from dataclasses import replace

from meshwright.planner.cost.exchanges import links_of
from meshwright.spec import presets

SIZE_BYTES = 2**28
"""256 MiB, the size of the published messages."""
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
"""Times that (n-1)/n of the tensor leaves a rank's ring."""
PUBLISHED = {
    "all-reduce": {
        1: (435.97, 422.29, 461.54), 2: (361.75, 302.33, 436.13), 4: (160.14, 44.51, 219.09), 8: (99.56, 41.59, 192.73),
        16: (84.74, 31.34, 188.42), 32: (64.93, 24.96, 194.23), 64: (32.94, 12.49, 177.36),
    },
    "all-gather": {
        1: (249.85, 239.55, 264.93), 2: (184.61, 147.97, 226.27), 4: (118.97, 40.76, 229.41), 8: (69.0, 47.15, 178.48),
        16: (54.97, 24.52, 126.66), 32: (27.97, 12.31, 77.03), 64: (11.04, 6.15, 44.42),
    },
    "reduce-scatter": {
        1: (249.73, 240.8, 264.65), 2: (181.55, 146.1, 226.37), 4: (115.76, 41.18, 215.49), 8: (68.55, 46.8, 177.54),
        16: (54.52, 24.55, 126.48), 32: (27.94, 12.39, 77.29), 64: (11.07, 6.1, 45.13),
    },
}  # fmt: skip
"""Collective -> nodes of 8 H100 -> GB/s: mean, and the ends of the band of 90 % (Ultra-Scale Playbook, plot data of
"Communication bandwidth by number of nodes", 256 MB; read as bus bandwidth)."""


def planned(collective: str, nodes: int) -> float:
    """GB/s that the planner expects of this collective on h100x8."""
    cluster = replace(presets.cluster("h100x8"), nodes=nodes)
    ranks = nodes * cluster.devices_per_node
    seconds = links_of(cluster).seconds(collective, SIZE_BYTES, ranks)
    return SENT[collective] * SIZE_BYTES * (ranks - 1) / ranks / seconds / 1e9


def table(_: str = "") -> str:
    """A row for each number of nodes."""
    head = " | ".join(f"{name}, published | planned" for name in PUBLISHED)
    lines = [f"| nodes | {head} |", "|---|" + "---|" * 2 * len(PUBLISHED)]
    for nodes in PUBLISHED["all-reduce"]:
        cells = [
            f"{rows[nodes][0]:.0f} ({rows[nodes][1]:.0f} to {rows[nodes][2]:.0f}) | {planned(name, nodes):.0f}"
            for name, rows in PUBLISHED.items()
        ]
        lines.append(f"| {nodes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
