"""What this machine's memory has left for the processes of a run: less than it has, and less than its control group may
have, by what others use."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROCESS_BYTES = 300 * 2**20
"""What a process takes beside its tensors: libraries (torch alone 0.25 GiB), threads, gaps between blocks."""
UNLIMITED_BYTES = 2**60
"""A control group of the first kind names a number above this where it has no limit."""
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
    """Free on disk: to compute there is slow, and no crash."""


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
    for limit, used in _groups(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MachineMemory(
        total_bytes=total, available_bytes=available, swap_bytes=described.get("SwapFree", 0) * 1024
    )  # fmt: skip


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is used and cannot be given back) of each control group that limits this process."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        here = top / path.lstrip("/")
        folder = here if here.is_dir() else top  # in a container the path may be that of the host
        while True:
            found = _group(folder, *names)
            if found is not None:
                yield found
            if folder == top:
                break
            folder = folder.parent


def _group(folder: Path, limit: str, used: str, prefix: str) -> tuple[int, int] | None:
    given, now = _number(folder / limit), _number(folder / used)
    if given is None or now is None or given >= UNLIMITED_BYTES:
        return None
    statistics = _table(folder / "memory.stat")
    return given, max(0, now - sum(statistics.get(prefix + name, 0) for name in CACHES))


def _number(file: Path) -> int | None:
    """None where a file says `max`, or is not there."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _table(file: Path) -> dict[str, int]:
    """`name number` or `name: number unit`, a line each."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
