"""Instructions that a code costs a GPU, counted in the machine code of loops: few rows wait for memory only if they are
few."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.cross_compiled import machine_code, recorded
from tests.kernels.kernel_samples import ROWS

CODES = {0: 8, 1: 8, 2: 4}
"""Codes of a word, by the form of codes."""


def loop_instructions(text: str) -> int:
    """Instructions of the longest loop: from the target of a branch backwards to the branch."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", text)
    longest = 0
    for address, instruction in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < int(address, 16):
            inside = [at for at, _ in lines if int(target[1], 16) <= int(at, 16) <= int(address, 16)]
            longest = max(longest, len(inside))
    return longest


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("row", "most"),
    [
        ("packed, 1 row, whole zeros", 8.5),  # 7.3 with Triton 3.9; 5.9 without zeros
        ("packed, 1 row, nf4", 9.0),  # 7.8
        ("packed, 1 row, e4m3", 9.2),  # 7.9
        ("packed, 64 rows", 11.0),  # 9.4
    ],
)
@pytest.mark.long
def test_a_code_costs_few_instructions(row: str, most: float) -> None:
    """On sm_90, for each thread: the rate of instructions is then below that of memory (decision 51)."""
    launch = next(one for one in recorded(ROWS[row].launch) if "packed_rows" in one.name)
    options = launch.arguments
    words = options["WORDS"] if "WORDS" in options else options["INNER"] // CODES[options["CODES"]]
    codes = words * options["COLUMNS"] * CODES[options["CODES"]] / (32 * launch.options["num_warps"])
    assert loop_instructions(machine_code(launch, 90).text) / codes < most
