"""Settings of glibc's malloc for large freed blocks, which Python has no names for."""

import ctypes
import os
import sys
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Constants of malloc.h."""


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep large freed blocks instead of returning each to the kernel.

    Returns False without glibc, or when the environment sets the threshold (MALLOC_MMAP_THRESHOLD_, or GLIBC_TUNABLES,
    see mallopt(3)). By default every tensor above 128 KiB .. 32 MiB is mapped anew and faulted in page by page. On a
    virtual machine, a fresh 256 MB tensor is then six times slower to write than a reused one.
    """
    is_configured = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if is_configured or not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False
