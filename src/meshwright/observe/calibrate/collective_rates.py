"""What the collectives of the engine take between ranks of this machine, by size; all groups of a world at once.

Measured as training meets them: each rank computes for a while before each. Ranks then come late, threads of the
library have gone to sleep, and where ranks share cores whoever is waited for may have to wait for its turn. What the
computation takes by itself, on all ranks at once, is taken off.
"""

from typing import Any

import torch
import torch.distributed as dist

from meshwright.observe.calibrate.rates import Case, Effort, seconds_of
from meshwright.parallel.group import Group
from meshwright.planner.kernels.rate_grid import RateGrid

LEAST_S = 2e-5
"""Of an exchange that hides in the noise of the computation before it."""


def exchange_grids(effort: Effort, device: torch.device) -> dict[tuple[str, int], RateGrid]:
    """(collective, ranks of a group) -> seconds by bytes of the whole tensor, on this rank. Neighbours are a group."""
    world = dist.get_world_size()
    sizes = [size for size in (2, 4, 8) if size < world and world % size == 0] + [world]
    found: dict[tuple[str, int], RateGrid] = {}
    for size in sizes:
        group = _own_group(size, world)
        cases: dict[Any, Case] = {}
        for message in effort.messages:
            cases |= {(name, message): case for name, case in _cases(group, int(message), device).items()}
        took = _in_step(cases, effort, device)
        for name in dict.fromkeys(name for name, _ in cases):
            found[name, size] = RateGrid((effort.messages,), tuple(took[name, message] for message in effort.messages))
    return found


def _own_group(size: int, world: int) -> Group:
    own: tuple[int, ...] = ()
    made = None
    for start in range(0, world, size):
        ranks = tuple(range(start, start + size))
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own, made = ranks, group
    return Group("measured", own, own.index(dist.get_rank()), made)


def _cases(group: Group, size_bytes: int, device: torch.device) -> dict[str, Case]:
    """As the engine calls them; the whole tensor has so many bytes."""
    elements = max(group.size, size_bytes // 4 // group.size * group.size)
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // group.size, device=device)
    rows = [elements // group.size] * group.size

    def send() -> None:
        """To the next and from the one before, one after the other round the ring's halves: half a round trip each."""
        other = group.index ^ 1
        if group.index % 2 == 0:
            _wait(group.exchange([(whole, other)], []))
            _wait(group.exchange([], [(whole, other)]))
        else:
            _wait(group.exchange([], [(whole, other)]))
            _wait(group.exchange([(whole, other)], []))

    found: dict[str, Case] = {
        "all-reduce": lambda: group.all_reduce(whole),
        "all-gather": lambda: group.all_gather(part),
        "reduce-scatter": lambda: group.reduce_scatter(whole),
        "all-to-all": lambda: group.all_to_all(whole, rows, rows),
    }
    return found | ({"send": send} if group.size == 2 else {})


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _in_step(cases: dict[Any, Case], effort: Effort, device: torch.device) -> dict[Any, float]:
    """As seconds_of, but every rank makes the same number of calls: a window would end at another call on each."""
    work = _work(effort, device)
    counts = {}
    for name, run in cases.items():
        once = seconds_of({name: _times(run, work, 2)}, Effort(rounds=1, window_s=0.0), device)[name] / 2
        counts[name] = int(max(3, min(200, effort.window_s * 2 / _agreed(once, device))))
    single = Effort(rounds=min(4, effort.rounds), window_s=0.0)
    alone = {("work", count): _times(_nothing, work, count) for count in {max(counts.values())}}
    took = seconds_of(alone | {name: _times(run, work, counts[name]) for name, run in cases.items()}, single, device)
    before = sum(took[key] / key[1] for key in alone)
    found = {}
    for name in cases:
        each = _agreed(max(LEAST_S, took[name] / counts[name] - before), device)
        found[name] = each / (2 if name[0] == "send" else 1)
    return found


def _work(effort: Effort, device: torch.device) -> Case:
    """Products and passes for about effort.between_s of a rank that has a core for itself."""
    if device.type != "cpu" or not effort.between_s:
        return _nothing
    x, weight = torch.randn(128, 256), torch.randn(256, 256)

    def one() -> None:
        y = torch.nn.functional.linear(x, weight)
        for _ in range(4):
            y = y * 0.5

    once = seconds_of({"one": one}, effort, device)["one"]
    count = max(1, round(effort.between_s / _agreed(once, device, dist.ReduceOp.MIN)))

    def several() -> None:
        for _ in range(count):
            one()

    return several


def _agreed(seconds: float, device: torch.device, how: Any = dist.ReduceOp.MAX) -> float:
    """The longest of all ranks."""
    found = torch.tensor(max(1e-6, seconds), device=device)
    dist.all_reduce(found, how)
    return float(found.item())


def _nothing() -> None:
    pass


def _times(run: Case, work: Case, count: int) -> Case:
    def several() -> None:
        for _ in range(count):
            work()
            run()

    return several
