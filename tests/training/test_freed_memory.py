"""Whether glibc keeps large blocks that are freed, seen by the addresses it gives."""

import platform
import subprocess
import sys

import pytest

from meshwright import compat

PROGRAM = """
import torch
from meshwright import compat
print(compat.keep_freed_memory())
sizes = [(torch.empty(2**26, dtype=torch.uint8), torch.empty(2**12, dtype=torch.uint8)) for _ in range(2)]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
for large, _ in sizes:
    large.fill_(1)
before = resident()
del large
sizes = [small for _, small in sizes]
print(before - resident() > 2**26)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
@pytest.mark.parametrize("name, value", [("", ""), ("MALLOC_MMAP_THRESHOLD_", "16777216"),
                                         ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=16777216")])  # fmt: skip
def test_freed_memory_is_kept_unless_the_environment_says_how_much(name: str, value: str) -> None:
    environment = {name: value} if name else {}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": ":".join(sys.path), **environment}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert run.stdout.split() == ([str(False), str(True)] if name else [str(True), str(False)])


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not compat.keep_freed_memory()
