"""Time that a CUDA device takes for what a call launches, whatever the host needs to launch it."""

from collections.abc import Callable
from statistics import median

import torch

REPEATS, SLEEP_CYCLES, SCRATCH_BYTES = 9, 2_000_000, 2**28
"""Of a measurement; cycles of the device in which the host gets ahead; what is written to empty its cache."""


def device_seconds(run: Callable[[], object]) -> float:
    """Median time of a CUDA device for what a call launches, with nothing of it in the cache. The device sleeps until
    the host has launched all of it, as in a graph."""
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    marks = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        run()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    middle: float = median(begin.elapsed_time(end) for begin, end in marks) / 1e3
    return middle
