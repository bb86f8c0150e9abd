"""Whether ranks that must hold equal parameters do: a checksum of each, compared along every axis (spec.held.common).

A rank whose copy went another way (a flipped bit, a kernel that rounds otherwise) trains on, and what is saved is the
copy of whoever writes. Checked before each checkpoint: one pass over the parameters that are held more than once, and
a collective of 16 bytes a parameter for each axis.

Copies whose gradient is one sum over their ranks are equal to the bit. Those of which each tp rank makes the same
gradient by itself (norms between the blocks) are equal as far as its kernels are: GPUs may choose different ones, so
these copies may be DRIFT apart.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.parallel.agree import gather_objects
from meshwright.parallel.data import local
from meshwright.parallel.engine import Engine
from meshwright.parallel.group import Group
from meshwright.spec.errors import RunError

CHUNK = 2**18
"""Words that are multiplied at a time."""
FACTOR = 6364136223846793005
"""Odd, so that no chunk is lost when the sum so far is multiplied by it."""
DRIFT = 1e-3
"""Of the largest element: what rounding may do to a copy over a whole run. A missing update is more in a few steps."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

log = logging.getLogger(__name__)


def checksum(x: Tensor) -> Tensor:
    """() int64 of the bits and their places, on the device of x. Any change of one word changes it: weights are odd,
    and sums wrap around."""
    if not x.numel():  # ranks beyond the rows of a small parameter hold none of it
        return torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.detach().contiguous().view(-1)
    whole = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    words = flat.view(torch.int64 if whole else WORDS[flat.element_size()])
    weights = torch.arange(1, 2 * min(CHUNK, len(words)), 2, device=x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in words.split(CHUNK):
        total = total * FACTOR + (part * weights[: len(part)]).sum()
    return total


def check_replicas(engine: Engine, step: int) -> None:
    """RunError on every rank, with parameter and rank, where a copy differs. Every rank calls this at one place."""
    world = engine.mesh["world"]
    if world.size == 1:
        return
    engine.reshard()  # what is saved are the shards
    held = {name: local(parameter.detach()) for name, parameter in engine.parameters.items()}
    sums = {name: checksum(held[name]) for name in dict.fromkeys(n for one, _ in engine.common for n in one.names)}
    device = next(iter(held.values())).device
    differing = [_differing(torch.stack([sums[n] for n in one.names]), group) for one, group in engine.common]
    found = [
        (one.names, group, differ if one.partial or not differ.any() else _apart(one.names, differ, held, group))
        for (one, group), differ in zip(engine.common, differing, strict=True)
    ]
    bad = sum((differ.any().long() for _, _, differ in found), torch.zeros((), dtype=torch.int64, device=device))
    if not world.all_reduce(bad, "max").item():
        return
    mine = [_who(names[int(differ.nonzero()[0])], held, group) for names, group, differ in found if differ.any()]
    sentences = [sentence for rank in gather_objects(mine, world.process_group) for sentence in rank]
    error = RunError(
        f"step {step}: {sentences[0]}; this checkpoint was not written. "
        "Take resume=auto to go on from the last one, and look at the memory and the kernels of that rank"
    )
    error.said_elsewhere = world.index > 0
    raise error


def _differing(sums: Tensor, group: Group) -> Tensor:
    """sums (N,) of each rank -> (N,) whether they differ: ~ turns the order of integers around without overflow."""
    both = group.all_reduce(torch.stack((sums, ~sums)), "max")
    return both[0] != ~both[1]


def _apart(names: Sequence[str], differ: Tensor, held: dict[str, Tensor], group: Group) -> Tensor:
    """Of copies that need not be equal to the bit (N,) those that are more than DRIFT apart, or not finite."""
    result = torch.zeros_like(differ)
    for place in differ.nonzero().flatten().tolist():
        x = held[names[place]].float()
        largest, smallest = group.all_reduce(torch.stack((x, -x)), "max").unbind()
        spread, size = (largest + smallest).max(), torch.maximum(largest, smallest).abs().max()
        result[place] = ~(spread <= DRIFT * size)  # also where it is not a number
        if not result[place] and group.index == 0:
            log.warning("copies of %s differ by %.1e of its largest element", names[place], float(spread / size))
    return result


def _who(name: str, held: dict[str, Tensor], group: Group) -> str:
    """Of the ranks of a group that hold different copies, the one to look at."""
    own = torch.stack((checksum(held[name]), torch.isfinite(held[name]).all().long()))
    copies = group.all_gather(own.unsqueeze(0)).tolist()
    broken = [rank for rank, (_, finite) in zip(group.ranks, copies, strict=True) if not finite]
    if broken and len(broken) < group.size:
        return f"{_ranks(broken)} {_holds(broken)} a {name} with numbers that are not finite, and other ranks do not"
    (usual, times), *_ = Counter(value for value, _ in copies).most_common(1)
    others = [rank for rank, (value, _) in zip(group.ranks, copies, strict=True) if value != usual]
    if 2 * times > group.size:
        return f"{_ranks(others)} {_holds(others)} another {name} than the other {times} ranks that share it"
    return f"{_ranks(group.ranks)} hold different copies of {name}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _holds(ranks: Sequence[int]) -> str:
    return "holds" if len(ranks) == 1 else "hold"
