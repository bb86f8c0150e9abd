"""Settings of torch.compile: required tools, saved activations, recompilation limit and its warning, on-disk cache.

torch has no public queries for these. Inductor's and Triton's searches for a compiler fail only in the first step, and
the limit is a setting of `torch._dynamo.config` that was renamed once (cache_size_limit).
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
    """Let torch compile one function for at least `limit` kinds of arguments."""
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
    if not config.cache_key_tag.endswith(width):
        config.cache_key_tag += width


@contextmanager
def keeping_less() -> Iterator[None]:
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
def compiled_by(maker: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace torch.compile by `maker` inside `with`. A dry run does so to account for the code's memory only."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def stands_in() -> bool:
    """Return whether torch.compile is replaced."""
    return _maker.get() is not None


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
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
