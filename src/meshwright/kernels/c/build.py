"""Builds this folder's C sources for this processor, once, and keeps the libraries in the user's cache.

A library's name is a digest of its inputs: sources, headers, compiler, options and processor. So a shared home serves
many kinds of machines, and another release builds its own.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from meshwright.spec import user_cache

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fopenmp-simd")
LINKING = () if sys.platform == "darwin" else ("-Wl,-Bsymbolic",)  # no name of another library takes the place of ours
FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",))
THREADS: tuple[tuple[str, ...], ...] = (("-fopenmp",), ())
"""Alternatives, of which the first that the compiler accepts is used. FOR_THIS_CPU has alternatives too."""
IDENTITY = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of /proc/cpuinfo that decide which machine code runs."""

log = logging.getLogger(__name__)


def built(*names: str, threads: Sequence[tuple[str, ...]] = THREADS) -> ctypes.CDLL | None:
    """Load the library of C sources of this folder, compiled now unless an earlier process did.

    Args:
        threads: Alternative options, of which the first that the compiler accepts is used.

    Returns None without a C compiler that accepts the sources, and where nothing may be run from a file.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    try:
        path = user_cache.default_root() / "loops" / f"{_digest(compiler, names, threads)}.so"
        if path.is_file() and (library := _loaded(path)):
            return library
        with user_cache.lock(path):
            if not path.is_file() or not (_runs_nothing(path.parent) or _loaded(path)):
                log.warning("compiling C loops for this processor, once, into %s", path.parent)
                if not _compile(compiler, names, threads, path):
                    return None
        return _loaded(path) or _from_elsewhere(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        log.warning("C loops are compiled at each start: %s; set XDG_CACHE_HOME to a folder with room", reason)
    return _from_elsewhere(None, compiler, names, threads)


def _digest(compiler: str, names: Sequence[str], threads: Sequence[tuple[str, ...]]) -> str:
    program = Path(compiler).resolve()
    stat = program.stat()
    options = FLAGS, LINKING, FOR_THIS_CPU, list(threads)
    digest = hashlib.sha256(repr((str(program), stat.st_size, stat.st_mtime_ns, options, processor())).encode())
    for path in sorted({*FOLDER.glob("*.h"), *(FOLDER / name for name in names)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def processor() -> str:
    """Return a string that identifies this processor's kind and instructions."""
    kind = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join(kind + [line for line in lines if line.partition(":")[0].strip() in IDENTITY])


def _compile(compiler: str, names: Sequence[str], threads: Sequence[tuple[str, ...]], path: Path) -> bool:
    """Write the library to `path`, complete or not at all. Sources are compiled side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    refusals = []
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as scratch:

        def compiled(words: list[str]) -> bool:
            ended = subprocess.run(words, capture_output=True, check=False, text=True, errors="replace")
            refusals.extend([line for line in ended.stderr.splitlines() if "error" in line] if ended.returncode else [])
            return ended.returncode == 0

        for special, shared in product(FOR_THIS_CPU, threads):
            parts = [str(Path(scratch) / f"{name}.o") for name in names]
            options = [compiler, *FLAGS, *special, *shared]
            commands = [[*options, "-c", str(FOLDER / name), "-o", to] for name, to in zip(names, parts, strict=True)]
            with ThreadPoolExecutor(len(names)) as pool:
                if not all(pool.map(compiled, commands)):
                    continue
            whole = Path(scratch) / "library.so"
            if compiled([*options, "-shared", *parts, "-o", str(whole), "-lm", *LINKING]):
                whole.replace(path)
                return True
    log.warning("C loops are left out: %s: %s", compiler, refusals[0] if refusals else "no reason given")
    return False


def _loaded(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged, or in a folder from which nothing may be run
        return None


def _runs_nothing(folder: Path) -> bool:
    """Return whether a folder's file system forbids running code from it."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def _from_elsewhere(
    path: Path | None, compiler: str = "", names: Sequence[str] = (), threads: Sequence[tuple[str, ...]] = ()
) -> ctypes.CDLL | None:
    """Load a copy of `path` from the temporary folder, or without a path compile it there for this process alone."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "library.so"
            if path is not None:
                shutil.copyfile(path, copy)
            elif not _compile(compiler, names, threads, copy):
                return None
            if library := _loaded(copy):
                return library
    except OSError as error:
        log.warning("C loops are left out: %s; TMPDIR and XDG_CACHE_HOME name folders for them", error)
        return None
    log.warning("C loops are left out: nothing may be run from %s; TMPDIR names another folder", tempfile.gettempdir())
    return None
