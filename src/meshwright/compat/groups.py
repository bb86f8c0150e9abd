"""Names of process groups that every member can work out by itself."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_torch: Any = distributed_c10d


def named_group(ranks: Sequence[int], timeout: timedelta | None, purpose: str = "") -> dist.ProcessGroup:
    """A new group that its members alone take part in making, named by purpose and ranks.

    torch's own name for such a group counts the groups that this process is in. Members that are in unequally many
    others (the ends of a pipeline, the ranks between) would wait for each other under different names, and torch has no
    public way to give one. The number at the end tells a group from an earlier one of the same ranks.
    """
    key = hashlib.sha1(f"{purpose} {'_'.join(map(str, sorted(ranks)))}".encode(), usedforsecurity=False).hexdigest()
    name = f"{key}_{sum(str(known).startswith(key) for known in _torch._world.pg_names.values())}"
    by_count = _torch._process_group_name
    _torch._process_group_name = lambda *_, **__: name
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        _torch._process_group_name = by_count
    return group
