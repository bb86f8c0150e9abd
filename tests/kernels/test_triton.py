"""Every Triton kernel in the interpreter, file by file in processes of their own, and compiled for GPUs that are not
here, from one table of launches: for each kind of integer, shared memory within limits, no register spilled, tensor
cores where products are."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version

from meshwright.kernels import chooser
from meshwright.parallel import on_one_device
from meshwright.spec import Layout
from tests.model.shrunk import model, tokens

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402  # Triton may be missing
from torch._higher_order_ops import triton_kernel_wrap  # noqa: E402  # it imports Triton
from triton.runtime.jit import JITFunction  # noqa: E402  # the same

from tests.kernels.cross_compiled import (  # noqa: E402  # the same
    CAPABILITIES,
    MOST_PROGRAMS,
    SHARED_LIMIT,
    Launch,
    Pointer,
    compiled,
    failures,
    front_end,
    machine_code,
    recorded,
    target,
)
from tests.kernels.kernel_samples import ROWS, Row  # noqa: E402  # the same

NUMPY_SAYS = "ignore:Conversion of an array"
"""Of what Triton 3.6 does with its numbers."""
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCE = ROOT / "src" / "meshwright"
INTERPRETER_ONLY = {"WIDE", "INTERPRETED"}
"""Constants that a GPU has at one value only."""
one_of_three = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100))]
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreted").glob("*.py")))
@pytest.mark.long
def test_in_the_interpreter(file: str) -> None:
    if file == "poison.py":
        return
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("this Triton's interpreter is older than this numpy")
    path = str(HERE / "interpreted" / file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", NUMPY_SAYS, path]
    finished = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout and "failed" not in finished.stdout


def test_every_operation_with_a_rule_is_chosen_by_reason() -> None:
    for operation in chooser.RULES:
        actual = chooser.choice(operation, torch.device("cpu"), torch.float32)
        assert actual.by == "torch" and actual.reason == "a CPU"


def test_an_installed_package_is_no_driver() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert chooser.why_unavailable(torch.device("cuda", 0)) == "no CUDA device"
    assert "driver" in chooser._driver_problem()


def jitted(source: Path) -> Iterator[tuple[Path, str]]:
    """Files of a package, and functions in them that Triton compiles."""
    for file in sorted(source.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "triton" in text else ():
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield file, node.name


def with_helpers(kernel: JITFunction) -> Iterator[JITFunction]:
    """A kernel and the functions that it calls."""
    yield kernel
    for node in ast.walk(kernel.parse()):
        called = kernel.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(called, JITFunction) and called is not kernel:
            yield from with_helpers(called)


def launches() -> list[Launch]:
    return [launch for row in ROWS.values() for capability in (80, 90) for launch in recorded(row.launch, capability)]


def test_every_kernel_is_in_the_table() -> None:
    known = {node for launch in launches() for node in with_helpers(launch.kernel)}
    missing = []
    for file, name in jitted(SOURCE):
        module = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
        if getattr(importlib.import_module(module), name) not in known:
            missing.append(f"{module}.{name}")
    assert not missing, "add a row to tests/kernels/kernel_samples.py that launches them"
    assert len(known) > len(ROWS) / 2


def test_a_new_kernel_is_noticed(tmp_path: Path) -> None:
    for word in ("triton.jit", "jit", "triton.jit(do_not_specialize=['rows'])"):
        (tmp_path / "new.py").write_text(f"from triton import jit\n\n\n@{word}\ndef new_rows(x):\n    pass\n")
        assert list(jitted(tmp_path)) == [(tmp_path / "new.py", "new_rows")]


def test_every_branch_is_in_the_table() -> None:
    """A constant that is true or false is launched at both."""
    seen: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for launch in launches():
        for name, argument in launch.arguments.items():
            if isinstance(argument, bool) and name not in INTERPRETER_ONLY:
                seen[launch.name, name].add(argument)
    assert seen and not [key for key, values in seen.items() if len(values) == 1]


def test_grids_are_within_limits() -> None:
    for launch in launches():
        sizes = zip(launch.grid, MOST_PROGRAMS, strict=False)
        assert all(0 < size <= most for size, most in sizes), launch.name


@pytest.mark.parametrize("capability", one_of_three)
@each_row
@pytest.mark.slow
def test_integers_of_every_kind(row: Row, capability: int) -> None:
    """Each integer argument at 1, at a multiple of 16, at an odd number, and above 31 bits: what Triton makes
    constants and types of."""
    for launch in recorded(row.launch, capability):
        assert failures(launch, capability) == {}


@pytest.mark.parametrize("capability", CAPABILITIES)
@each_row
@pytest.mark.slow
def test_machine_code_for_integers_of_every_kind(row: Row, capability: int) -> None:
    """The same down to machine code: each integer at 1 alone, and all at each kind."""
    for launch in recorded(row.launch, capability):
        assert failures(launch, capability, triton.compile, alone=("1",)) == {}


@triton.jit
def planted(out, rows, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    tl.store(out + column, column * rows.to(tl.int64), mask=column < width)


def test_a_constant_without_a_type_is_noticed() -> None:
    """Triton makes an integer argument of 1 a constant, which has no `.to`."""
    launch = Launch(planted, {"out": Pointer(torch.int64), "rows": 5, "width": 64, "BLOCK": 64}, {}, (1,))
    messages = failures(launch, 90)
    assert list(messages) == ["planted, sm_90, rows = 1", "planted, sm_90, all = 1"]
    assert all("'int' object has no attribute 'to'" in message for message in messages.values())


@pytest.mark.parametrize("row", ["loss", "loss of parts"])
def test_a_targets_logit_is_read_before_its_gradient_can_lie_there(row: str) -> None:
    """Warps of a program meet in sums alone: what one reads behind the last of them, another may have written."""
    codes: list[str] = []

    def front(*arguments: Any, **options: Any) -> Any:
        module = front_end(*arguments, **options)
        codes.append(str(module))
        return module

    for launch in recorded(ROWS[row].launch):
        compiled(launch, 90, front)
    gathers = [part for code in codes for part in code.split("tt.func ") if "._gather__" in part.partition("(")[0]]
    assert gathers
    for gather in gathers:
        logit = re.search(r"tt\.load .* : !tt\.ptr<bf16>", gather)
        assert logit is not None and logit.start() < gather.index("scf.for")


@pytest.mark.parametrize("capability", one_of_three)
@each_row
@pytest.mark.long
def test_compiled_for_gpus_that_are_not_here(row: Row, capability: int) -> None:
    for launch in recorded(row.launch, capability):
        actual = machine_code(launch, capability)
        if row.fits:
            assert actual.shared <= SHARED_LIMIT[capability]
            assert actual.spilled == 0, f"{actual.registers} registers and {actual.spilled} bytes of others in memory"
        if launch.name in row.products:
            assert actual.has_tensor_cores(capability, row.whole), launch.name


def written(kernel: Any, arguments: dict[str, Any]) -> set[str]:
    """The arguments that a kernel writes to, as torch.compile finds them out; all tensors where it cannot."""
    if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):  # up to torch 2.12
        return set(triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {}))
    accesses = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
    return {write.name for write in accesses.read_writes.writes}


@each_row
def test_the_compiler_knows_what_a_kernel_writes(row: Row) -> None:
    """Where it does not, it copies every tensor that the kernel is given."""
    for launch in recorded(row.launch):
        ones = launch.changed(**dict.fromkeys(launch.integers, 1))
        for special in (launch, ones):
            arguments = {
                name: torch.empty(16, dtype=node.dtype) if isinstance(node, Pointer) else node
                for name, node in special.arguments.items()
            }
            with target(90):
                names = written(launch.kernel, arguments)
            assert names and names < {name for name, node in arguments.items() if isinstance(node, torch.Tensor)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile", ["off", "on"])
def test_compiled_blocks_launch_no_kernel(compile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler fuses plain operations itself; uncompiled blocks do launch them."""
    launched: list[str] = []

    def choose(operation: str, *_: Any) -> chooser.Implementation:
        return chooser.Implementation(operation, "triton", "asked for")

    def launch(kernel: Any, *_: Any, **__: Any) -> None:
        launched.append(kernel.__name__)

    monkeypatch.setattr(chooser, "_choices", {})
    monkeypatch.setattr(chooser, "_choose", choose)
    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    whole = on_one_device(model("llama-3.1-8b", kernels="triton"), Layout(compile=compile)).model
    words = tokens(2, 32)
    positions = torch.arange(32).unsqueeze(0)
    documents = torch.arange(2).repeat_interleave(16).repeat(2, 1)
    for packed in (None, documents):
        metadata = whole.attention_metadata(positions, 32, packed)
        x, _ = whole.layers["0"](whole.embed(words), metadata[0])
        x.sum().backward()
    torch._dynamo.reset()
    assert bool(launched) is (compile == "off"), launched
