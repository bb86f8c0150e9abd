"""Every allocation of a process, counted by a library that stands before the C library's (LD_PRELOAD): scratch of
oneDNN, MKL and OpenMP as well as tensors, on whatever thread. It knows of neither torch nor the dry run.

    library = build(folder)                              # needs a C compiler and glibc
    subprocess.run(..., env={**os.environ, **preloaded(library)})
    before = counter().mark(); ...; counter().peak_bytes - before     # inside that process
"""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

SOURCE = Path(__file__).with_suffix(".c")
NAME = "meshwright_allocations.so"


def missing() -> str:
    """Why it cannot be had here; empty = it can."""
    if not sys.platform.startswith("linux"):
        return "the count of allocations needs Linux with glibc"
    return "" if _compiler() else "the count of allocations needs a C compiler (gcc or cc), and none is on the PATH"


def build(folder: Path) -> Path:
    """Compile the library into a folder."""
    library = folder / NAME
    compiler = _compiler()
    assert compiler is not None, missing()
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl", "-lpthread"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return library


def preloaded(library: Path) -> dict[str, str]:
    """What the environment of a process must have that is to be counted."""
    return {"LD_PRELOAD": " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD", ""))))}


def again_counted() -> None:
    """Start this very program once more with the library before the C library's, unless it is there already."""
    if counter() is not None or missing():
        return
    folder = Path(gettempdir(), f"meshwright-allocations-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, **preloaded(build(folder))}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


@dataclass(frozen=True, slots=True)
class Counter:
    """The library in this process."""

    library: ctypes.CDLL

    @property
    def live_bytes(self) -> int:
        """In blocks that live."""
        return self._asked("live")

    @property
    def peak_bytes(self) -> int:
        """The most since the last mark; AssertionError where blocks were missed."""
        assert self._asked("lost") == 0, "more blocks live than the library can count"
        return self._asked("peak")

    def mark(self) -> int:
        """Begin anew; gives the bytes that live now."""
        return self._asked("mark")

    def arm(self, live_bytes: int) -> None:
        """Keep a list of the large blocks, and of who asked for them, once so many bytes live."""
        self.library.allocations_arm(ctypes.c_longlong(live_bytes))

    def write_list(self, file: int) -> None:
        """That list to a file descriptor, a line each: bytes and functions, the innermost first."""
        self.library.allocations_list(ctypes.c_int(file))

    def _asked(self, what: str) -> int:
        function = getattr(self.library, f"allocations_{what}")
        function.restype = ctypes.c_longlong
        return int(function())


def counter() -> Counter | None:
    """The library, where this process was started with it."""
    library = ctypes.CDLL(None)
    return Counter(library) if hasattr(library, "allocations_mark") else None


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")
