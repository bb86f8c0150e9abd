"""Memory that this machine has available for the processes of a run, within its control groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROCESS_BYTES = 300 * 2**20
"""Memory of a process beside its tensors: libraries (torch alone 0.25 GiB), threads, gaps between blocks."""
UNLIMITED_BYTES = 2**60
"""No limit. Control groups of version 1 write a number above this when they have none."""
CACHES = ("inactive_file", "active_file")
"""Parts of a control group's use that the kernel reclaims before it refuses memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Memory for processes of this machine, in bytes."""

    total_bytes: int
    """Memory of the machine, or the limit of its control group."""
    available_bytes: int
    """Unused memory, and memory that is reclaimed on demand."""
    swap_bytes: int = 0
    """Free swap that the control group allows. Computing there is slow but does not crash."""
    swapped_bytes: int = 0
    """Swap in use by all programs of the machine."""


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Read the memory of this machine from the kernel's files below `root`.

    Reads /proc/meminfo and every control group of this process, of version 1 or 2. Without /proc (macOS) all memory
    counts as available.
    """
    described = _table(root / "proc/meminfo")
    if "MemTotal" not in described:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MachineMemory(total_bytes=total, available_bytes=total)
    total = described["MemTotal"] * 1024
    available = described.get("MemAvailable", described.get("MemFree", 0)) * 1024
    swap, both = described.get("SwapFree", 0) * 1024, UNLIMITED_BYTES
    for group in _groups(root):
        total, available = min(total, group.limit_bytes), min(available, group.memory_bytes)
        swap, both = min(swap, group.swap_bytes), min(both, group.both_bytes)
    available = min(available, both)
    return MachineMemory(
        total_bytes=total,
        available_bytes=available,
        swap_bytes=min(swap, both - available),
        swapped_bytes=max(0, described.get("SwapTotal", 0) - described.get("SwapFree", 0)) * 1024,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ControlGroup:
    """Memory limit of a control group, and what it leaves this process."""

    limit_bytes: int
    memory_bytes: int
    swap_bytes: int
    both_bytes: int
    """Memory and swap together."""


def _groups(root: Path) -> Iterator[_ControlGroup]:
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, first_kind = root / "sys/fs/cgroup", False
        elif "memory" in controllers.split(","):
            top, first_kind = root / "sys/fs/cgroup/memory", True
        else:
            continue
        here = top / path.lstrip("/")
        folder = here if here.is_dir() else top  # in a container the path may be that of the host
        while True:
            yield _group(folder, first_kind=first_kind)
            if folder == top:
                break
            folder = folder.parent


def _group(folder: Path, *, first_kind: bool) -> _ControlGroup:
    """Read one control group. Version 1 limits memory and swap together, version 2 each separately."""
    prefix, limit, used = ("total_", "limit_in_bytes", "usage_in_bytes") if first_kind else ("", "max", "current")
    statistics = _table(folder / "memory.stat")
    cache = sum(statistics.get(prefix + name, 0) for name in CACHES)
    most = _number(folder / f"memory.{limit}")
    swap = _number(folder / "memory.swap.max")
    both = _number(folder / "memory.memsw.limit_in_bytes")
    return _ControlGroup(
        limit_bytes=most,
        memory_bytes=_left(most, folder / f"memory.{used}", cache),
        swap_bytes=_left(swap, folder / "memory.swap.current"),
        both_bytes=_left(both, folder / "memory.memsw.usage_in_bytes", cache),
    )


def _left(limit_bytes: int, used: Path, cache_bytes: int = 0) -> int:
    """Return what a limit leaves beside used memory that cannot be reclaimed."""
    if limit_bytes >= UNLIMITED_BYTES or not used.is_file():
        return limit_bytes
    return max(0, limit_bytes - max(0, _number(used) - cache_bytes))


def _number(file: Path) -> int:
    """Return the number in a file, UNLIMITED_BYTES for `max` or a missing file."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else UNLIMITED_BYTES


def _table(file: Path) -> dict[str, int]:
    """Parse lines of `name number` or `name: number unit`."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
