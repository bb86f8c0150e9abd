"""torch.compile: its tools, settings and limits, and compiled code that runs only to account for its memory.

torch has no public queries for these. Inductor's and Triton's searches for a compiler fail only in the first step, and
the limit is a setting of `torch._dynamo.config` that was renamed once (cache_size_limit).
"""

import importlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.compiler.config
from torch import Tensor

LIMIT_MESSAGE = "torch._dynamo hit config."
"""Start of torch's own warning."""


@cache
def compile_tool_missing(kind: str) -> str:
    """Return what torch.compile lacks for a kind of device, such as `Triton`, or an empty string."""
    return _missing_for_triton() if kind == "cuda" else _missing_for_cpp()


def _missing_for_triton() -> str:
    """Return what Triton lacks to build the C library of its launcher, including the headers of Python."""
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        return "Triton"
    # A broken installation fails in many ways.
    except Exception as error:
        return f"a Triton that can be imported ({error})"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (7, 0):
        return "a GPU of compute capability 7.0 (Triton has no code for older ones)"
    named = os.environ.get("CC")
    if not (shutil.which(named.split()[0]) if named else shutil.which("gcc") or shutil.which("clang")):
        return f"the C compiler CC={named}" if named else "a C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the headers of this Python (Python.h, package python3-dev)"
    return ""


def _missing_for_cpp() -> str:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:
        return ""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++ or clang++)"
    return ""


def raise_recompile_limit(limit: int) -> None:
    """Let torch compile one function for at least `limit` kinds of arguments."""
    # The old name stays an alias for some versions, and only the first that exists is set.
    config: Any = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(limit, getattr(config, name)))
            return


def choose_without_trying() -> None:
    """Let Inductor choose kernels by rules only.

    A trial of two kernels may end differently in each process, and so would their sums. Newer versions of torch do this
    under deterministic algorithms.
    """
    config: Any = importlib.import_module("torch._inductor.config")
    if hasattr(config, "deterministic"):
        config.deterministic = True


def compiled_graphs() -> int:
    """Count the graphs that torch has compiled in this process, recompilations included."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def keep_code_by_cpu() -> None:
    """Separate torch's on-disk code cache by vector width.

    For CPUs, torch caches source code (Inductor's FX graph cache, torch 2.11 to 2.13) whose loops advance by the vector
    width, but the cache key lacks the width. Code from another CPU is then compiled for this one: AVX2 loops (8 fp32)
    with AVX-512 write 32 bytes behind a tensor, and AVX-512 loops with AVX2 skip half of the numbers.
    """
    config: Any = torch.compiler.config
    width = torch.backends.cpu.get_cpu_capability()
    # Called more than once in a process, the width is in the key once.
    if not config.cache_key_tag.endswith(width):
        config.cache_key_tag += width


@contextmanager
def let_recompute_norms() -> Iterator[None]:
    """Let code compiled inside `with` recompute norms and activations for backward products.

    By default torch saves whatever a backward product reads, even if one pass over other saved tensors recomputes it. A
    Llama block then saves a fifth more than uncompiled code.
    """
    config: Any = torch._functorch.config
    before = config.ban_recompute_materialized_backward
    config.ban_recompute_materialized_backward = False
    try:
        yield
    finally:
        config.ban_recompute_materialized_backward = before


def let_vary(x: torch.Tensor) -> None:
    """Mark the length of x as dynamic, so that torch.compile compiles once even where sizes are constant."""
    torch._dynamo.mark_dynamic(x, 0)


_maker: ContextVar[Callable[[Callable[..., Any]], Callable[..., Any]] | None] = ContextVar("maker", default=None)


@contextmanager
def replace_compiler(maker: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace torch.compile by `maker` inside `with`. A dry run does so to account for the code's memory only."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def is_compiler_replaced() -> bool:
    """Return whether torch.compile is replaced."""
    return _maker.get() is not None


def compile_function(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `call` as compiled code for constant sizes."""
    maker = _maker.get()
    return maker(call) if maker is not None else torch.compile(call, dynamic=False, **options)


class _Limit(logging.Filter):
    """Passes torch's message about the recompilation limit to a callback instead of the log."""

    def __init__(self, on_limit: Callable[[], None]) -> None:
        super().__init__()
        self.on_limit = on_limit

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for the message about the limit, after calling the callback."""
        if not str(record.msg).startswith(LIMIT_MESSAGE):
            return True
        self.on_limit()
        return False


def when_recompile_limit_is_hit(on_limit: Callable[[], None]) -> None:
    """Call `on_limit` whenever torch stops recompiling a function, in place of torch's warning.

    The last caller wins.
    """
    logger = logging.getLogger("torch._dynamo.convert_frame")
    # A filter per call would add up over many models in one process.
    for old in [old for old in logger.filters if isinstance(old, _Limit)]:
        logger.removeFilter(old)
    logger.addFilter(_Limit(on_limit))


OWN_CODE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp_wrapper": False, "freezing": False}
"""Inductor settings: Python code, written for this process, not from a cache."""


Kernel = Callable[[], None]
"""Called in place of a kernel that Inductor wrote."""


class _Written(Exception):
    """Raised once Inductor has written its code, to skip compiling it."""


# AOTAutograd's partitioner decides which tensors compiled code saves for the backward pass, and Inductor's scheduler
# which buffers it allocates in what order. Neither can be queried. They emit Python that allocates and frees buffers by
# name (torch 2.11 to 2.13), and that code is run here with kernels that do nothing.
def lower(
    call: Callable[..., Any], running: Callable[[], AbstractContextManager[Any]], kernel: Callable[[], Kernel]
) -> Callable[..., Any]:
    """Return `call` as compiled code that computes nothing, for fake tensors in an active fake mode.

    `running` is entered while its passes allocate memory; `kernel` creates the stand-in for each kernel.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(OWN_CODE), torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=partial(_lower_graph, running, kernel))

    return torch.compile(call, dynamic=False, backend=backend)


def _lower_graph(running: Any, kernel: Callable[[], Kernel], graph: Any, inputs: Any, **options: Any) -> Any:
    """Replace `compile_fx_inner`: return a function that runs one pass of a block."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def keep(lowering: Any) -> None:
        code = lowering.codegen()[0]
        written.append(getattr(code, "value", code))
        raise _Written

    build = GraphLowering.compile_to_module
    # Inductor has no public stop between writing code and compiling it.
    setattr(GraphLowering, "compile_to_module", keep)  # noqa: B010  # as its type has it, it cannot be assigned
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception:
        # Inductor may wrap _Written in an error of its own. Without code the error is a real one.
        if not written:
            raise
    finally:
        setattr(GraphLowering, "compile_to_module", build)  # noqa: B010  # the same
    passes = _load_code(written[0], kernel)

    def run(arguments: list[Any]) -> Any:
        with running():
            return passes(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it: the list is emptied
    return run


REPLACED = {
    "async_compile = AsyncCompile()": "from meshwright.compat.torch_compile import kernels as async_compile",
    "torch.ops.higher_order.run_and_save_rng_state": "run_and_save_state",
    "torch.ops.higher_order.run_with_rng_state": "run_with_state",
}
"""Text in generated code that builds kernels or bypasses modes -> its stand-in."""
STATE_BYTES = 16
"""Size of a GPU generator's state in host memory."""


def _load_code(code: str, kernel: Callable[[], Kernel]) -> Callable[[list[Any]], Any]:
    from torch._inductor.codecache import PyCodeCache

    for text, stand_in in REPLACED.items():
        code = code.replace(text, stand_in)
    kernels.make = kernel
    # As Inductor loads what it has written.
    module: Any = PyCodeCache.load(code)
    # Lowering has checked sizes and alignment already.
    vars(module).update(
        empty_strided_cpu=_empty, empty_strided_cuda=_empty, reinterpret_tensor=_part, extern_kernels=_Products(),
        assert_size_stride=lambda *_: None, assert_alignment=lambda *_: None, run_and_save_state=_run_and_save_state,
        run_with_state=_run_with_state,
    )  # fmt: skip
    call: Callable[[list[Any]], Any] = module.call
    return call


class _Kernels:
    """Stand-in for the compiler of kernels."""

    make: Callable[[], Kernel]

    def cpp_pybinding(self, arguments: Sequence[str], code: str) -> Callable[..., None]:
        """Return a stand-in for a C++ loop."""
        stand_in = self.make()
        return lambda *arguments: stand_in()

    def wait(self, names: dict[str, Any]) -> None:
        """Do nothing: no kernel is being built."""


kernels = _Kernels()
"""Imported by the generated code."""


class _Products:
    """Stand-in for library kernels that write into `out`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, out: Tensor | None = None, **options: Any) -> Any:
            return getattr(torch, name)(*arguments, **options) if out is None else out

        return call


def _run_and_save_state(operator: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
    return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu"), operator(*arguments, **options)


def _run_with_state(state: Tensor, operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return operator(*arguments, **options)


def _empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


def _part(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(sizes, strides, x.storage_offset() + offset)
