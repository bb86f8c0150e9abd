"""Launches of Triton kernels recorded without a GPU, and compiled for GPUs that are not here.

A launch is recorded from the function that makes it, so that types, constants and options are those of a real run.
Triton itself then decides what to compile: a stand-in for its driver names a GPU, and nothing is launched. Triton
compiles for any target; the assembler and the tool that reads its output lie in the wheel.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from meshwright.kernels.triton import blocks

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C programming guide, table of
capabilities)."""
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Along each axis of a grid (the same table)."""
PROCESSORS = 132
"""Multiprocessors of the GPU that launches are made for (H100)."""
INTEGERS = {"1": 1, "16 k": 16, "odd": 17, "64 bit": 2**40 + 16, "64 bit odd": 2**40 + 1}
"""What Triton specializes an integer argument for: 1 is a constant, a multiple of 16 is known as one, and a number of
more than 31 bits is an i64."""

SMALL = {"experts"}
"""Arguments that no launch has of more than 31 bits."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stands for a tensor in a launch. Triton asks for its dtype, and whether its address is a multiple of 16."""

    dtype: torch.dtype
    address: int = 0

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its arguments by name, tensors as `Pointer`, and its options (warps, stages)."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def integers(self) -> list[str]:
        """Names of arguments that Triton specializes by value."""
        plain = {parameter.name for parameter in self.kernel.params if not parameter.is_constexpr}
        return [name for name, argument in self.arguments.items() if type(argument) is int and name in plain]

    def changed(self, **arguments: Any) -> "Launch":
        return replace(self, arguments=self.arguments | arguments)


def recorded(launcher: Callable[[], object], capability: int = 90) -> list[Launch]:
    """Call a launcher on tensors without values -> the launches that it makes on a GPU of a compute capability. None is
    run."""
    launches: list[Launch] = []

    def record(kernel: Any, *inputs: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        bound = kernel.signature.bind(*inputs, **{name: named[name] for name in named if name not in options})
        arguments = {name: _as_pointer(value) for name, value in bound.arguments.items()}
        launches.append(Launch(kernel, arguments, options, tuple(grid)))

    before = JITFunction.run, blocks.INTERPRETED_PROGRAMS, blocks.INTERPRETED_CAPABILITY
    JITFunction.run, blocks.INTERPRETED_PROGRAMS, blocks.INTERPRETED_CAPABILITY = record, PROCESSORS, capability
    try:
        launcher()
    finally:
        JITFunction.run, blocks.INTERPRETED_PROGRAMS, blocks.INTERPRETED_CAPABILITY = before
    return launches


def _as_pointer(value: Any) -> Any:
    return Pointer(value.dtype) if isinstance(value, Tensor) else value


def specializations(launch: Launch, alone: Iterable[str] = INTEGERS) -> Iterator[tuple[str, Launch]]:
    """What Triton may make of a launch with other numbers and addresses: each integer argument at each kind of INTEGERS
    that may come `alone` while the others stay as they are, all of them at once, and addresses that are odd."""
    names = launch.integers
    changes: dict[str, dict[str, Any]] = {"as launched": {}}
    for word, number in INTEGERS.items():
        able = [name for name in names if number < 2**31 or name not in SMALL]
        changes |= {f"{name} = {word}": {name: number} for name in able if word in alone}
        changes[f"all = {word}"] = dict.fromkeys(able, number)
    pointers = {name: replace(p, address=2) for name, p in launch.arguments.items() if isinstance(p, Pointer)}
    seen = set()
    for word, change in changes.items():
        special = launch.changed(**change)
        kinds = tuple(_kind(special.arguments[name]) for name in names)
        if kinds not in seen:
            yield word, special
        seen.add(kinds)
    yield "odd addresses", launch.changed(**pointers)


def _kind(number: int) -> tuple[bool, bool, bool]:
    return number == 1, number % 16 == 0, number < 2**31


@contextmanager
def target(capability: int) -> Iterator[None]:
    """Triton compiles for a GPU of this compute capability inside."""

    class StandIn:
        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    before = driver._active
    driver.set_active(StandIn())
    try:
        yield
    finally:
        driver._active = before


def front_end(source: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> Any:
    """Compile as far as Triton's own IR: what Python code of a kernel can get wrong shows there, in milliseconds."""
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(parsed)
    return source.make_ir(target, parsed, codegen, backend.get_module_map(), context)


def compiled(launch: Launch, capability: int, compiler: Callable[..., Any] = triton.compile) -> Any:
    """What Triton compiles for a launch on a GPU of a compute capability, as 90; specialized as a launch is."""
    kernel = launch.kernel
    with target(capability):
        cache = kernel.device_caches[capability][0]
        kernel.compile = compiler
        try:
            return kernel.warmup(**launch.arguments, **launch.options, grid=launch.grid)
        finally:
            kernel.compile = triton.compile
            cache.clear()  # it does not tell what another compiler made


def failures(
    launch: Launch, capability: int, compiler: Callable[..., Any] = front_end, alone: Iterable[str] = INTEGERS
) -> dict[str, str]:
    """Specializations of a launch that Triton does not compile, and the last line of what it says."""
    messages = {}
    for word, special in specializations(launch, alone):
        try:
            compiled(special, capability, compiler)
        except Exception as failure:  # what a compiler raises has many types
            messages[f"{launch.name}, sm_{capability}, {word}"] = f"{failure}".strip().rpartition("\n")[2]
    return messages


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What the assembler made of a kernel."""

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


def machine_code(launch: Launch, capability: int) -> MachineCode:
    """The kernel for a compute capability, as 90."""
    binary = compiled(launch, capability)
    return _read(binary.asm["cubin"], binary.metadata.shared)


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
