"""Agreement of ranks: work that rank 0 does for all of them, and small objects that ranks tell each other.

An error on one rank is raised on every rank, so none waits for a rank that failed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.parallel.groups.group import Group
from meshwright.spec.errors import MeshwrightError

T = TypeVar("T")


class RankZero:
    """Work that rank 0 of the world does for all ranks: it owns the run folder and prints messages."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self.is_here = world.index == 0

    def run(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0 while the others wait. Its errors are raised on every rank; other ranks get None."""
        answer, failure = None, None
        if self.is_here:
            try:
                answer = work()
            except MeshwrightError as error:
                failure = error
        if self.world.size > 1:
            # None is told as well: this broadcast is where the other ranks wait for rank 0.
            failure = broadcast_object(0, failure, self.world.process_group)
        if failure is not None:
            # One message is enough: the other ranks exit silently.
            failure.reported_elsewhere = not self.is_here
            raise failure
        return answer

    def run_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on all other ranks, which find the cache that rank 0 wrote."""
        answer = self.run(work)
        return work() if answer is None else answer

    def broadcast(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its answer on every rank: a file system may show others an older state."""
        answer = self.run(work)
        if self.world.size > 1:
            answer = broadcast_object(0, answer, self.world.process_group)
        return answer  # type: ignore[return-value]  # the broadcast leaves no None


def check_same(world: Group, what: str, mine: str) -> None:
    """Raise MeshwrightError on every rank when the ranks were started with different texts (a plan, a version)."""
    # The texts are long, so ranks compare digests and only two that differ send theirs.
    digests = gather_objects(digest([mine]), world.process_group) if world.size > 1 else [""]
    differing = next((rank for rank, other in enumerate(digests) if other != digests[0]), None)
    if differing is None:
        return
    first, second = (broadcast_object(rank, mine, world.process_group) for rank in (0, differing))
    lines = zip((first + "\n").splitlines(), (second + "\n").splitlines(), strict=False)
    # Quote the first line that differs. If one text continues the other, quote both ends.
    line, other_line = next(((a, b) for a, b in lines if a != b), (first[-60:], second[-60:]))
    raise MeshwrightError(
        f"rank 0 and rank {differing} disagree about {what}: {line.strip()[:80]!r} and {other_line.strip()[:80]!r}. "
        "Start every rank with the same command and version"
    )


def union_of_names(mine: Iterable[str], group: dist.ProcessGroup | None) -> set[str]:
    """Return the names that any rank has. Ranks with equal names send a digest only, except for one of them."""
    names = sorted(mine)
    digests = gather_objects(digest(names), group)
    return set().union(*(broadcast_object(digests.index(text), names, group) for text in sorted(set(digests))))


def digest(texts: Iterable[str]) -> str:
    """Return a hash of a list of texts."""
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=16).hexdigest()


def gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the objects of all ranks, by rank, on every rank. Bytes grow with the square of the ranks."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def broadcast_object(source: int, mine: T, group: dist.ProcessGroup | None) -> T:
    """Return the object of the rank with index `source` in the group, on every rank."""
    objects = [mine]
    dist.broadcast_object_list(objects, group=group, group_src=source)
    return objects[0]
