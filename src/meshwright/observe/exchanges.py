"""What the collectives of the engine take between ranks of this machine, by size; all groups of a world at once."""

from typing import Any

import torch
import torch.distributed as dist

from meshwright.observe.rates import Case, Effort, seconds_of
from meshwright.parallel.group import Group
from meshwright.planner.curves import Grid


def exchange_grids(effort: Effort, device: torch.device) -> dict[tuple[str, int], Grid]:
    """(collective, ranks of a group) -> seconds by bytes of the whole tensor, on this rank. Neighbours are a group."""
    world = dist.get_world_size()
    sizes = [size for size in (2, 4, 8) if size < world and world % size == 0] + [world]
    found: dict[tuple[str, int], Grid] = {}
    for size in sizes:
        group = _own_group(size, world)
        cases: dict[Any, Case] = {}
        for message in effort.messages:
            cases |= {(name, message): case for name, case in _cases(group, int(message), device).items()}
        took = _in_step(cases, effort, device)
        for name in dict.fromkeys(name for name, _ in cases):
            found[name, size] = Grid((effort.messages,), tuple(took[name, message] for message in effort.messages))
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
    counts = {}
    for name, run in cases.items():
        once = seconds_of({name: _times(run, 2)}, Effort(rounds=1, window_s=0.0), device)[name] / 2
        agreed = torch.tensor(once, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        counts[name] = max(1, min(200, int(effort.window_s / max(1e-6, agreed.item()))))
    single = Effort(rounds=effort.rounds, window_s=0.0)
    took = seconds_of({name: _times(run, counts[name]) for name, run in cases.items()}, single, device)
    return {name: seconds / counts[name] / (2 if name[0] == "send" else 1) for name, seconds in took.items()}


def _times(run: Case, count: int) -> Case:
    def several() -> None:
        for _ in range(count):
            run()

    return several
