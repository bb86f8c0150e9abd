"""Collectives between ranks: whether they give the right numbers, which link is slow, which rank is slow.

Links are compared with each other, not with a data sheet: in rounds of stride 1, 2, 4 ... every rank sends to the rank
that many places on, so that each rank has two links a round, and n ranks need log2(n) rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from meshwright.observe.calibrate.rates import settle
from meshwright.observe.doctor.findings import Finding, failure, named_ranks, ok, skipped, warning
from meshwright.parallel.agree import gather_objects
from meshwright.parallel.group import Group

T = TypeVar("T")

SLOW_LINK = 0.5
"""Share of the median of its kind below which a link is slow."""
SLOW_RANK = 0.8
"""Share of the median speed of a product below which a rank is slow."""
MESSAGE_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
ROUNDS = 4


class RankFailure(Exception):
    """What some rank raised in a part of a check that needs no other rank; raised on all of them."""


def everywhere(world: Group, do: Callable[[], T]) -> T:
    """What `do`, which needs no other rank, gives here. RankFailure on all ranks where it raises on any: a rank that
    left the check alone would gather findings while the others wait for it in the check's next collective."""
    made: list[T] = []
    said = ""
    try:
        made.append(do())
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) else None  # without the name of a folder
        said = text or f"{type(error).__name__}: {error}"
    failed = {rank: why for rank, why in enumerate(of_all(world, said)) if why}
    if failed:
        first = next(iter(failed))
        raise RankFailure(f"{named_ranks(list(failed), [0] * world.size)}: {failed[first]}")
    return made[0]


def collectives(world: Group, device: torch.device) -> Finding:
    """Every collective of the engine on known numbers, on every rank."""
    n, mine = world.size, world.index
    if n == 1:
        return skipped("collectives", "one process; torchrun --nproc_per_node 2 -m meshwright doctor tries them")

    def buffers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = torch.full((4,), float(mine + 1), device=device)
        return own, torch.arange(1, n + 1, device=device, dtype=torch.float32), torch.empty_like(own)

    own, every, arrived = everywhere(world, buffers)
    following, previous = (mine + 1) % n, (mine - 1) % n
    for work in world.exchange([(own.clone(), following)], [(arrived, previous)]):
        work.wait()
    found = {
        "all-reduce": (world.all_reduce(own.clone()), every.sum().expand(4)),
        "all-gather": (world.all_gather(own), every.repeat_interleave(4)),
        "reduce-scatter": (world.reduce_scatter(every.clone()), every[mine : mine + 1] * n),
        "all-to-all": (world.all_to_all(own[:1].expand(n).contiguous(), [1] * n, [1] * n), every),
        "send and receive": (arrived, torch.full_like(own, float(previous + 1))),
    }
    wrong = [name for name, (got, right) in found.items() if not torch.equal(got.float().cpu(), right.float().cpu())]
    if wrong:
        return failure(
            "collectives", f"{', '.join(wrong)} gave wrong numbers on rank {mine}",
            "update NCCL or torch; NCCL_DEBUG=WARN shows more. Do not train on this world", wrong=wrong,
        )  # fmt: skip
    return ok("collectives", f"{', '.join(found)} are right on {n} ranks")


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """From one rank to another, with its bytes per second."""

    source: int
    target: int
    bytes_per_s: float


def measured_links(world: Group, device: torch.device) -> list[NetworkLink]:
    """Links of all ranks, by rounds of strides; the same list on every rank."""

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        message = torch.empty(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
        return message, torch.empty_like(message)

    message, arriving = everywhere(world, buffers)
    found: list[NetworkLink] = []
    stride = 1
    while stride < world.size:
        target, source = (world.index + stride) % world.size, (world.index - stride) % world.size
        taken = [_exchange_s(world, message, arriving, target, source, device) for _ in range(ROUNDS + 1)]
        own = torch.tensor([len(message) / min(taken[1:])], dtype=torch.float64, device=device)
        rates = world.all_gather(own).tolist()
        # A rank is done when its message has arrived: the rate is of the link that ends here.
        found += [NetworkLink((n - stride) % world.size, n, rate) for n, rate in enumerate(rates)]
        stride *= 2
    return found


def _exchange_s(
    world: Group, message: torch.Tensor, arriving: torch.Tensor, target: int, source: int, device: torch.device
) -> float:
    world.barrier()
    began = time.perf_counter()
    for work in world.exchange([(message, target)], [(arriving, source)]):
        work.wait()
    settle(device)
    return time.perf_counter() - began


def judged_links(links: Sequence[NetworkLink], nodes: Sequence[int]) -> Finding:
    """Each link beside the others of its kind (within a node, between nodes): the slow ones are named, and a rank all
    of whose links are slow."""
    if not links:
        return skipped("links", "one process has none")
    kinds: dict[str, list[NetworkLink]] = {}
    for link in links:
        kinds.setdefault("within a node" if nodes[link.source] == nodes[link.target] else "between nodes", []).append(
            link
        )
    medians = {kind: statistics.median(link.bytes_per_s for link in some) for kind, some in kinds.items()}
    slow = [
        (link, kind) for kind, some in kinds.items() for link in some if link.bytes_per_s < SLOW_LINK * medians[kind]
    ]
    said = ", ".join(f"{rate / 1e9:.3g} GB/s {kind}" for kind, rate in medians.items())
    if not slow:
        return ok("links", said, medians=medians)
    ranks = {link.source for link, _ in slow} & {link.target for link, _ in slow}
    alone = [r for r in sorted(ranks) if _all_slow(r, links, {(link.source, link.target) for link, _ in slow})]
    figures = {"medians": medians, "slow": [[a.source, a.target, a.bytes_per_s] for a, _ in slow]}
    if alone:
        who = named_ranks(alone, nodes)
        return failure(
            "links", f"all links of {who} are slow (median {said})",
            "look at that GPU's or node's network card, cable and PCIe slot; NCCL_DEBUG=INFO shows the path", **figures,
        )  # fmt: skip
    worst, kind = min(slow, key=lambda one: one[0].bytes_per_s)
    return failure(
        "links",
        f"{named_ranks([worst.source], nodes)} to {named_ranks([worst.target], nodes)} has "
        f"{worst.bytes_per_s / 1e9:.3g} GB/s, others {kind} {medians[kind] / 1e9:.3g}"
        + (f" (and {len(slow) - 1} more links)" if len(slow) > 1 else ""),
        "look at the cable and switch port between them, and at NCCL_IB_HCA and NCCL_SOCKET_IFNAME", **figures,
    )  # fmt: skip


def _all_slow(rank: int, links: Sequence[NetworkLink], slow: set[tuple[int, int]]) -> bool:
    own = [(link.source, link.target) for link in links if rank in (link.source, link.target)]
    return len(set(own)) > 2 and all(pair in slow for pair in own)


def judged_ranks(flop_per_s: Sequence[float], nodes: Sequence[int]) -> Finding:
    """Each rank's products beside the median: every step waits for the slowest."""
    if len(flop_per_s) < 2:
        return skipped("equal ranks", "one process")
    median = statistics.median(flop_per_s)
    slow = [rank for rank, rate in enumerate(flop_per_s) if rate < SLOW_RANK * median]
    if slow:
        worst = min(slow, key=lambda rank: flop_per_s[rank])
        return warning(
            "equal ranks",
            f"{named_ranks(slow, nodes)}: products at {flop_per_s[worst] / median:.0%} of the median of all ranks",
            "look at power, temperature and other programs there: every step waits for the slowest rank",
            flop_per_s=list(flop_per_s),
        )
    return ok("equal ranks", f"slowest {min(flop_per_s) / median:.0%} of the median of {len(flop_per_s)} ranks")


def node_numbers(names: Sequence[str]) -> list[int]:
    """Rank -> number of its node, in the order of the first rank of each."""
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def of_all(world: Group, mine: T) -> list[T]:
    """What each rank says, on every rank."""
    return gather_objects(mine, world.process_group) if world.size > 1 else [mine]
