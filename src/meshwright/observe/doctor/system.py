"""The machine a rank runs on: versions, cores, memory, shared memory, open files, disk, other programs."""

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.observe.calibrate.campaign import processor
from meshwright.observe.doctor.findings import Finding, failure, ok, skipped, warning
from meshwright.spec.units import GIB, MIB, gib, many
from meshwright.training.available_memory import machine_memory

PYTHONS = ((3, 11), (3, 14))
TORCHES = ((2, 11), (2, 14))
"""Supported: from the first on, below the second."""
LEAST_FREE_BYTES = 2 * GIB
"""Of memory: a rank with torch and a small model."""
LEAST_SHARED_BYTES = GIB
"""Of /dev/shm: what NCCL, and workers that share tensors, may take on a node."""
LEAST_FILES = 4096
"""Open files of a process: sockets to other ranks, shards of checkpoints."""
LEAST_DISK_BYTES = 10 * GIB
SLOW_DISK_BYTES_PER_S = 50 * MIB
BUSY = 0.5
"""Programs that run or wait, for each core, from which on timings and training suffer."""


def versions(python: Sequence[int] = sys.version_info[:2], torch_version: str = str(torch.__version__)) -> Finding:
    """Whether Python and torch are among the supported ones."""
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    said = f"Python {'.'.join(map(str, python))}, torch {torch_version}"
    if not PYTHONS[0] <= tuple(python) < PYTHONS[1]:
        return failure("versions", f"{said}: this Python is not supported", "use Python 3.11, 3.12 or 3.13")
    if not TORCHES[0] <= numbers < TORCHES[1]:
        return failure("versions", f"{said}: this torch is not supported", "pip install 'torch>=2.11,<2.14'")
    return ok("versions", said)


def cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> Finding:
    """Cores that this process may use, and whether a quota gives it less time than they have."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.read_text().split() if cgroup.is_file() else ["max"]
    said = f"{count} cores ({processor()}), torch uses {many(torch.get_num_threads(), 'thread')}"
    if quota[0].isdigit():
        given = int(quota[0]) / int(quota[1])
        if given < 0.9 * count:
            return warning(
                "cores", f"{said}, but a quota allows the time of {given:.1f}",
                f"set OMP_NUM_THREADS={max(1, int(given))}: more threads only wait for each other", cores=count,
            )  # fmt: skip
    return ok("cores", said, cores=count, threads=torch.get_num_threads())


def memory(root: Path = Path("/")) -> Finding:
    """Memory that is free now, for the machine and for each control group of this process."""
    if not (root / "proc/meminfo").is_file():
        return skipped("memory", "this system does not say how much memory is free")
    here = machine_memory(root)
    free, whole, swapped = here.available_bytes, here.total_bytes, here.swapped_bytes
    said = f"{gib(free)} of {gib(whole)} free"
    if free < LEAST_FREE_BYTES:
        return failure("memory", said, f"end other programs: a rank needs {gib(LEAST_FREE_BYTES)} at least")
    if swapped > GIB:
        return warning("memory", f"{said}, {gib(swapped)} swapped out", "end other programs: swapping stalls training")
    return ok("memory", said, free_bytes=free, total_bytes=whole)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Room for what processes of a node share. Containers give 64 MiB by default."""
    if not path.is_dir():
        return skipped("shared memory", f"there is no {path}")
    usage = shutil.disk_usage(path)
    said = f"{gib(usage.free)} free in {path}"
    if usage.free < LEAST_SHARED_BYTES:
        return warning(
            "shared memory", said, "start the container with --shm-size=8g or --ipc=host: NCCL fails without room"
        )
    return ok("shared memory", said, free_bytes=usage.free)


def open_files(limit: int | None = None) -> Finding:
    """How many files and sockets a process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if 0 <= soft < LEAST_FILES:
        return warning("open files", f"at most {soft} for a process", f"ulimit -n {16 * LEAST_FILES} before the start")
    return ok("open files", f"{soft} for a process", limit=soft)


def disk(folder: Path, size_bytes: int = 64 * MIB) -> Finding:
    """Room and speed where runs are kept: a checkpoint is 12 to 16 bytes per parameter."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    said = f"{gib(free)} free where runs are kept"
    if free < LEAST_DISK_BYTES:
        return warning("disk", said, "free some space: checkpoints take 12 to 16 bytes per parameter, three are kept")
    block, began = b"\x5a" * MIB, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(size_bytes // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failure(
            "disk", f"{said}, and cannot be written: {error.strerror}", "run in a folder that can be written"
        )
    rate = size_bytes / (time.perf_counter() - began)
    said += f", written at {rate / MIB:.0f} MiB/s"
    if rate < SLOW_DISK_BYTES_PER_S:
        return warning("disk", said, "save less often (recipe.checkpoint_every), or to another disk", bytes_per_s=rate)
    return ok("disk", said, free_bytes=free, bytes_per_s=rate)


def other_programs(load: float | None = None, cores: int | None = None) -> Finding:
    """Whether something else runs here."""
    if load is None and not hasattr(os, "getloadavg"):
        return skipped("other programs", "this system does not tell its load")
    load = os.getloadavg()[0] if load is None else load
    cores = cores or os.cpu_count() or 1
    said = f"load {load:.1f} on {cores} cores"
    if load > BUSY * cores:
        return warning("other programs", said, "end other programs, or expect lower speeds than an idle machine has")
    return ok("other programs", said, load=load)
