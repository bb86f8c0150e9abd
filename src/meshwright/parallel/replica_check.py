"""Check that ranks with common parameters (spec/memory/held.py) hold equal copies, by a checksum along every axis.

A rank whose copy differs (a flipped bit, a kernel that rounds otherwise) trains on, and a checkpoint saves the copy of
whichever rank writes. So this check runs before each checkpoint: one pass over the parameters that are held more than
once, and a collective of 16 bytes a parameter for each axis.

Copies whose gradient is one sum over their ranks are equal to the bit. Other copies get the same gradient computed by
each tp rank (norms between the blocks). Those are as equal as the ranks' kernels are: GPUs may choose different ones,
so these copies may be DRIFT apart.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.parallel.engine import Engine
from meshwright.parallel.groups.agree import gather_objects
from meshwright.parallel.groups.group import Group
from meshwright.parallel.zero.data import local
from meshwright.spec.errors import RunError

CHUNK = 2**18
"""Words that are multiplied at a time."""
FACTOR = 6364136223846793005
"""An odd number: multiplied by it, the sum so far loses no chunk."""
DRIFT = 1e-3
"""Allowed difference, relative to the largest element.
Rounding may add up to this over a whole run. A missing update exceeds it in a few steps.
"""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

log = logging.getLogger(__name__)


def checksum(x: Tensor) -> Tensor:
    """Return a checksum () int64 of the bits. Any one changed word changes it: weights are odd, sums wrap."""
    if not x.numel():  # a small parameter may have fewer rows than ranks
        return torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.detach().contiguous().view(-1)
    # Read eight bytes at a time where size and alignment allow it.
    whole = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    words = flat.view(torch.int64 if whole else WORDS[flat.element_size()])
    weights = torch.arange(1, 2 * min(CHUNK, len(words)), 2, device=x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in words.split(CHUNK):
        total = total * FACTOR + (part * weights[: len(part)]).sum()
    return total


def check_replicas(engine: Engine, step: int) -> None:
    """Raise RunError on every rank, with parameter and rank, when a copy differs. Every rank makes this call."""
    world = engine.mesh["world"]
    if world.size == 1:
        return
    engine.reshard()  # shards are what a checkpoint saves
    held = {name: local(parameter.detach()) for name, parameter in engine.parameters.items()}
    sums = {
        name: checksum(held[name]) for name in dict.fromkeys(n for shared, _ in engine.common for n in shared.names)
    }
    device = next(iter(held.values())).device
    differing = []
    for shared, group in engine.common:
        mine = torch.stack([sums[name] for name in shared.names])
        # ~ reverses the order of integers without overflow, so one maximum gives the smallest sum, too.
        largest, smallest = group.all_reduce(torch.stack((mine, ~mine)), "max").unbind()
        differing.append(largest != ~smallest)
    # Copies that tp ranks compute by themselves need not be equal to the bit, so these are compared by value.
    suspects = [
        (
            shared.names,
            group,
            differ if shared.partial or not differ.any() else _find_drift(shared.names, differ, held, group),
        )
        for (shared, group), differ in zip(engine.common, differing, strict=True)
    ]
    # The host waits for one number here. Names are compared only after a failure.
    bad = sum((differ.any().long() for _, _, differ in suspects), torch.zeros((), dtype=torch.int64, device=device))
    if not world.all_reduce(bad, "max").item():
        return
    complaints = [
        _describe_copies(names[int(differ.nonzero()[0])], held, group)
        for names, group, differ in suspects
        if differ.any()
    ]
    sentences = [sentence for rank in gather_objects(complaints, world.process_group) for sentence in rank]
    error = RunError(
        f"step {step}: {sentences[0]}; this checkpoint was not written. "
        "Take resume=auto to go on from the last one, and look at the memory and the kernels of that rank"
    )
    error.reported_elsewhere = world.index > 0
    raise error


def _find_drift(names: Sequence[str], differ: Tensor, held: dict[str, Tensor], group: Group) -> Tensor:
    """Return which of the differing copies (N,) are more than DRIFT apart, or not finite."""
    apart = torch.zeros_like(differ)
    for number in differ.nonzero().flatten().tolist():
        x = held[names[number]].float()
        largest, smallest = group.all_reduce(torch.stack((x, -x)), "max").unbind()
        spread, size = (largest + smallest).max(), torch.maximum(largest, smallest).abs().max()
        apart[number] = ~(spread <= DRIFT * size)  # true for NaN, too
        if not apart[number] and group.index == 0:
            log.warning("copies of %s differ by %.1e of its largest element", names[number], float(spread / size))
    return apart


def _describe_copies(name: str, held: dict[str, Tensor], group: Group) -> str:
    """Describe which ranks of a group hold the wrong copy."""
    mine = torch.stack((checksum(held[name]), torch.isfinite(held[name]).all().long()))
    copies = group.all_gather(mine.unsqueeze(0)).tolist()
    # Numbers that are not finite name the culprit; otherwise the majority is taken to be right.
    broken = [rank for rank, (_, finite) in zip(group.ranks, copies, strict=True) if not finite]
    if broken and len(broken) < group.size:
        return f"{_ranks(broken)} a {name} with numbers that are not finite, and other ranks do not"
    (usual, times), *_ = Counter(total for total, _ in copies).most_common(1)
    others = [rank for rank, (total, _) in zip(group.ranks, copies, strict=True) if total != usual]
    if 2 * times > group.size:
        return f"{_ranks(others)} another {name} than the other {times} ranks that share it"
    return f"{_ranks(group.ranks)} different copies of {name}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
