"""The recorder against allocations whose sizes are known."""

from threading import Thread

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.dryrun.simulate import cpu_workspace_bytes
from meshwright.observe.profile.allocator import totals, watching

MB = 2**20


def test_peak_of_tensors() -> None:
    with watching() as recorder:
        a = torch.empty(8 * MB, dtype=torch.uint8)
        del a
        b = torch.empty(4 * MB, dtype=torch.uint8)
        c = torch.empty(3 * MB, dtype=torch.uint8)
        del b, c
    assert max(size for _, size in recorder.totals()) == 8 * MB
    large = [size for _, size in recorder.totals() if size % MB == 0]
    assert large == [8 * MB, 0, 4 * MB, 7 * MB, 3 * MB, 0]


def test_what_ends_on_another_thread_is_found_when_its_place_is_given_out_again() -> None:
    events = [(0, 1000, 100), (1, 2000, 50), (2, 1050, 10), (3, 1050, -10), (4, 2000, -50), (5, 7, -9)]
    assert [size for _, size in totals(events)] == [100, 150, 60, 50, 0, 0]


def test_ends_elsewhere_are_not_heard_of() -> None:
    """Why addresses are looked at; where torch begins to tell of them, the rule does no harm."""
    with watching() as recorder:
        box = [torch.empty(8 * MB, dtype=torch.uint8)]
        thread = Thread(target=box.clear)
        thread.start()
        thread.join()
        again = torch.empty(8 * MB, dtype=torch.uint8)
        del again
    assert max(size for _, size in recorder.totals()) in (8 * MB, 16 * MB)


@pytest.mark.parametrize("name", ["_allgather_base", "_reduce_scatter_base"])
def test_gloo_takes_what_the_dry_run_counts(name: str) -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    whole, part = (torch.ones(8 * MB, dtype=torch.uint8) for _ in range(2))
    tensors = (whole, part) if name == "_allgather_base" else (part, whole)
    with watching() as recorder:
        getattr(group, name)(*tensors).wait()
    assert max(size for _, size in recorder.totals()) == 8 * MB
    assert cpu_workspace_bytes(getattr(torch.ops.c10d, f"{name}_").default, tensors) == 8 * MB
