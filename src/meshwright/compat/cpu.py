"""CPU features that torch and Python have no names for: 16-bit matrix units, the allocator, oneDNN's fp32 products.

torch's `mm` calls oneDNN when fp32 matrices may be rounded to bf16 inside
(`torch.backends.mkldnn.matmul.fp32_precision`). oneDNN rounds them only where that is faster, with AMX. On other
processors it multiplies in fp32 and reads transposed operands in place. `fp32_products_are_exact` tests that. The
setting is global to the process, so it is changed for single calls only.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Constants of malloc.h."""
ROUNDED = 1e-5
"""Relative error (norms) that indicates rounding: fp32 has 1e-6, bf16 2e-3."""
CACHED_PRODUCTS: Final = 128
"""Cached products, one per combination of sizes. A model with one batch shape has some tens."""
CACHE_VARIABLES: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
"""oneDNN's environment variables. It reads the first that is set, at its first product."""


def _cpu_supports(operation: str) -> bool:
    query = getattr(torch.ops.mkldnn, operation, None)
    return bool(query()) if query is not None else False


HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""True if torch's own x86 code uses 512-bit vectors. Evaluated once, since the compiler cannot trace it."""
HAS_VECTORS = HAS_WIDE_VECTORS or torch.backends.cpu.get_cpu_capability() == "AVX2"
"""True if torch's own x86 code uses vectors of at least 256 bits."""
_WITHOUT_BF16 = frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"))
"""Values of ONEDNN_MAX_CPU_ISA without bf16 products."""


def has_bf16_units() -> bool:
    """Return whether oneDNN has instructions for bf16 products here.

    oneDNN reports bf16 support on any x86 CPU with AVX-512. Without such instructions it widens the operands, at a
    third of the fp32 rate.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")  # an empty one is none
    queries = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return limit.upper() not in _WITHOUT_BF16 and any(query() for query in queries if query is not None)


_CPU_MULTIPLIES = {
    torch.bfloat16: _cpu_supports("_is_mkldnn_bf16_supported") and has_bf16_units(),
    torch.float16: _cpu_supports("_is_mkldnn_fp16_supported"),
}


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of a 16-bit dtype (AVX512-BF16, AMX ...) faster than fp32 ones.

    The only query is oneDNN's `torch.ops.mkldnn._is_mkldnn_*_supported`. Unsupported dtypes run in a scalar loop of
    about 1 GFLOP/s, so a missing name counts as no.
    """
    return _CPU_MULTIPLIES.get(dtype, False)


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep large freed blocks instead of returning each to the kernel.

    Returns False without glibc, or when the environment sets the threshold (MALLOC_MMAP_THRESHOLD_, or GLIBC_TUNABLES,
    see mallopt(3)). By default every tensor above 128 KiB .. 32 MiB is mapped anew and faulted in page by page. On a
    virtual machine, a fresh 256 MB tensor is then six times slower to write than a reused one.
    """
    is_configured = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if is_configured or not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


_ONE_CALL = RLock()
"""Serializes changes of the setting, which a thread would otherwise restore to the value of another. Reentrant, since
a signal handler or dispatch mode may call in.
"""
if hasattr(os, "register_at_fork"):  # else a child had the lock and the setting of a thread that it has not
    os.register_at_fork(before=_ONE_CALL.acquire, after_in_parent=_ONE_CALL.release, after_in_child=_ONE_CALL.release)


@contextmanager
def _use_onednn() -> Iterator[None]:
    library: Any = torch.backends.mkldnn
    setting = library.matmul
    with _ONE_CALL:
        before = setting.fp32_precision
        if before == library.fp32_precision:  # it is read as what it inherits, and would inherit no more
            before = "none"
        setting.fp32_precision = "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before


def multiply_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) times b (K, N) in fp32 -> (M, N). Autocast does not touch a product with `out`."""
    out = a.new_empty(a.shape[0], b.shape[1])
    with _use_onednn():
        return torch.mm(a, b, out=out)


def add_fp32_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute total (M, N) += a (M, K) times b (K, N) in fp32, in place."""
    with _use_onednn():
        return total.addmm_(a, b)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def fp32_products_are_exact() -> bool:
    """Return whether both functions multiply in fp32 on this processor, tested once with transposed operands."""
    return _fp32_products_are_exact()


@cache
def _fp32_products_are_exact() -> bool:
    with _disable_current_modes():  # of a run without values
        kinds: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(160, 160, generator=generator, **kinds) for _ in range(2))
        for left, right in ((a, b), (a.t(), b), (a, b.t()), (a.t(), b.t())):
            exact = left.double() @ right.double()
            for product in (multiply_fp32(left, right), add_fp32_product(torch.zeros(160, 160, **kinds), left, right)):
                if (product.double() - exact).norm() > ROUNDED * exact.norm():
                    return False
    return True


def keep_few_products() -> None:
    """Limit oneDNN's cache to CACHED_PRODUCTS unless the environment sets a limit.

    With its default of 1,024, experts whose rows change in every step fill hundreds of MiB, and the gaps between these
    blocks are lost to larger tensors.
    """
    if not any(name in os.environ for name in CACHE_VARIABLES):
        os.environ[CACHE_VARIABLES[0]] = str(CACHED_PRODUCTS)
