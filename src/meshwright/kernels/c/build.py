"""Compile this folder's C sources for this processor, once, and keep the libraries in the user's cache.

A library's name is a digest of its inputs (sources, headers, compiler, options, processor) and one of its bytes. A
shared home thus serves many kinds of machines, another release builds its own, and a damaged file is not loaded.

Functions and structs of the sources are read for ctypes from the sources: nothing is declared twice. Read are functions
without `static` that begin a line, and `typedef struct { ... } Name;`, as this folder writes them.
"""

import ctypes
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.spec import user_cache

FOLDER = Path(__file__).parent
TYPES: dict[str, Any] = {"void": None, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
POINTER = ctypes.c_void_p
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"^(?!static\b)(\w+) (\w+)\(([^)]*)\) \{", re.MULTILINE)
_DECLARATOR = re.compile(r"(\**)(\w+)(?:\[(\d+)\])?")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fopenmp-simd")
LINKING = () if sys.platform == "darwin" else ("-Wl,-Bsymbolic",)  # no name of another library takes the place of ours
FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",))
THREADS: tuple[tuple[str, ...], ...] = (("-fopenmp",), ())
"""Alternatives, of which the first that the compiler accepts is used. FOR_THIS_CPU has alternatives too."""
IDENTITY = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of /proc/cpuinfo that decide which machine code runs."""
DIGITS = 32
"""Hexadecimal digits of a digest in a file's name."""


def declare_functions(library: ctypes.CDLL, names: Sequence[str]) -> None:
    """Give the library's functions the argument types and results that the C sources `names` define."""
    for name in names:
        for result, function_name, parameters in _FUNCTION.findall(_read(FOLDER / name)):
            function = getattr(library, function_name)
            function.argtypes = [_parameter_type(text) for text in parameters.split(",") if text != "void"]
            function.restype = TYPES[result]


@cache
def structure(name: str) -> type[ctypes.Structure]:
    """Return the ctypes class of a C struct, such as `Panels`. Its fields are named as in C."""
    opening = re.compile(rf"typedef struct \{{([^}}]*)\}} {name};")
    for path in sorted(FOLDER.glob("*.[ch]")):
        if match := opening.search(_read(path)):
            fields = [field for line in match[1].split(";")[:-1] for field in _fields(line)]
            return type(name, (ctypes.Structure,), {"_fields_": fields})
    raise KeyError(f"no C source declares struct {name}")


@cache
def _read(path: Path) -> str:
    """Return a source without its comments."""
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


def _parameter_type(text: str) -> Any:
    return POINTER if "*" in text else TYPES[text.removeprefix("const ").split()[0]]


def _fields(line: str) -> list[tuple[str, Any]]:
    """Return the names and types that one line of a struct declares, such as `const float *cosine, *sine`."""
    base, declarators = line.strip().removeprefix("const ").split(maxsplit=1)
    fields = []
    for declarator in declarators.split(","):
        match = _DECLARATOR.fullmatch(declarator.strip())
        assert match is not None, f"not a field of a struct: {line.strip()}"
        stars, name, count = match.groups()
        kind = POINTER if stars else TYPES[base] if base in TYPES else structure(base)
        fields.append((name, kind * int(count) if count else kind))
    return fields


log = logging.getLogger(__name__)


def load(*names: str, threads: Sequence[tuple[str, ...]] = THREADS) -> ctypes.CDLL | None:
    """Load the library of C sources of this folder, compiled now unless an earlier process did.

    Args:
        threads: Alternative options, of which the first that the compiler accepts is used.

    Returns None without a C compiler that accepts the sources, and where nothing may be run from a file.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    library = _load_from_cache(compiler, names, threads)
    if library is not None:
        declare_functions(library, names)
    return library


def _load_from_cache(compiler: str, names: Sequence[str], threads: Sequence[tuple[str, ...]]) -> ctypes.CDLL | None:
    key = _digest_inputs(compiler, names, threads)
    try:
        folder = user_cache.default_root() / "loops"
        # Looked for without the lock first: nearly every start finds the library.
        path = _find(folder, key)
        if path is None:
            with user_cache.lock(folder / key):
                # Another process may have compiled it while this one waited.
                path = _find(folder, key)
                if path is None:
                    for damaged in folder.glob(f"{key}-*.so"):  # its name is not that of its bytes
                        damaged.unlink(missing_ok=True)
                    _tell(f"compiling C loops for this processor, once, into {folder}")
                    path = _compile(compiler, names, threads, folder, key)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        _tell(f"C loops are compiled at each start: {reason}; set XDG_CACHE_HOME to a folder with room")
        return _load_temporary(lambda scratch: _compile(compiler, names, threads, scratch, key))
    if path is None or (library := _open(path)):
        return None if path is None else library
    _tell(
        f"C loops are copied at each start: they cannot be loaded from {folder}; if it is mounted noexec, set "
        "XDG_CACHE_HOME to another folder"
    )
    return _load_temporary(lambda scratch: Path(shutil.copy(path, scratch)))


def _load_temporary(write: Callable[[Path], Path | None]) -> ctypes.CDLL | None:
    """Load a library that `write` puts into a temporary folder, for this process alone."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            path = write(Path(scratch))
            if path is None or (library := _open(path)):
                return None if path is None else library
    except OSError as error:
        _tell(f"C loops are left out: {error}; TMPDIR and XDG_CACHE_HOME name folders for them")
    else:
        _tell(
            f"C loops are left out: they cannot be loaded from {tempfile.gettempdir()} either; if it is mounted "
            "noexec, TMPDIR names another folder"
        )
    return None


def _digest_inputs(compiler: str, names: Sequence[str], threads: Sequence[tuple[str, ...]]) -> str:
    """Return the key of a library.

    A compiler's size and time stand for its version: asking it would start a process at each start.
    """
    program = Path(compiler).resolve()
    stat = program.stat()
    options = FLAGS, LINKING, FOR_THIS_CPU, list(threads)
    digest = hashlib.sha256(repr((str(program), stat.st_size, stat.st_mtime_ns, options, processor())).encode())
    for path in sorted({*FOLDER.glob("*.h"), *(FOLDER / name for name in names)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _digest_bytes(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]


def processor() -> str:
    """Return a string that identifies this processor's kind and instructions."""
    kind = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join(kind + [line for line in lines if line.partition(":")[0].strip() in IDENTITY])


def _find(folder: Path, key: str) -> Path | None:
    """Return the cached library of a key whose bytes are those that were compiled."""
    return next((path for path in folder.glob(f"{key}-*.so") if path.stem == f"{key}-{_digest_bytes(path)}"), None)


def _compile(
    compiler: str, names: Sequence[str], threads: Sequence[tuple[str, ...]], folder: Path, key: str
) -> Path | None:
    """Write a library into `folder`, complete or not at all. Returns None if the compiler refuses the sources."""
    refusals = []

    def compiles(words: list[str]) -> bool:
        ended = subprocess.run(words, capture_output=True, check=False, text=True, errors="replace")
        refusals.extend([line for line in ended.stderr.splitlines() if "error" in line] if ended.returncode else [])
        return ended.returncode == 0

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:  # beside the library: a rename is atomic
        library = Path(scratch) / "library.so"
        for special, shared in product(FOR_THIS_CPU, threads):
            parts = [str(Path(scratch) / f"{name}.o") for name in names]
            options = [compiler, *FLAGS, *special, *shared]
            commands = [[*options, "-c", str(FOLDER / name), "-o", to] for name, to in zip(names, parts, strict=True)]
            # Side by side: the first start waits for the compiler.
            with ThreadPoolExecutor(len(names)) as pool:
                if not all(pool.map(compiles, commands)):
                    continue
            if compiles([*options, "-shared", *parts, "-o", str(library), "-lm", *LINKING]):
                return library.replace(folder / f"{key}-{_digest_bytes(library)}.so")
    _tell(f"C loops are left out: {compiler}: {refusals[0] if refusals else 'no reason given'}")
    return None


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # a folder mounted noexec, or a library that it needs is missing on this machine
        _tell(f"C loops: {error}")
        return None


@cache
def _tell(notice: str) -> None:
    """Log a notice once, however many libraries it is about."""
    log.warning(notice)
