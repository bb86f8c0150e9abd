"""C sources are compiled once for each user and processor, whatever happens to the cache."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from meshwright.kernels.c import build, serving_library, training_rows
from meshwright.kernels.c.serving_library import Loops, Panels

SOURCES = ("rows.c", "block.c", "attention.c", "panels.c")
ALL = """
from meshwright.kernels.c import serving_library, training_rows
print(serving_library.compiled() is not None and training_rows.is_compiled())"""
ONE = """
from meshwright.kernels.c import build
print(build.load("rows.c") is not None)"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line whenever it is started, and an empty cache."""
    program = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert program is not None, "the tests need a C compiler"
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "cc"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/starts\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "starts"


def starts(counted: Path) -> int:
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def process(program: str = ONE) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def libraries(counted: Path) -> list[Path]:
    return sorted((counted.parent / "cache" / "meshwright" / "loops").glob("*.so"))


def test_the_second_process_starts_no_compiler(counted: Path) -> None:
    text, notes = process(ALL).communicate()
    assert text == "True\n" and notes.count("compiling C loops for this processor, once") == 1
    count = len(serving_library.STEPS) + len(training_rows.STEPS) + 2
    assert starts(counted) == count, "each source, and the link of each library"
    assert process(ALL).communicate() == ("True\n", "")
    assert starts(counted) == count


def test_processes_that_start_at_once_compile_once(counted: Path) -> None:
    processes = [process() for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["True\n"] * 3
    assert starts(counted) == 2
    (path,) = libraries(counted)
    assert [entry for entry in path.parent.iterdir() if entry.suffix != ".lock"] == [path]


def test_without_locks_the_last_of_several_builders_wins(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.user_cache, "lock", lambda _: nullcontext())
    with ThreadPoolExecutor(4) as pool:
        assert None not in pool.map(build.load, ["rows.c"] * 4)
    assert len(libraries(counted)) == 1


@pytest.mark.parametrize("damage", ["cut short", "bytes in the middle"])
def test_a_damaged_library_is_compiled_again(damage: str, counted: Path) -> None:
    assert build.load("rows.c") is not None
    (path,) = libraries(counted)
    sound = path.read_bytes()
    half = len(sound) // 2
    path.unlink()  # or the library that is loaded would change
    path.write_bytes(sound[:half] if damage == "cut short" else sound[:half] + b"\xff\x00" + sound[half + 2 :])
    assert build.load("rows.c") is not None and starts(counted) == 4
    assert build.load("rows.c") is not None and starts(counted) == 4


def test_another_source_option_compiler_or_processor_is_another_library(
    counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.load("rows.c") is not None
    assert build.load("rows.c", threads=build.THREADS[1:]) is not None
    monkeypatch.setattr(build, "processor", lambda: "another one")
    assert build.load("rows.c") is not None
    wrapper = counted.parent / "bin" / "cc"
    os.utime(wrapper, (1, 1))
    assert build.load("rows.c") is not None
    assert starts(counted) == 8


@pytest.mark.parametrize("kind", ["no folder", "no home"])
def test_a_cache_that_cannot_be_written_is_named(
    kind: str, counted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "no folder":
        (counted.parent / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(counted.parent / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    assert build.load("rows.c") is not None
    assert build.load("rows.c") is not None
    assert caplog.text.count("C loops are compiled at each start") == 1 and "XDG_CACHE_HOME" in caplog.text
    assert "Errno" not in caplog.text


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_may_be_read_alone_is_used(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load("rows.c") is not None

    def refused(_: Path) -> None:
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(build.user_cache, "lock", refused)
    assert build.load("rows.c") is not None and starts(counted) == 2


def test_where_nothing_may_be_run_a_copy_is_loaded(
    counted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a file system that is mounted noexec."""
    cache = counted.parent / "cache"
    open_library = ctypes.CDLL

    def open_elsewhere(name: str) -> ctypes.CDLL:
        if name.startswith(str(cache)):
            raise OSError("failed to map segment from shared object")
        return open_library(name)

    monkeypatch.setattr(build.ctypes, "CDLL", open_elsewhere)
    assert build.load("rows.c") is not None and build.load("rows.c") is not None
    assert starts(counted) == 2, "the copy costs no compiler"
    notice = f"cannot be loaded from {cache}/meshwright/loops; if it is mounted noexec, set XDG_CACHE_HOME"
    assert caplog.text.count(notice) == 1
    monkeypatch.setattr(build.tempfile, "tempdir", str(cache))
    assert build.load("rows.c") is None
    assert f"cannot be loaded from {cache} either; if it is mounted noexec, TMPDIR" in caplog.text


def test_a_compiler_that_takes_nothing_is_quoted(
    counted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-DWIDE=this is no number",))
    assert build.load("panels.c") is None
    assert "C loops are left out" in caplog.text and "error" in caplog.text


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="machine code of x86-64")
@pytest.mark.parametrize("source", SOURCES)
def test_vectors_are_as_wide_as_registers(source: str, tmp_path: Path) -> None:
    """A compiler takes ten times as long over vectors that are wider, and makes ten times as much of
    it: 216,000 bytes of panels.c, 251,000 of attention.c."""
    program = shutil.which("cc") or shutil.which("gcc")
    made = tmp_path / "made.o"
    words = [str(program), *build.FLAGS, "-fopenmp", "-march=x86-64-v3", "-c", str(build.FOLDER / source)]
    subprocess.run([*words, "-o", str(made)], check=True, capture_output=True)
    assert made.stat().st_size < (110_000 if source == "attention.c" else 40_000)


@pytest.mark.parametrize("narrow", [("-U__AVX512F__",), ("-U__AVX512F__", "-U__AVX__")], ids=["eight", "four"])
def test_a_serving_step_in_vectors_of_other_processors(
    narrow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products have the same bits, since a lane of a vector is one sum. Attention adds lanes up in another order."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *narrow))
    made = build.load(*serving_library.STEPS)
    assert made is not None
    loops, widest = Loops(made), serving_library.compiled()
    assert widest is not None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 96, generator=generator)  # five panels: one has no partner
    scales, zeros = (torch.rand(80, 3, generator=generator) for _ in range(2))
    codes = torch.randint(0, 16, (80, 96), generator=generator, dtype=torch.uint8)
    table = torch.randn(16, generator=generator)
    matrices = [Panels.of_numbers(weight), Panels.of_numbers(weight.bfloat16())]
    if loops.has_codes:
        matrices.append(Panels.of_codes(codes, scales, zeros, table, 32, None))
    with torch.no_grad():
        for panels in matrices:
            assert panels is not None
            for rows in (1, 2, 3, 4, 7, 8, 9, 20):
                x = torch.randn(rows, 96, generator=generator)
                assert torch.equal(loops.multiply(x, panels), widest.multiply(x, panels))
            if panels.table is not None:
                assert torch.equal(loops.restored(panels), widest.restored(panels))
        for width in (20, 32, 64, 72, 96, 128, 192):
            q, keys = torch.randn(3, 4, width, generator=generator), torch.randn(5, 4, 2, width, generator=generator)
            last = torch.tensor([16, 17, 18])
            attended = [
                each.attend(
                    q, keys, keys.flip(0).contiguous(), None, torch.arange(5), torch.zeros(3, dtype=torch.int64), last,
                    19, width=width, window=0, scale=width**-0.5,
                )
                for each in (loops, widest)
            ]  # fmt: skip
            torch.testing.assert_close(*attended, rtol=1e-5, atol=1e-6)
