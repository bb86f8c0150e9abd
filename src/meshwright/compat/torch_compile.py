"""What torch.compile needs of a machine, what its backward passes keep, how often it may compile one function, what it
says when that is used up, and for which CPU it keeps code on disk.

Of this torch has no public question: Inductor's and Triton's own searches for a compiler end in an exception in the
first step, and the limit is a setting of `torch._dynamo.config` whose name has changed once (cache_size_limit).
"""

import importlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.compiler.config

LIMIT_SAID = "torch._dynamo hit config."
"""How torch's own warning begins."""


@cache
def compile_tool_missing(kind: str) -> str:
    """What torch.compile lacks for a kind of device, as `Triton`; empty where it has all."""
    return _missing_for_triton() if kind == "cuda" else _missing_for_cpp()


def _missing_for_triton() -> str:
    """Triton builds a small C library for its launcher, with the headers of this Python."""
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        return "Triton"
    except Exception as error:  # a broken installation fails in many ways
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
    """Let torch compile a function for at least so many kinds of arguments."""
    config: Any = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(limit, getattr(config, name)))
            return


def choose_without_trying() -> None:
    """Have Inductor choose kernels by rules alone: which of two is faster in a trial differs between processes, and so
    would their sums. Newer versions of torch do so themselves when asked for deterministic algorithms."""
    config: Any = importlib.import_module("torch._inductor.config")
    if hasattr(config, "deterministic"):
        config.deterministic = True


def compiled_graphs() -> int:
    """Count the graphs that torch has compiled in this process; rises with each compilation and each recompilation."""
    counted: Any = sys.modules.get("torch._dynamo.utils")
    return counted.counters["stats"]["unique_graphs"] if counted else 0


def keep_code_by_cpu() -> None:
    """Have torch keep the code of each width of vectors apart on disk.

    Of a CPU's code it keeps the source (Inductor's FX graph cache, torch 2.11 to 2.13), in which loops advance by the
    width. It looks for it without the width, and compiles what it finds for the CPU that asks: loops of AVX2 (8 fp32)
    write 32 bytes behind a tensor with AVX-512, and loops of AVX-512 leave out half of the numbers with AVX2.
    """
    config: Any = torch.compiler.config
    width = torch.backends.cpu.get_cpu_capability()
    if not config.cache_key_tag.endswith(width):
        config.cache_key_tag += width


@contextmanager
def keeping_less() -> Iterator[None]:
    """What is compiled inside makes results of norms and activations again where a backward product needs them.

    By torch's own rule whatever a product of the backward pass reads is kept, though one pass over its neighbours,
    which are kept as well, makes it: a Llama block then keeps a fifth more than uncompiled code.
    """
    config: Any = torch._functorch.config
    before = config.ban_recompute_materialized_backward
    config.ban_recompute_materialized_backward = False
    try:
        yield
    finally:
        config.ban_recompute_materialized_backward = before


def let_vary(x: torch.Tensor) -> None:
    """The length of x will differ from call to call: torch.compile then compiles once for all, also where it was told
    that sizes are constant."""
    torch._dynamo.mark_dynamic(x, 0)


_maker: ContextVar[Callable[[Callable[..., Any]], Callable[..., Any]] | None] = ContextVar("maker", default=None)


@contextmanager
def compiled_by(maker: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, `maker` takes the place of torch.compile: a dry run's, which wants the memory of the code alone."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def stands_in() -> bool:
    """Whether something does."""
    return _maker.get() is not None


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`call` as compiled code for constant sizes."""
    maker = _maker.get()
    return maker(call) if maker is not None else torch.compile(call, dynamic=False, **options)


class _Limit(logging.Filter):
    """Gives what torch says of a limit that was hit to whoever wants to say it."""

    def __init__(self, said: Callable[[], None]) -> None:
        super().__init__()
        self.said = said

    def filter(self, record: logging.LogRecord) -> bool:
        """False: said otherwise."""
        if not str(record.msg).startswith(LIMIT_SAID):
            return True
        self.said()
        return False


def when_recompile_limit_is_hit(said: Callable[[], None]) -> None:
    """Call `said` each time torch gives up compiling a function anew, in place of its own warning; the last caller
    counts."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    for one in [one for one in logger.filters if isinstance(one, _Limit)]:
        logger.removeFilter(one)
    logger.addFilter(_Limit(said))
