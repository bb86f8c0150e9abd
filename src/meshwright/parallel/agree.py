"""What one rank does for all, so that what fails on one ends all with the same sentence and none waits for it."""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.parallel.group import Group
from meshwright.spec.errors import MeshwrightError

T = TypeVar("T")


class RankZero:
    """Rank 0 of the world, which owns the run folder and speaks to people."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self.is_here = world.index == 0

    def run(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0 only; other ranks wait and get None. If it fails, every rank raises its error."""
        answer, failure = None, None
        if self.is_here:
            try:
                answer = work()
            except MeshwrightError as error:
                failure = error
        if self.world.size > 1:
            failure = told_by(0, failure, self.world.process_group)
        if failure is not None:
            failure.said_elsewhere = not self.is_here
            raise failure
        return answer

    def run_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on all others, which find the cache that it filled."""
        answer = self.run(work)
        return work() if answer is None else answer

    def broadcast(self, work: Callable[[], T]) -> T:
        """Return rank 0's answer on every rank. A shared file system may show other ranks an older state."""
        answer = self.run(work)
        if self.world.size > 1:
            answer = told_by(0, answer, self.world.process_group)
        return answer  # type: ignore[return-value]  # broadcast: no None is left


def same_everywhere(world: Group, what: str, mine: str) -> None:
    """MeshwrightError on every rank where the ranks were started with different things (a plan, a version)."""
    digests = gathered(digest([mine]), world.process_group) if world.size > 1 else [""]
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    first, second = (told_by(rank, mine, world.process_group) for rank in (0, other))
    raise MeshwrightError(
        f"rank 0 and rank {other} disagree about {what}: {_difference(first, second)}. Start every rank "
        "with the same command and version"
    )


def all_names(mine: Iterable[str], group: dist.ProcessGroup | None) -> set[str]:
    """The names that any rank of a group has. Most ranks have the same as others: all tell all a digest, and one for
    each digest its names."""
    names = sorted(mine)
    digests = gathered(digest(names), group)
    return set().union(*(told_by(digests.index(one), names, group) for one in sorted(set(digests))))


def digest(texts: Iterable[str]) -> str:
    """What tells lists of texts apart."""
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=16).hexdigest()


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """What each rank of a group says, on every rank: for what is small, since it is sent that many times squared."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def told_by(source: int, mine: T, group: dist.ProcessGroup | None) -> T:
    """What the rank at place `source` says, on every rank."""
    told = [mine]
    dist.broadcast_object_list(told, group=group, group_src=source)
    return told[0]


def _difference(one: str, other: str) -> str:
    """The first line in which two texts differ."""
    lines = zip((one + "\n").splitlines(), (other + "\n").splitlines(), strict=False)
    first = next(((a, b) for a, b in lines if a != b), (one[-60:], other[-60:]))
    return f"{first[0].strip()[:80]!r} and {first[1].strip()[:80]!r}"
