"""Kernels compiled for GPUs that are not here, and what the machine code says of its use of them.

Triton compiles for any target; the assembler and the tool that reads its output lie in the wheel.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C programming guide, table of
capabilities)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A kernel with the types and constants of a launch in training."""

    kernel: Any
    types: dict[str, str]
    """Of pointers (`*bf16`) and of what is no i32; the rest are i32, or constants."""
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    products: bool = False
    """Whether tensor cores must be used."""
    unaligned: tuple[str, ...] = ()
    """Integers that are no multiple of 16."""
    whole: bool = False
    """Whether products are of 8-bit whole numbers."""


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What the assembler said."""

    shared: int
    registers: int
    spilled: int
    """Bytes of registers that went to memory, each thread."""
    text: str

    def has_tensor_cores(self, capability: int, whole: bool = False) -> bool:
        """Whether products are those of the tensor cores: HMMA, on Hopper by warp groups, on Blackwell UTC..MMA; of
        whole numbers IMMA likewise."""
        kinds = {80: r"\bIMMA", 90: r"\bIGMMA", 100: r"\bUTCIMMA"} if whole else _PRODUCTS
        return re.search(kinds[capability], self.text) is not None


_PRODUCTS = {80: r"\bHMMA", 90: r"\bHGMMA", 100: r"\bUTC\w*MMA"}


def compiled(sample: Sample, capability: int) -> MachineCode:
    """The kernel for a compute capability, as 90."""
    names = sample.kernel.arg_names
    types = {name: sample.types.get(name, "i32") for name in names}
    types |= dict.fromkeys(sample.constants, "constexpr")
    constants = {(names.index(name),): value for name, value in sample.constants.items()}
    aligned = [
        n for n, name in enumerate(names)
        if types[name].startswith("*") or (types[name] == "i32" and name not in sample.unaligned)
    ]  # fmt: skip
    source = ASTSource(
        sample.kernel, types, constexprs=constants, attrs={(n,): [["tt.divisibility", 16]] for n in aligned}
    )
    options = {"num_warps": sample.warps, "num_stages": sample.stages}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(found.asm["cubin"], found.metadata.shared)


def _read(cubin: bytes, shared: int) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("--dump-resource-usage", file.name)
        text = _tool("--dump-sass", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    stack, local = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("STACK", "LOCAL"))
    spills = len(re.findall(r"\b(STL|LDL)\b", text))
    return MachineCode(shared, registers, max(stack, local) if spills else 0, text)


def _tool(*arguments: str) -> str:
    finished = subprocess.run([_cuobjdump(), *arguments], capture_output=True, text=True, check=True)
    return finished.stdout


@cache
def _cuobjdump() -> str:
    return str(next(Path(triton.__file__).parent.rglob("cuobjdump")))
