"""Times of the engine's collectives between ranks of this machine, by size; all groups of a world at once.

They are measured as training meets them: each rank computes for a while before each. Ranks then come late, threads of
the library have gone to sleep, and ranks that share cores may have to wait for their turn. The time of the computation
alone, on all ranks at once, is subtracted.
"""

from typing import Any

import torch
import torch.distributed as dist

from meshwright.observe.calibrate.rates import Case, Effort, seconds_of
from meshwright.parallel.group import Group
from meshwright.planner.kernels.rate_grid import RateGrid

LEAST_S = 2e-5
"""Least time of an exchange that hides in the noise of the computation before it."""


def exchange_grids(effort: Effort, device: torch.device) -> dict[tuple[str, int], RateGrid]:
    """Return (collective, ranks of a group) -> seconds by bytes of the whole tensor. Neighbours form a group."""
    world = dist.get_world_size()
    sizes = [size for size in (2, 4, 8) if size < world and world % size == 0] + [world]
    grids: dict[tuple[str, int], RateGrid] = {}
    for size in sizes:
        group = _group_of_this_rank(size, world)
        cases: dict[Any, Case] = {}
        for message in effort.messages:
            cases |= {(name, message): case for name, case in _collective_cases(group, int(message), device).items()}
        took = _measure_in_step(cases, effort, device)
        for name in dict.fromkeys(name for name, _ in cases):
            grids[name, size] = RateGrid((effort.messages,), tuple(took[name, message] for message in effort.messages))
    return grids


def _group_of_this_rank(size: int, world: int) -> Group:
    ranks_here: tuple[int, ...] = ()
    group_here = None
    for start in range(0, world, size):
        ranks = tuple(range(start, start + size))
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            ranks_here, group_here = ranks, group
    return Group("measured", ranks_here, ranks_here.index(dist.get_rank()), group_here)


def _collective_cases(group: Group, size_bytes: int, device: torch.device) -> dict[str, Case]:
    """Return the collectives as the engine calls them, on a whole tensor of `size_bytes`."""
    elements = max(group.size, size_bytes // 4 // group.size * group.size)
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // group.size, device=device)
    rows = [elements // group.size] * group.size

    def send() -> None:
        """Exchange with the neighbour in both directions, one after the other: half a round trip each."""
        other = group.index ^ 1
        if group.index % 2 == 0:
            _wait(group.exchange([(whole, other)], []))
            _wait(group.exchange([], [(whole, other)]))
        else:
            _wait(group.exchange([], [(whole, other)]))
            _wait(group.exchange([(whole, other)], []))

    cases: dict[str, Case] = {
        "all-reduce": lambda: group.all_reduce(whole),
        "all-gather": lambda: group.all_gather(part),
        "reduce-scatter": lambda: group.reduce_scatter(whole),
        "all-to-all": lambda: group.all_to_all(whole, rows, rows),
    }
    return cases | ({"send": send} if group.size == 2 else {})


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _measure_in_step(cases: dict[Any, Case], effort: Effort, device: torch.device) -> dict[Any, float]:
    """Measure like seconds_of, but with equal calls on all ranks: a window would end at a different call on each."""
    work = _computation(effort, device)
    counts = {}
    for name, run in cases.items():
        once = seconds_of({name: _repeat(run, work, 2)}, Effort(rounds=1, window_s=0.0), device)[name] / 2
        counts[name] = int(max(3, min(200, effort.window_s * 2 / _agree(once, device))))
    single = Effort(rounds=min(4, effort.rounds), window_s=0.0)
    alone = {("work", count): _repeat(_nothing, work, count) for count in {max(counts.values())}}
    took = seconds_of(alone | {name: _repeat(run, work, counts[name]) for name, run in cases.items()}, single, device)
    before = sum(took[key] / key[1] for key in alone)
    seconds = {}
    for name in cases:
        each = _agree(max(LEAST_S, took[name] / counts[name] - before), device)
        seconds[name] = each / (2 if name[0] == "send" else 1)
    return seconds


def _computation(effort: Effort, device: torch.device) -> Case:
    """Return products and passes that take about effort.between_s on a rank with its own core."""
    if device.type != "cpu" or not effort.between_s:
        return _nothing
    x, weight = torch.randn(128, 256), torch.randn(256, 256)

    def unit() -> None:
        y = torch.nn.functional.linear(x, weight)
        for _ in range(4):
            y = y * 0.5

    once = seconds_of({"unit": unit}, effort, device)["unit"]
    count = max(1, round(effort.between_s / _agree(once, device, dist.ReduceOp.MIN)))

    def several() -> None:
        for _ in range(count):
            unit()

    return several


def _agree(seconds: float, device: torch.device, how: Any = dist.ReduceOp.MAX) -> float:
    """Return the longest time of all ranks."""
    agreed = torch.tensor(max(1e-6, seconds), device=device)
    dist.all_reduce(agreed, how)
    return float(agreed.item())


def _nothing() -> None:
    pass


def _repeat(run: Case, work: Case, count: int) -> Case:
    def several() -> None:
        for _ in range(count):
            work()
            run()

    return several
