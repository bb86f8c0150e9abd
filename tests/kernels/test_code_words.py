"""Instructions that a code costs a GPU, counted in the machine code of loops: few rows wait for memory only if they are
few. And assembly, which Triton's interpreter does not run, run by hand."""

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from meshwright.kernels.triton.code_words import BF16_PAIRS, FP16_PAIRS
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


@pytest.mark.parametrize(
    ("row", "most"),
    [
        ("packed, 1 row, whole zeros", 8.5),  # 7.3 with Triton 3.9; 5.9 without zeros
        ("packed, 1 row, nf4", 9.0),  # 7.8
        ("packed, 1 row, e4m3", 9.2),  # 7.9
        ("packed, 64 rows", 6.7),  # 5.8; 5.2 without zeros
        ("packed, 128 rows", 5.2),  # 4.4
        ("packed, 128 rows, nf4", 10.2),  # 8.8
    ],
)
@pytest.mark.long
def test_a_code_costs_few_instructions(row: str, most: float) -> None:
    """On sm_90, for each thread: the rate of instructions is then below that of memory (decision 51)."""
    launch = next(
        recorded_launch for recorded_launch in recorded(ROWS[row].launch) if "packed_rows" in recorded_launch.name
    )
    options = launch.arguments
    words = options["WORDS"] if "WORDS" in options else options["INNER"] // CODES[options["CODES"]]
    codes = words * options["COLUMNS"] * CODES[options["CODES"]] / (32 * launch.options["num_warps"])
    assert loop_instructions(machine_code(launch, 90).text) / codes < most


def run_assembly(text: str, operands: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Run instructions of PTX on registers of 32 bits -> registers. Halves are numbers of a dtype; sums and products
    are rounded once."""

    def halves(word: int) -> torch.Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype).double()

    def permuted(low: int, high: int, selector: int) -> int:
        octets = (low | high << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(octets[selector >> 4 * at & 7] for at in range(4)), "little")

    def fused(a: int, b: int, c: int) -> int:
        low, high = (halves(a) * halves(b) + halves(c)).to(dtype).view(torch.int16).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    def looked_up(a: int, b: int, c: int, table: int) -> int:
        return sum((table >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1) << at for at in range(32))

    runs: dict[str, Callable[..., int]] = {
        "prmt": permuted, "fma": fused, "lop3": looked_up, "shr": lambda a, by: a >> by, "mov": lambda a: a,
    }  # fmt: skip
    registers = dict(operands)
    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            into, *inputs = (part.strip() for part in rest.split(","))
            numbers = (registers[part] if part in registers else int(part, 0) for part in inputs)
            registers[into] = runs[name.partition(".")[0]](*numbers)
    return registers


@pytest.mark.parametrize(("assembly", "dtype", "base"), [
    (BF16_PAIRS, torch.bfloat16, 128), (FP16_PAIRS, torch.float16, 1024),
])  # fmt: skip
def test_codes_cut_in_pairs_are_rounded_once(
    assembly: object, dtype: torch.dtype, base: int
) -> None:  # fmt: skip
    """Every code with every zero: S (q - Z) in fp32, then rounded."""
    text: str = getattr(assembly, "value")  # noqa: B009  # Triton's constants are untyped
    assert f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}" in text
    generator = torch.Generator().manual_seed(5)
    scales = (torch.randn(16, 2, generator=generator) * 0.01).to(dtype)

    def paired(numbers: torch.Tensor) -> int:
        low, high = numbers.to(dtype).view(torch.int16).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    for zero, scale in enumerate(scales):
        zeros = torch.tensor([zero, 15 - zero])
        words = 0x76543210, 0x0FEDCBA9 - zero
        actual = run_assembly(
            text, {"$8": words[0], "$9": words[1], "$10": paired(scale), "$11": paired(-(base + zeros))}, dtype
        )
        for code in range(8):
            numbers = torch.tensor([word >> 4 * code & 15 for word in words])
            right = ((numbers - zeros).float() * scale.float()).to(dtype)
            bits = actual[f"${code}"]
            assert (bits & 0xFFFF, bits >> 16) == tuple(x & 0xFFFF for x in right.view(torch.int16).tolist())
