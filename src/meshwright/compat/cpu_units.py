"""What this CPU multiplies 16-bit numbers with; torch has no public question."""

import os
import platform

import torch


def _cpu_supports(operation: str) -> bool:
    found = getattr(torch.ops.mkldnn, operation, None)
    return bool(found()) if found is not None else False


HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether torch's own code for an x86 CPU uses vectors of 512 bits; asked once, since the compiler cannot follow it."""
HAS_VECTORS = HAS_WIDE_VECTORS or torch.backends.cpu.get_cpu_capability() == "AVX2"
"""The same of at least 256."""
_WITHOUT_BF16 = frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"))
"""What ONEDNN_MAX_CPU_ISA may limit oneDNN to that has no products of bf16."""


def has_bf16_units() -> bool:
    """Whether oneDNN has instructions for products of bf16. That it supports bf16 says less: it does on any x86 CPU
    with AVX-512, and without them widens it inside, at a third of the rate of fp32."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")  # an empty one is none
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return limit.upper() not in _WITHOUT_BF16 and any(ask() for ask in asked if ask is not None)


_CPU_MULTIPLIES = {
    torch.bfloat16: _cpu_supports("_is_mkldnn_bf16_supported") and has_bf16_units(),
    torch.float16: _cpu_supports("_is_mkldnn_fp16_supported"),
}


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix products of a 16-bit dtype (AVX512-BF16, AMX ...) that are faster than those of fp32.

    torch has no public question; oneDNN's own answer is `torch.ops.mkldnn._is_mkldnn_*_supported`. Without it torch
    falls back to a scalar loop of about 1 GFLOP/s, so a missing name counts as no.
    """
    return _CPU_MULTIPLIES.get(dtype, False)
