"""What this machine's memory has left for the processes of a run: less than it has, and less than its control group may
have, by what others use."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROCESS_BYTES = 300 * 2**20
"""What a process takes beside its tensors: libraries (torch alone 0.25 GiB), threads, gaps between blocks."""
UNLIMITED_BYTES = 2**60
"""No limit; a control group of the first kind names a number above this where it has none."""
CACHES = ("inactive_file", "active_file")
"""Of a control group's use, what the kernel gives back before it refuses memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Bytes that processes of this machine can have."""

    total_bytes: int
    """Of the machine, or the limit of its control group."""
    available_bytes: int
    """Not used by anybody, or given back when it is asked for."""
    swap_bytes: int = 0
    """Free on disk, of what the machine has and its control group allows: to compute there is slow, and no crash."""
    swapped_bytes: int = 0
    """Of all programs of the machine, on disk now."""


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """As the kernel says below `root`: /proc/meminfo, and every control group (of either kind) that this process is in.

    Where there is no /proc (macOS) all memory counts as available.
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
    """A control group: its limit of memory, and what it leaves this process."""

    limit_bytes: int
    memory_bytes: int
    swap_bytes: int
    both_bytes: int
    """Of memory and swap together."""


def _groups(root: Path) -> Iterator[_ControlGroup]:
    """Each control group that this process is in."""
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
    """Of the first kind memory and swap have a limit together, of the second each its own."""
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
    """Below a limit beside what is used and cannot be given back."""
    if limit_bytes >= UNLIMITED_BYTES or not used.is_file():
        return limit_bytes
    return max(0, limit_bytes - max(0, _number(used) - cache_bytes))


def _number(file: Path) -> int:
    """UNLIMITED_BYTES where a file says `max`, or is not there."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else UNLIMITED_BYTES


def _table(file: Path) -> dict[str, int]:
    """`name number` or `name: number unit`, a line each."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
