"""16-bit matrix units of this CPU, and its allocator, for which torch and Python have no names."""

import ctypes
import os
import platform
import sys
from typing import Final

import torch


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


M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Constants of malloc.h."""


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
