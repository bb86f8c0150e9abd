"""What glibc's malloc does with large blocks that are freed; there is no Python name for it."""

import ctypes
import os
import sys
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Of malloc.h."""


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep large freed blocks instead of giving each back to the kernel; False where not glibc,
    or where the environment sets the threshold (MALLOC_MMAP_THRESHOLD_, or GLIBC_TUNABLES as in mallopt(3)).

    By default every tensor above 128 KiB .. 32 MiB is mapped anew and faulted in page by page, which on a virtual
    machine makes a fresh 256 MB tensor six times slower to write than an old one.
    """
    said = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if said or not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False
