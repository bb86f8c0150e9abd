"""Sums of 8-bit products are exact on any CPU. Without VNNI oneDNN adds pairs of them in 16 bits, which saturate."""

import os
import subprocess
import sys

import pytest

from meshwright import compat
from meshwright.compat import integers

EXTREMES = """
import torch
from meshwright.compat import integers
torch.manual_seed(0)
for rows, inputs in ((1, 64), (5, 256), (1, 1024), (17, 1024), (70, 1028)):
    x = torch.randint(1, 256, (rows, inputs), dtype=torch.uint8)
    codes = torch.randint(-128, 128, (48, inputs), dtype=torch.int8)
    x[0], x[-1], codes[0], codes[1] = 1, 255, -128, 127
    packed, ones, zeros = integers.pack_int8(codes), torch.ones(48), torch.zeros(48, dtype=torch.int64)
    found = integers.int8_product(x, packed, ones, zeros)
    assert torch.equal(found.double(), (x.double() - 128) @ codes.double().t()), (rows, inputs)
"""


@pytest.mark.parametrize("limit", ["", "AVX512_CORE", "AVX2", "SSE41"])
@pytest.mark.long
def test_sums_are_exact_whatever_the_instructions(limit: str) -> None:
    limits = {"ONEDNN_MAX_CPU_ISA": limit} if limit else {}
    subprocess.run([sys.executable, "-c", EXTREMES], check=True, env=os.environ | limits)


def test_a_dry_run_may_ask_first() -> None:
    integers._exact_way.cache_clear()
    with compat.fake_tensors():
        assert integers._exact_way() in ("offset", "signed", "halves")
