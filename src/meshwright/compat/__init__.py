"""Private names of torch and of the C library, in one place, each with its reason."""

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright.compat.cpu_units import HAS_VECTORS as HAS_VECTORS
from meshwright.compat.cpu_units import HAS_WIDE_VECTORS as HAS_WIDE_VECTORS
from meshwright.compat.cpu_units import cpu_multiplies as cpu_multiplies
from meshwright.compat.cpu_units import has_bf16_units as has_bf16_units
from meshwright.compat.fakes import FakeMaker as FakeMaker
from meshwright.compat.fakes import alike as alike
from meshwright.compat.fakes import data_dependent as data_dependent
from meshwright.compat.fakes import fake_maker as fake_maker
from meshwright.compat.fakes import fake_tensors as fake_tensors
from meshwright.compat.fakes import fake_world as fake_world
from meshwright.compat.fakes import is_fake as is_fake
from meshwright.compat.fakes import lies_in_memory as lies_in_memory
from meshwright.compat.fakes import storage_key as storage_key
from meshwright.compat.flash4 import flash_4_attention as flash_4_attention
from meshwright.compat.flash4 import flash_4_attention_backward as flash_4_attention_backward
from meshwright.compat.flash4 import flash_4_past as flash_4_past
from meshwright.compat.flash4 import flash_4_version as flash_4_version
from meshwright.compat.foreach import add_to_each as add_to_each
from meshwright.compat.foreach import copy_each as copy_each
from meshwright.compat.foreach import fused_adamw as fused_adamw
from meshwright.compat.foreach import norms as norms
from meshwright.compat.freed_memory import keep_freed_memory as keep_freed_memory
from meshwright.compat.fsdp import fsdp_drop_gradients as fsdp_drop_gradients
from meshwright.compat.fsdp import fsdp_keep_reduce_dtype as fsdp_keep_reduce_dtype
from meshwright.compat.fsdp import fsdp_post_backward as fsdp_post_backward
from meshwright.compat.fsdp import let_selective_recomputation_pass_hooks as let_selective_recomputation_pass_hooks
from meshwright.compat.groups import named_group as named_group
from meshwright.compat.sdpa import attention_backward as attention_backward
from meshwright.compat.sdpa import banded_attention as banded_attention
from meshwright.compat.sdpa import banded_attention_backward as banded_attention_backward
from meshwright.compat.sdpa import chosen_attention as chosen_attention
from meshwright.compat.sdpa import cuda_attention as cuda_attention
from meshwright.compat.sdpa import cudnn_attention as cudnn_attention
from meshwright.compat.sdpa import cudnn_version as cudnn_version
from meshwright.compat.sdpa import efficient_attention as efficient_attention
from meshwright.compat.sdpa import efficient_attention_backward as efficient_attention_backward
from meshwright.compat.sdpa import flash_attention as flash_attention
from meshwright.compat.sdpa import flash_attention_backward as flash_attention_backward
from meshwright.compat.sdpa import has_flash_attention as has_flash_attention
from meshwright.compat.sdpa import pin_flash_attention as pin_flash_attention
from meshwright.compat.sdpa import takes_flash as takes_flash
from meshwright.compat.sdpa import varlen_attention as varlen_attention
from meshwright.compat.sdpa import varlen_attention_backward as varlen_attention_backward
from meshwright.compat.sdpa import varlen_attn as varlen_attn
from meshwright.compat.sdpa import varlen_backward as varlen_backward

_CANNOT = (AttributeError, TypeError, ValueError, RuntimeError)


DispatchMode = TorchDispatchMode
"""What sees every operation. torch documents it and has no public name for it."""


class BareMode(TorchDispatchMode):
    """The same for a program of which nothing is compiled: torch wraps the methods of modes to keep torch.compile out
    of them, at microseconds a call, unless a mode says that there is no need."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _leaves_avx512() -> bool:
    """Not where torch has not both libraries, or the processor is Intel's or has no AVX-512."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    told = platform.processor()
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "GenuineIntel" not in told


_LEAVES_AVX512 = _leaves_avx512()
"""Found once: what torch asks itself is nothing that the compiler can follow."""


def blas_is_slow() -> bool:
    """Whether oneDNN's fp32 products are the faster ones: MKL takes AVX-512 on Intel's processors alone, oneDNN on all.
    `torch.backends.cpu` knows the instructions and not whose processor it is."""
    return _LEAVES_AVX512


def onednn_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a (..., K) contiguous times b (N, K) transposed, plus bias (N,), by oneDNN; torch calls it from compiled code."""
    bias = None if bias is None else bias.contiguous()  # it reads N numbers, whatever the stride
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")
    return found


def onednn_packed(weight: torch.Tensor) -> torch.Tensor:
    """A matrix (N, K) in the order in which `onednn_product` reads its second operand fastest: opaque memory."""
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return found


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether something runs around the module's forward; torch lets hooks be added, but not be asked for."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def softmax_backward(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradient of a softmax over the last dim from its result: weights * (gradient - sum(gradient * weights)).

    The fused operation autograd itself calls has no public name; by hand it is three passes more.
    """
    fused = getattr(torch.ops.aten, "_softmax_backward_data", None)
    if fused is None:
        return weights * (gradient - (gradient * weights).sum(-1, keepdim=True))
    result: torch.Tensor = fused(gradient, weights, -1, weights.dtype)
    return result


def add_wide_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int = 1) -> None:
    """total (M, N) fp32 = beta total + a (M, K) b (K, N), of 16-bit tensors too, whose sums then never leave fp32. With
    beta = 0 the total is not read, whatever it holds.

    A GPU's library adds to fp32 by itself; the overload that says so is in torch.ops only, and for CUDA only. Elsewhere
    the product is rounded to its operands' dtype first.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif _adds_wide(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    elif beta:
        total += a @ b
    else:
        total.copy_(a @ b)


def scaled_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """a (M, K) and b (N, K) of 8 bits, with scales (M, 1) and (N, 1) fp32 -> a b^T + bias (M, N). Fast accumulation:
    without it the kernel with a scale for each row is several times slower."""
    found: torch.Tensor = torch._scaled_mm(
        a, b.t(), scale_a=a_scales, scale_b=b_scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return found


HAS_SCALED_GROUPS = hasattr(torch, "_scaled_grouped_mm")
"""Whether this torch has grouped products of 8-bit operands. Private in 2.11 to 2.13; the public name of later ones
(torch.nn.functional.scaled_grouped_mm) takes recipes of scales, and calls the same kernel."""


def scaled_grouped_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Products of runs that end at `ends` (X,) int32, of 8 bits. a (M, K) and b (X, N, K), scales (M,) and (X, N):
    runs of rows of a, each times its b transposed -> (M, N). a (M, K) and b (N, K), scales (X M,) and (X N,): runs of
    both along K -> (X, M, N). Fast accumulation, as in `scaled_product`."""
    found: torch.Tensor = torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), a_scales, b_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )
    return found


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has the overload, and it adds and writes: tried once, on ones."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.full((16, 16), torch.nan, device=device)
    try:
        for beta in (0, 1):
            torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, beta=beta, out=total)
    except _CANNOT:
        return False
    return bool((total == 32.0).all())


class _FusedRmsNorm(torch.autograd.Function):
    """Has the sizes, not the values, of torch's fused RMS norm on a GPU: keeps its input and one fp32 number a row.
    The operation itself is composed of plain ones wherever no GPU is, which keep two fp32 copies of the input more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What rms_norm calls on a GPU, for fake tensors that stand in for a GPU's; see cuda_attention."""
    found: torch.Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


def time_limit(group: Any) -> timedelta | None:
    """How long a collective of a process group may take; None = this torch does not say.

    torch gives every group that is made later a limit of its own (30 minutes), whatever was asked for at first, and
    has no public question for it.
    """
    try:
        found = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def limit_gpu_collectives(group: Any, limit: timedelta) -> bool:
    """Let the collectives of a process group on GPUs end after `limit`, those on the host as before; False where it has
    no GPU backend. torch takes one limit for all backends of a group, and sets another by private names only."""
    with suppress(*_CANNOT):
        found = group._get_backend(torch.device("cuda"))
        if found.name() != "gloo":  # which serves both, with one limit
            found._set_default_timeout(limit)
            return True
    return False


def all_gather_into(out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
    """torch.distributed.all_gather_into_tensor, whose name changed in 2.13 and warns by its old one."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, x, group=group, async_op=async_op)
    return work


def reduce_scatter_into(
    out: torch.Tensor, x: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """torch.distributed.reduce_scatter_tensor, likewise."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(out, x, op=op, group=group, async_op=async_op)
    return work


GATHER, SCATTER = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default
"""What these two call, in every torch."""


def wrapper(kind: type[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass with a shape but no memory; torch documents this only by its own subclasses."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=like.dtype, device=like.device
    )
    return made


def real_tensors() -> AbstractContextManager[Any]:
    """Inside, no mode takes part in operations, so that tensors hold numbers even where a dry run has taken them away.

    torch has no public way out of a mode that somebody further up has entered.
    """
    return _disable_current_modes()


def operation_name(operation: Any) -> str:
    """`mm` of aten::mm.default. torch prints an operation with its overload; the bare name has no public question."""
    return getattr(operation, "_opname", "") or str(operation or "")


def heard_allocations(profile: Any) -> Iterator[tuple[int, int, int]]:
    """(ns, address, bytes: below 0 where memory ends) of a CPU's memory, in no order, from a profiler that listened to
    memory and has stopped. torch's public figures of memory are sums by operation; events are in Kineto's tree only."""
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        kind, told = node.typed
        if kind.name == "Allocation" and told.device.type == "cpu":
            yield node.start_time_ns, told.ptr, told.alloc_size
        waiting.extend(node.children)


def heard_kernels(profile: Any) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds of what a GPU did. The public `events()` are all of the host's too."""
    return [
        (event.name(), event.start_ns() / 1e9, event.end_ns() / 1e9)
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def record_allocations(entries: int) -> bool:
    """Have a GPU's allocator keep its last so many events, without tracebacks; False where this torch or this allocator
    cannot (cudaMallocAsync). torch documents it (CUDA memory usage), under a private name, and may change it."""
    with suppress(*_CANNOT):
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=entries, clear_history=True)
        return True
    return False


def recorded_allocations() -> dict[str, Any] | None:
    """End what `record_allocations` began, and what was kept; None where that fails. See there."""
    found = None
    with suppress(*_CANNOT):
        found = torch.cuda.memory._snapshot()
    with suppress(*_CANNOT):
        torch.cuda.memory._record_memory_history(None)
    return found if isinstance(found, dict) else None


@cache
def processors(index: int | None) -> int:
    """Return the multiprocessors of a CUDA device, of which torch's stubs know nothing."""
    return int(torch.cuda.get_device_properties(index or 0).multi_processor_count)


@cache
def capability(index: int | None) -> int:
    """Return the compute capability of a CUDA device, as 90."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
