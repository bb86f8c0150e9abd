"""Groups of ranks that see one run folder: on a file system that all machines share, or on a disk of each machine.

Machines without a shared one need an object store: each keeps what its own ranks wrote, and the store has all of it.
"""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.parallel.groups.group import RankZero, gather_objects
from meshwright.parallel.health.heartbeat import boot_id
from meshwright.store.durable import NODE_DISKS, file_system, report_in_one_line

LONGEST_DELAY_S = 60.0
"""Longest time after which a network file system shows a new file to other machines (acdirmax of NFS)."""


@dataclass(frozen=True, slots=True)
class FolderRanks:
    """The ranks that see this rank's run folder, where not all see that of rank 0."""

    index: int
    """Index of this rank among them. The first one makes and removes folders."""
    size: int


def find_folder_ranks(folder: Path, rank_zero: RankZero) -> FolderRanks | None:
    """Find which ranks see the folder of rank 0, which need not exist yet. None = all of them.

    All ranks call this together. Raises RunError when rank 0 cannot write there.
    """

    def write_probe() -> Path:
        probe = _find_existing(folder) / f".probe-{secrets.token_hex(8)}"
        with report_in_one_line(folder):
            probe.touch()
        return probe

    probe = rank_zero.broadcast(write_probe)
    try:
        # Other ranks meet where device and inode are the same, before any of them makes a folder.
        where = "" if _appears(probe) else _identify(folder)
        places = gather_objects(where, rank_zero.world.process_group)
    finally:
        if rank_zero.is_here:
            probe.unlink(missing_ok=True)
    together = [rank for rank, other in enumerate(places) if other == where]
    return FolderRanks(index=together.index(rank_zero.world.index), size=len(together)) if any(places) else None


def _appears(probe: Path) -> bool:
    """Return whether a file that exists for rank 0 exists here, now or after the delay of a network file system."""
    delay_s = 0.0 if file_system(probe.resolve()) in NODE_DISKS else LONGEST_DELAY_S
    ends_s = time.monotonic() + delay_s
    while not probe.exists():
        if time.monotonic() >= ends_s:
            return False
        time.sleep(0.5)
    return True


def _identify(folder: Path) -> str:
    """Return the machine, device and inode of a folder, or of the nearest one above it that exists."""
    status = _find_existing(folder).stat()
    return f"{boot_id()} {status.st_dev} {status.st_ino}"


def _find_existing(folder: Path) -> Path:
    # A relative path stays one: each rank must look in its own current folder.
    return next(path for path in (folder, *folder.parents) if path.exists())
