"""Time of each operation of a step, by torch's profiler; on a GPU also what its kernels overlap."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from meshwright import compat
from meshwright.observe.profile.step_record import covered_s

LISTED = 30
COMMUNICATION = "nccl"
"""What NCCL's kernels are called, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation:
    """One of the operations that a step spends most time in."""

    name: str
    calls: int
    seconds: float
    """Its own, without those it calls; of a GPU's time where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """Seconds of a GPU in one step (one that torch's profiler made longer)."""

    compute_s: float
    communication_s: float
    exposed_s: float
    """Communication while nothing computes; waiting for other ranks is part of it."""
    idle_s: float
    """Neither."""


def operations(step: Callable[[], None], device: torch.device) -> tuple[tuple[TimedOperation, ...], GpuKernels | None]:
    """Run a step under the profiler: its most expensive operations, and a GPU's kernels."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch_profile(activities=activities) as profile:
        step()
    return listed(profile.key_averages(), cuda=cuda), overlap(compat.profiled_kernels(profile)) if cuda else None


def listed(rows: Iterable[Any], *, cuda: bool) -> tuple[TimedOperation, ...]:
    """The most expensive of torch's averages. A GPU's second stands there up to three times: in the row of an operation
    that launched a kernel, of the kernel, and of each stretch that somebody gave a name; it counts in the first."""
    found = [
        TimedOperation(
            name=row.key,
            calls=row.count,
            seconds=(row.self_device_time_total if cuda else row.self_cpu_time_total) / 1e6,
        )
        for row in rows
        if row.device_type == DeviceType.CPU and not row.is_user_annotation
    ]
    return tuple(sorted((row for row in found if row.seconds), key=lambda row: -row.seconds)[:LISTED])


def overlap(kernels: Sequence[tuple[str, float, float]]) -> GpuKernels:
    """Of (name, start, end) of kernels on any streams."""
    sent = [(start, end) for name, start, end in kernels if COMMUNICATION in name.lower()]
    rest = [(start, end) for name, start, end in kernels if COMMUNICATION not in name.lower()]
    compute, communication, either = covered_s(rest), covered_s(sent), covered_s([*rest, *sent])
    whole = max((end for _, _, end in kernels), default=0.0) - min((start for _, start, _ in kernels), default=0.0)
    return GpuKernels(
        compute_s=compute, communication_s=communication, exposed_s=either - compute, idle_s=whole - either
    )
