"""Names of process groups that every member can derive alone."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_torch: Any = distributed_c10d


def named_group(ranks: Sequence[int], timeout: timedelta | None, purpose: str = "") -> dist.ProcessGroup:
    """Create a group that only its members join, named by purpose and ranks.

    torch names such a group by a per-process counter and has no public way to set the name. Some ranks belong to more
    groups than others, such as the ends of a pipeline. They would wait for each other under different names. The number
    at the end distinguishes a group from earlier ones of the same ranks.
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
