"""Time that a CUDA device spends on the work of a call, independent of the host."""

from collections.abc import Callable
from statistics import median

import torch

REPEATS, SLEEP_CYCLES, SCRATCH_BYTES = 9, 2_000_000, 2**28
"""Number of measurements, sleep cycles that let the host run ahead, and bytes written to flush the cache."""


def device_seconds(run: Callable[[], object]) -> float:
    """Return the median device time of a call with a cold cache, in seconds.

    The device sleeps until the host has launched everything, as in a CUDA graph.
    """
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
