"""The count of every block of memory, against blocks whose sizes are known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.allocations import build, missing, preloaded

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PROGRAM = """
import ctypes, json, mmap, threading
from benchmarks.allocations import counter

MB, c, libc = 2**20, counter(), ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "aligned_alloc"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.realloc.argtypes = ctypes.c_void_p, ctypes.c_size_t
libc.free.argtypes = (ctypes.c_void_p,)
found = {}

def case(name, take, give):
    before = c.mark()
    block = take()
    held = c.live_bytes - before
    give(block)
    found[name] = [c.peak_bytes - before, held, c.live_bytes - before]

def posix():
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), 64, 5 * MB) == 0
    return block.value

def elsewhere(block):
    thread = threading.Thread(target=libc.free, args=(block,))
    thread.start()
    thread.join()

case("malloc", lambda: libc.malloc(3 * MB), libc.free)
case("calloc", lambda: libc.calloc(3, MB), libc.free)
case("grown", lambda: libc.realloc(libc.malloc(MB), 3 * MB), libc.free)
case("aligned", lambda: libc.aligned_alloc(4096, 3 * MB), libc.free)
case("posix", posix, libc.free)
case("another thread", lambda: libc.malloc(3 * MB), elsewhere)
case("mapping", lambda: mmap.mmap(-1, 3 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), lambda block: block.close())
case("small", lambda: libc.malloc(1000), libc.free)
before = c.mark()
for _ in range(20000):
    libc.free(libc.malloc(17000))
found["reused"] = [c.peak_bytes - before, 0, c.live_bytes - before]
print(json.dumps(found))
"""


def test_blocks_of_known_sizes(tmp_path: Path) -> None:
    """(peak, while it is held, afterwards) of each way to take memory; other blocks of Python's come to less."""
    environment = {**os.environ, **preloaded(build(tmp_path)), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    expected = {name: (3, 3, 0) for name in ("malloc", "calloc", "grown", "aligned", "another thread", "mapping")}
    expected |= {"posix": (5, 5, 0), "small": (0, 0, 0), "reused": (0, 0, 0)}
    for name, sizes in expected.items():
        assert document[name] == pytest.approx([size * 2**20 for size in sizes], abs=200_000), name
