"""Checks of collectives between ranks: right numbers, slow links, slow ranks.

Links are compared with each other, not with a data sheet. In rounds of stride 1, 2, 4 ... every rank sends to the rank
that many positions on. Each rank so uses two links per round, and n ranks need log2(n) rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from meshwright.observe.rates import synchronize
from meshwright.parallel.groups.group import Group, gather_objects
from meshwright.verbs.doctor.findings import Finding, failure, name_ranks, ok, skipped, warning

T = TypeVar("T")

SLOW_LINK = 0.5
"""Share of the median of its kind below which a link is slow."""
SLOW_RANK = 0.8
"""Share of the median product rate below which a rank is slow."""
MESSAGE_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
ROUNDS = 4


class RankFailure(Exception):
    """An error of some rank in work that needs no other rank, raised on all ranks."""


def run_everywhere(world: Group, work: Callable[[], T]) -> T:
    """Run `work`, which needs no other rank, on every rank. Raises RankFailure on all ranks when it fails on any.

    A rank that left the check alone would gather findings while the others wait in the check's next collective.
    """
    returned: list[T] = []
    message = ""
    try:
        returned.append(work())
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) else None  # without the name of a folder
        message = text or f"{type(error).__name__}: {error}"
    failures = {rank: why for rank, why in enumerate(gather_from_all(world, message)) if why}
    if failures:
        failed_rank = next(iter(failures))
        raise RankFailure(f"{name_ranks(list(failures), [0] * world.size)}: {failures[failed_rank]}")
    return returned[0]


def check_collectives(world: Group, device: torch.device) -> Finding:
    """Check every collective of the engine with known numbers, on every rank."""
    n, mine = world.size, world.index
    if n == 1:
        return skipped("collectives", "one process; torchrun --nproc_per_node 2 -m meshwright doctor tries them")

    def buffers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own_values = torch.full((4,), float(mine + 1), device=device)
        return own_values, torch.arange(1, n + 1, device=device, dtype=torch.float32), torch.empty_like(own_values)

    # Allocations come first: a rank that fails here would leave the others waiting in a collective.
    own_values, every, arrived = run_everywhere(world, buffers)
    following, previous = (mine + 1) % n, (mine - 1) % n
    # Every rank sends and receives at once, so each link of the ring is used.
    for work in world.exchange([(own_values.clone(), following)], [(arrived, previous)]):
        work.wait()
    pairs = {
        "all-reduce": (world.all_reduce(own_values.clone()), every.sum().expand(4)),
        "all-gather": (world.all_gather(own_values), every.repeat_interleave(4)),
        "reduce-scatter": (world.reduce_scatter(every.clone()), every[mine : mine + 1] * n),
        "all-to-all": (world.all_to_all(own_values[:1].expand(n).contiguous(), [1] * n, [1] * n), every),
        "send and receive": (arrived, torch.full_like(own_values, float(previous + 1))),
    }
    # Small whole numbers are exact in every dtype and order of sums, so equality is the right test.
    wrong = [name for name, (got, want) in pairs.items() if not torch.equal(got.float().cpu(), want.float().cpu())]
    if wrong:
        return failure(
            "collectives", f"{', '.join(wrong)} gave wrong numbers on rank {mine}",
            "update NCCL or torch; NCCL_DEBUG=WARN shows more. Do not train on this world", wrong=wrong,
        )  # fmt: skip
    return ok("collectives", f"{', '.join(pairs)} are right on {n} ranks")


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Rate from one rank to another."""

    source: int
    target: int
    bytes_per_s: float


def measure_links(world: Group, device: torch.device) -> list[NetworkLink]:
    """Measure links of all ranks by rounds of strides. Returns the same list on every rank."""

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        message = torch.empty(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
        return message, torch.empty_like(message)

    message, arriving = run_everywhere(world, buffers)
    links: list[NetworkLink] = []
    stride = 1
    while stride < world.size:
        target, source = (world.index + stride) % world.size, (world.index - stride) % world.size
        durations_s = [_exchange_s(world, message, arriving, target, source, device) for _ in range(ROUNDS + 1)]
        # The first exchange opens the connection. The fastest of the others is least disturbed by neighbours.
        own_rate = torch.tensor([len(message) / min(durations_s[1:])], dtype=torch.float64, device=device)
        rates = world.all_gather(own_rate).tolist()
        # A rank is done when its message has arrived: the rate is of the link that ends here.
        links += [NetworkLink((n - stride) % world.size, n, rate) for n, rate in enumerate(rates)]
        stride *= 2
    return links


def _exchange_s(
    world: Group, message: torch.Tensor, arriving: torch.Tensor, target: int, source: int, device: torch.device
) -> float:
    # All ranks begin together, else a late sender counts as a slow link.
    world.barrier()
    began = time.perf_counter()
    for work in world.exchange([(message, target)], [(arriving, source)]):
        work.wait()
    synchronize(device)
    return time.perf_counter() - began


def judge_links(links: Sequence[NetworkLink], nodes: Sequence[int]) -> Finding:
    """Compare each link with the others of its kind (within a node, between nodes).

    The finding names slow links, or a rank all of whose links are slow.
    """
    if not links:
        return skipped("links", "one process has none")
    kinds: dict[str, list[NetworkLink]] = {}
    for link in links:
        kind = "within a node" if nodes[link.source] == nodes[link.target] else "between nodes"
        kinds.setdefault(kind, []).append(link)
    # The median of each kind is the reference: no data sheet knows the cables and switches of a site.
    medians = {kind: statistics.median(link.bytes_per_s for link in of_kind) for kind, of_kind in kinds.items()}
    every = [(link, kind) for kind, of_kind in kinds.items() for link in of_kind]
    slow = [(link, kind) for link, kind in every if link.bytes_per_s < SLOW_LINK * medians[kind]]
    summary = ", ".join(f"{rate / 1e9:.3g} GB/s {kind}" for kind, rate in medians.items())
    if not slow:
        return ok("links", summary, medians=medians)
    # A rank that is slow in both directions with everyone has a fault of its own: name it, not its links.
    ranks = {link.source for link, _ in slow} & {link.target for link, _ in slow}
    alone = [r for r in sorted(ranks) if _all_slow(r, links, {(link.source, link.target) for link, _ in slow})]
    figures = {"medians": medians, "slow": [[a.source, a.target, a.bytes_per_s] for a, _ in slow]}
    if alone:
        ranks_text = name_ranks(alone, nodes)
        return failure(
            "links", f"all links of {ranks_text} are slow (median {summary})",
            "look at that GPU's or node's network card, cable and PCIe slot; NCCL_DEBUG=INFO shows the path", **figures,
        )  # fmt: skip
    worst, kind = min(slow, key=lambda pair: pair[0].bytes_per_s)
    return failure(
        "links",
        f"{name_ranks([worst.source], nodes)} to {name_ranks([worst.target], nodes)} has "
        f"{worst.bytes_per_s / 1e9:.3g} GB/s, others {kind} {medians[kind] / 1e9:.3g}"
        + (f" (and {len(slow) - 1} more links)" if len(slow) > 1 else ""),
        "look at the cable and switch port between them, and at NCCL_IB_HCA and NCCL_SOCKET_IFNAME", **figures,
    )  # fmt: skip


def _all_slow(rank: int, links: Sequence[NetworkLink], slow: set[tuple[int, int]]) -> bool:
    pairs = [(link.source, link.target) for link in links if rank in (link.source, link.target)]
    # With one or two links there is no telling whether the rank or its peer is slow.
    return len(set(pairs)) > 2 and all(pair in slow for pair in pairs)


def judge_ranks(flop_per_s: Sequence[float], nodes: Sequence[int]) -> Finding:
    """Compare each rank's product rate with the median: every step waits for the slowest."""
    if len(flop_per_s) < 2:
        return skipped("equal ranks", "one process")
    median = statistics.median(flop_per_s)
    slow = [rank for rank, rate in enumerate(flop_per_s) if rate < SLOW_RANK * median]
    if slow:
        worst = min(slow, key=lambda rank: flop_per_s[rank])
        return warning(
            "equal ranks",
            f"{name_ranks(slow, nodes)}: products at {flop_per_s[worst] / median:.0%} of the median of all ranks",
            "look at power, temperature and other programs there: every step waits for the slowest rank",
            flop_per_s=list(flop_per_s),
        )
    return ok("equal ranks", f"slowest {min(flop_per_s) / median:.0%} of the median of {len(flop_per_s)} ranks")


def node_numbers(names: Sequence[str]) -> list[int]:
    """Return the node number of each rank, numbered by first appearance."""
    # Numbers stand for host names, which must not leave the cluster in a shared document.
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def gather_from_all(world: Group, mine: T) -> list[T]:
    """Return the contributions of all ranks, on every rank."""
    return gather_objects(mine, world.process_group) if world.size > 1 else [mine]
