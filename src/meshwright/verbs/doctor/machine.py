"""Checks of a rank's machine: its software, cores, memory and disk, then its GPUs and what torch needs for them."""

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.kernels.c import training_rows
from meshwright.observe.rates import processor
from meshwright.spec.units import GIB, MIB, gib, many
from meshwright.training.device import known_device
from meshwright.training.fits import machine_memory
from meshwright.verbs.doctor.findings import Finding, failure, ok, skipped, warning

PYTHONS = ((3, 11), (3, 14))
TORCHES = ((2, 11), (2, 14))
"""Supported versions: from the first up to but not including the second."""
LEAST_FREE_BYTES = 2 * GIB
"""Free memory that a rank with torch and a small model needs."""
LEAST_SHARED_BYTES = GIB
"""Space in /dev/shm that NCCL and workers that share tensors may take on a node."""
LEAST_FILES = 4096
"""Open files of a process: sockets to other ranks, shards of checkpoints."""
LEAST_DISK_BYTES = 10 * GIB
SLOW_DISK_BYTES_PER_S = 50 * MIB
BUSY = 0.5
"""Programs per core that run or wait, above which timings and training suffer."""


def check_versions(
    python: Sequence[int] = sys.version_info[:2], torch_version: str = str(torch.__version__)
) -> Finding:
    """Check that Python and torch are supported versions."""
    # The part after + names the build (cu128, cpu), which may hold letters and dots.
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    summary = f"Python {'.'.join(map(str, python))}, torch {torch_version}"
    if not PYTHONS[0] <= tuple(python) < PYTHONS[1]:
        return failure("versions", f"{summary}: this Python is not supported", "use Python 3.11, 3.12 or 3.13")
    if not TORCHES[0] <= numbers < TORCHES[1]:
        return failure("versions", f"{summary}: this torch is not supported", "pip install 'torch>=2.11,<2.14'")
    return ok("versions", summary)


def check_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> Finding:
    """Count the cores of this process, and check that no quota gives it less time than they have."""
    # os.cpu_count() ignores taskset and the core lists of batch systems.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.read_text().split() if cgroup.is_file() else ["max"]
    summary = f"{count} cores ({processor()}), torch uses {many(torch.get_num_threads(), 'thread')}"
    if quota[0].isdigit():
        # cpu.max of cgroup v2 holds "quota period" in microseconds, or "max period" for no limit.
        allowed = int(quota[0]) / int(quota[1])
        # A quota that is a tenth smaller costs too little for a warning.
        if allowed < 0.9 * count:
            return warning(
                "cores", f"{summary}, but a quota allows the time of {allowed:.1f}",
                f"set OMP_NUM_THREADS={max(1, int(allowed))}: more threads only wait for each other", cores=count,
            )  # fmt: skip
    return ok("cores", summary, cores=count, threads=torch.get_num_threads())


def check_memory(root: Path = Path("/")) -> Finding:
    """Check the free memory of the machine and of each control group of this process."""
    if not (root / "proc/meminfo").is_file():
        return skipped("memory", "this system does not say how much memory is free")
    here = machine_memory(root)
    free, whole, swapped = here.available_bytes, here.total_bytes, here.swapped_bytes
    text = f"{gib(free)} of {gib(whole)} free"
    if free < LEAST_FREE_BYTES:
        return failure("memory", text, f"end other programs: a rank needs {gib(LEAST_FREE_BYTES)} at least")
    if swapped > GIB:
        return warning("memory", f"{text}, {gib(swapped)} swapped out", "end other programs: swapping stalls training")
    return ok("memory", text, free_bytes=free, total_bytes=whole)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Check the memory that processes of a node can share. Containers get 64 MiB by default."""
    if not path.is_dir():
        return skipped("shared memory", f"there is no {path}")
    # NCCL creates its segments in /dev/shm, and fails when it is full.
    usage = shutil.disk_usage(path)
    summary = f"{gib(usage.free)} free in {path}"
    if usage.free < LEAST_SHARED_BYTES:
        return warning(
            "shared memory", summary, "start the container with --shm-size=8g or --ipc=host: NCCL fails without room"
        )
    return ok("shared memory", summary, free_bytes=usage.free)


def check_open_files(limit: int | None = None) -> Finding:
    """Check how many files and sockets a process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    # RLIM_INFINITY is -1 in Python: no limit, not a small one.
    if 0 <= soft < LEAST_FILES:
        return warning("open files", f"at most {soft} for a process", f"ulimit -n {16 * LEAST_FILES} before the start")
    return ok("open files", f"{soft} for a process", limit=soft)


def check_disk(folder: Path, size_bytes: int = 64 * MIB) -> Finding:
    """Check space and speed of the disk of runs. A checkpoint takes 12 to 16 bytes per parameter."""
    # The folder of runs is created by the first run, so test the file system where it will lie.
    nearest_folder = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(nearest_folder).free
    text = f"{gib(free)} free where runs are kept"
    if free < LEAST_DISK_BYTES:
        return warning("disk", text, "free some space: checkpoints take 12 to 16 bytes per parameter, three are kept")
    block, began = b"\x5a" * MIB, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=nearest_folder) as file:
            for _ in range(size_bytes // MIB):
                file.write(block)
            file.flush()
            # Without fsync this times the page cache, which is far faster than any disk.
            os.fsync(file.fileno())
    except OSError as error:
        return failure(
            "disk", f"{text}, and cannot be written: {error.strerror}", "run in a folder that can be written"
        )
    rate = size_bytes / (time.perf_counter() - began)
    text += f", written at {rate / MIB:.0f} MiB/s"
    if rate < SLOW_DISK_BYTES_PER_S:
        return warning("disk", text, "save less often (recipe.checkpoint_every), or to another disk", bytes_per_s=rate)
    return ok("disk", text, free_bytes=free, bytes_per_s=rate)


def check_other_programs(load: float | None = None, cores: int | None = None) -> Finding:
    """Check that no other program keeps the machine busy."""
    if load is None and not hasattr(os, "getloadavg"):
        return skipped("other programs", "this system does not tell its load")
    load = os.getloadavg()[0] if load is None else load
    cores = cores or os.cpu_count() or 1
    summary = f"load {load:.1f} on {cores} cores"
    if load > BUSY * cores:
        return warning("other programs", summary, "end other programs, or expect lower speeds than an idle machine has")
    return ok("other programs", summary, load=load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """GPU support of torch and the system."""

    cuda: str | None
    """CUDA version that torch was built for. None = a CPU build."""
    available: bool
    driver: str
    """Version of the driver. Empty = none is loaded."""
    reason: str = ""
    """Reason that torch gives for not using a GPU."""
    names: tuple[str, ...] = ()


def read_build(driver: Path = Path("/proc/driver/nvidia/version")) -> Build:
    """Read the GPU support of this machine."""
    # The version is the first number after these words; open drivers add words in between.
    text = driver.read_text().split("Kernel Module")[-1].split() if driver.is_file() else []
    version = next((word for word in text if word[:1].isdigit()), "loaded" if text else "")
    available, reason = torch.cuda.is_available(), ""
    if version and torch.version.cuda and not available:
        try:
            # is_available() swallows the reason; init() raises it, such as a driver that is too old.
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0][:200]
    names = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())) if available else ()
    return Build(cuda=torch.version.cuda, available=available, driver=version, reason=reason, names=names)


def check_gpus(build: Build) -> Finding:
    """Check that torch can use the GPUs of this machine."""
    if build.available:
        names = ", ".join(sorted(set(build.names)))
        summary = f"{len(build.names)} x {names}, driver {build.driver or 'unknown'}, CUDA {build.cuda}"
        if len(set(build.names)) > 1:
            return warning("GPUs", summary, "train on equal GPUs: each step waits for the slowest")
        return ok("GPUs", summary, count=len(build.names))
    if not build.driver:
        return ok("GPUs", "none: the CPU is used", count=0)
    if build.cuda is None:
        return failure(
            "GPUs", f"driver {build.driver} is loaded, and torch is a CPU build",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    return failure(
        "GPUs", f"torch (CUDA {build.cuda}) cannot use driver {build.driver}: {build.reason or 'no reason given'}",
        "update the driver, or install a torch that is built for an older CUDA",
    )  # fmt: skip


def check_libraries(gpu: bool, nccl: bool | None = None, gloo: bool | None = None) -> Finding:
    """Check the libraries through which ranks communicate."""
    # is_gloo_available exists only in builds with distributed support, hence the order.
    gloo = dist.is_available() and dist.is_gloo_available() if gloo is None else gloo
    nccl = dist.is_available() and dist.is_nccl_available() if nccl is None else nccl
    if not gloo:
        return failure("communication", "this torch has no Gloo", "install an official build of torch")
    if gpu and not nccl:
        return failure("communication", "this torch has no NCCL", "install an official CUDA build of torch, on Linux")
    version = ".".join(map(str, torch.cuda.nccl.version())) if gpu else ""
    return ok("communication", f"Gloo{f' and NCCL {version}' if gpu else ''}")


def check_compiler(
    gpu: bool, triton: bool | None = None, compilers: tuple[str, ...] | None = None, loops: bool | None = None
) -> Finding:
    """Check for a C compiler: for torch.compile with Triton on a GPU, for OpenMP loops on a CPU."""
    installed = (
        tuple(name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)) if compilers is None else compilers
    )
    if not gpu:
        return _check_loops(installed, training_rows.is_compiled() if loops is None else loops)
    triton = find_spec("triton") is not None if triton is None else triton
    missing = [*([] if installed else ["a C compiler"]), *([] if triton else ["Triton"])]
    if not missing:
        return ok("compiler", f"{installed[0]}, Triton")
    return warning(
        "compiler",
        f"torch.compile lacks {' and '.join(missing)}: training runs uncompiled, slower by a fifth to a third",
        "apt-get install gcc; pip install triton (official CUDA builds of torch bring it)",
    )  # fmt: skip


def _check_loops(compilers: tuple[str, ...], compiled: bool) -> Finding:
    if compiled:
        return ok("compiler", f"{compilers[0] if compilers else 'there'}: compiles the loops of training")
    reason = f"{compilers[0]} does not compile the loops of training (OpenMP)" if compilers else "no C compiler"
    return warning(
        "compiler", f"{reason}: attention of a step takes 2 to 3 times as long",
        "install gcc, or clang with OpenMP (apt-get install gcc)",
    )  # fmt: skip


def check_preset(gpu: bool) -> Finding:
    """Check that the figures of this GPU are known to plans."""
    if not gpu:
        return skipped("device preset", "no GPU")
    preset = known_device(torch.device("cuda", torch.cuda.current_device()))
    if preset is None:
        return warning(
            "device preset", f"no figures of {torch.cuda.get_device_name()} are known",
            "meshwright calibrate --out here.toml measures them for plan and MFU",
        )  # fmt: skip
    return ok("device preset", preset.name)
