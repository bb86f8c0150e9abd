"""Under torchrun: join the other processes of a run, or say in one sentence why not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from meshwright.spec.errors import IllegalLayout, PlanError, RunError
from meshwright.spec.legal import world_violation

if TYPE_CHECKING:
    from meshwright.spec import Layout

TIMEOUT = timedelta(minutes=10)


def rank() -> int:
    """This process's number among those that torchrun started; 0 when alone."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many processes torchrun started; 1 when alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(layout: "Layout") -> Iterator[None]:
    """Within, this process is one rank of the layout's world: NCCL on GPUs (one each), Gloo on CPUs.

    IllegalLayout: the layout is of another number of processes. RunError: more processes than GPUs on this node.
    PlanError: an address in use or unreachable.
    """
    violation = world_violation(layout, processes())
    if violation:
        raise IllegalLayout(violation)
    if processes() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available():
        local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= there:
            raise RunError(f"process {local} of this node has no GPU: it has {there}; take --nproc_per_node {there}")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise PlanError(
            f"rank {rank()} cannot join the others at {place}: {reason}; is the port free and every rank started?"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()
