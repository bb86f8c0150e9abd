"""Run a program and see what it and its children hold in memory at most."""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 0.05
"""Time between two looks. Two in a row must see it: for the moment in which a process starts another one, the new one
is the old one's memory once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How a program ended, and the most it held."""

    status: int
    seconds: float
    peak_bytes: int
    """Largest sum over the process and its descendants, pages shared between them counted once."""
    stdout: str
    stderr: str


def watch(command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Watched:
    """Run a command to its end. Linux: memory is read from /proc; elsewhere it is the largest single process."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start, peak, before = time.perf_counter(), 0, 0
        env = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env)
        while True:
            now = tree_bytes(process.pid)
            peak, before = max(peak, min(before, now)), now
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PERIOD_S)
                break
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        return Watched(
            status=process.returncode, seconds=seconds, peak_bytes=peak, stdout=out.read(), stderr=err.read()
        )


def tree_bytes(pid: int) -> int:
    """Bytes resident in a process and all its descendants now; 0 where /proc cannot say."""
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        total += _proportional_bytes(process)
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += [int(child) for child in task.read_text().split()]
    return total


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), flags=re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0
