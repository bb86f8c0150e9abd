"""Private names of torch and of the C library in one package, each with the reason why it is needed."""

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright.compat.attention import attention_backward as attention_backward
from meshwright.compat.attention import banded_attention as banded_attention
from meshwright.compat.attention import banded_attention_backward as banded_attention_backward
from meshwright.compat.attention import choose_attention as choose_attention
from meshwright.compat.attention import cuda_attention as cuda_attention
from meshwright.compat.attention import cudnn_attention as cudnn_attention
from meshwright.compat.attention import cudnn_version as cudnn_version
from meshwright.compat.attention import efficient_attention as efficient_attention
from meshwright.compat.attention import efficient_attention_backward as efficient_attention_backward
from meshwright.compat.attention import flash_4_attention as flash_4_attention
from meshwright.compat.attention import flash_4_attention_backward as flash_4_attention_backward
from meshwright.compat.attention import flash_4_past as flash_4_past
from meshwright.compat.attention import flash_4_version as flash_4_version
from meshwright.compat.attention import flash_attention as flash_attention
from meshwright.compat.attention import flash_attention_backward as flash_attention_backward
from meshwright.compat.attention import has_flash_attention as has_flash_attention
from meshwright.compat.attention import pin_flash_attention as pin_flash_attention
from meshwright.compat.attention import supports_flash as supports_flash
from meshwright.compat.attention import varlen_attention as varlen_attention
from meshwright.compat.attention import varlen_attention_backward as varlen_attention_backward
from meshwright.compat.attention import varlen_attn as varlen_attn
from meshwright.compat.attention import varlen_backward as varlen_backward
from meshwright.compat.cpu import HAS_VECTORS as HAS_VECTORS
from meshwright.compat.cpu import HAS_WIDE_VECTORS as HAS_WIDE_VECTORS
from meshwright.compat.cpu import cpu_multiplies as cpu_multiplies
from meshwright.compat.cpu import has_bf16_units as has_bf16_units
from meshwright.compat.cpu import keep_freed_memory as keep_freed_memory
from meshwright.compat.fakes import FakeMaker as FakeMaker
from meshwright.compat.fakes import are_alike as are_alike
from meshwright.compat.fakes import data_dependent_errors as data_dependent_errors
from meshwright.compat.fakes import fake_maker as fake_maker
from meshwright.compat.fakes import fake_tensors as fake_tensors
from meshwright.compat.fakes import fake_world as fake_world
from meshwright.compat.fakes import has_own_memory as has_own_memory
from meshwright.compat.fakes import is_fake as is_fake
from meshwright.compat.fakes import lies_in_memory as lies_in_memory
from meshwright.compat.fakes import storage_key as storage_key
from meshwright.compat.fsdp import fsdp_drop_gradients as fsdp_drop_gradients
from meshwright.compat.fsdp import fsdp_keep_reduce_dtype as fsdp_keep_reduce_dtype
from meshwright.compat.fsdp import fsdp_post_backward as fsdp_post_backward
from meshwright.compat.fsdp import join_stream as join_stream
from meshwright.compat.fsdp import joined_streams as joined_streams
from meshwright.compat.fsdp import let_selective_recomputation_pass_hooks as let_selective_recomputation_pass_hooks
from meshwright.compat.process_groups import create_named_group as create_named_group
from meshwright.compat.process_groups import oldest_open_collective as oldest_open_collective

_CANNOT = (AttributeError, TypeError, ValueError, RuntimeError)


DispatchMode = TorchDispatchMode
"""Base class of modes that observe every operation. torch documents it without a public name."""


class BareMode(TorchDispatchMode):
    """Dispatch mode for programs without compiled code, with less overhead.

    torch wraps the methods of modes to keep torch.compile out of them, at microseconds per call, unless a mode opts
    out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _leaves_avx512() -> bool:
    """Return whether MKL leaves AVX-512 unused here and oneDNN is available: an AVX-512 processor not from Intel."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    description = platform.processor()
    with suppress(OSError):
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "GenuineIntel" not in description


_LEAVES_AVX512 = _leaves_avx512()
"""Evaluated once at import, since the compiler cannot trace these checks."""


def blas_is_slow() -> bool:
    """Return whether oneDNN has the faster fp32 products: MKL uses AVX-512 on Intel's processors only, oneDNN on all.

    `torch.backends.cpu` reports the instructions but not the vendor.
    """
    return _LEAVES_AVX512


def onednn_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return a (..., K) contiguous times b (N, K) transposed, plus bias (N,), by oneDNN.

    torch calls this operation in compiled code.
    """
    # It reads N numbers, whatever the stride.
    bias = None if bias is None else bias.contiguous()
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")
    return out


def pack_for_onednn(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix (N, K) in the opaque layout that `onednn_product` reads fastest."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether hooks run around the module's forward. torch can add hooks but has no query for them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def softmax_backward(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a softmax over the last dim, weights * (gradient - sum(gradient * weights)).

    `weights` is the output of the softmax. The fused operation that autograd calls has no public name. The
    formula itself takes three more passes over memory.
    """
    fused = getattr(torch.ops.aten, "_softmax_backward_data", None)
    if fused is None:
        return weights * (gradient - (gradient * weights).sum(-1, keepdim=True))
    out: torch.Tensor = fused(gradient, weights, -1, weights.dtype)
    return out


def add_wide_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int = 1) -> None:
    """Compute total (M, N) fp32 = beta total + a (M, K) b (K, N) in place; 16-bit operands are accumulated in fp32.

    With beta = 0, `total` is not read. On a GPU, the library accumulates into fp32 by an overload that exists in
    torch.ops for CUDA only. Elsewhere the product is first rounded to the dtype of its operands.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif _adds_wide(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    elif beta:
        total += a @ b
    else:
        total.copy_(a @ b)


def fused_adamw(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    steps: list[torch.Tensor],
    **numbers: Any,
) -> None:
    """Run one fused AdamW pass over many tensors. `steps` are incremented by the caller.

    `torch.optim.AdamW(fused=True).step()` regroups tensors in Python at every call, a tenth of a millisecond plus some
    microseconds per tensor.
    """
    torch._fused_adamw_(masters, gradients, *moments, [], steps, amsgrad=False, maximize=False, **numbers)


def add_to_each(tensors: list[torch.Tensor], x: torch.Tensor) -> None:
    """Add x to each tensor in place, in one launch on a GPU. torch's own optimizers use these private functions."""
    # A list, since a single tensor is read on the host where tensors are fake.
    torch._foreach_add_(tensors, [x] * len(tensors))


def copy_each(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor, converting dtypes, in one launch on a GPU."""
    torch._foreach_copy_(into, sources)


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm () fp32 of each. `torch.nn.utils.get_total_norm` squares 16-bit numbers in 16 bits."""
    return list(torch._foreach_norm(tensors, 2.0, torch.float32))


def scaled_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return a b^T + bias (M, N) of 8-bit a (M, K) and b (N, K), with fp32 scales (M, 1) and (N, 1).

    Fast accumulation is on: without it, the kernel with row scales is several times slower.
    """
    product: torch.Tensor = torch._scaled_mm(
        a, b.t(), scale_a=a_scales, scale_b=b_scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return product


BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""Code of the function in which a thread is while autograd runs a backward pass. No public name leads to it."""
HAS_SCALED_GROUPS = hasattr(torch, "_scaled_grouped_mm")
"""True if this torch has grouped products of 8-bit operands.

The name is private in 2.11 to 2.13. The public one of later versions (torch.nn.functional.scaled_grouped_mm) takes
recipes of scales and calls the same kernel.
"""


def scaled_grouped_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the products of 8-bit groups that end at `ends` (X,) int32, with fast accumulation.

    With a (M, K) and b (X, N, K), scales (M,) and (X, N): each group of rows of a times its b transposed -> (M, N).
    With a (M, K) and b (N, K), scales (X M,) and (X N,): groups of both along K -> (X, M, N).
    """
    product: torch.Tensor = torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), a_scales, b_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )
    return product


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch has the fp32 overload of addmm and it works, tested once on ones."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.full((16, 16), torch.nan, device=device)
    try:
        # NaN in `total` shows whether beta = 0 reads it; the second product then adds to the first.
        for beta in (0, 1):
            torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, beta=beta, out=total)
    except _CANNOT:
        return False
    return bool((total == 32.0).all())


class _FusedRmsNorm(torch.autograd.Function):
    """Stand-in for torch's fused RMS norm on a GPU, with its sizes but not its values.

    It saves its input and one fp32 number per row. Without a GPU, torch composes the operation from plain ones, which
    save two more fp32 copies of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return a tensor as rms_norm does on a GPU, without its values, for fake tensors that stand in for GPU tensors."""
    normalized: torch.Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normalized


def time_limit(group: Any) -> timedelta | None:
    """Return the timeout of a process group's collectives, or None if this torch does not expose it.

    torch gives each later group a timeout of its own (30 minutes) whatever the first one was, without a public query.
    """
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def limit_gpu_collectives(group: Any, limit: timedelta) -> bool:
    """Set the timeout of a group's GPU collectives only, and return False if it has no GPU backend.

    torch takes one timeout for all backends of a group. Another one can be set by private names only.
    """
    with suppress(*_CANNOT):
        backend = group._get_backend(torch.device("cuda"))
        # Where gloo serves CPU and GPU, both have one limit, and the CPU's must stay.
        if backend.name() != "gloo":
            backend._set_default_timeout(limit)
            return True
    return False


def all_gather_into(out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
    """Call torch.distributed.all_gather_into_tensor, whose name changed in 2.13 and whose old name warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, x, group=group, async_op=async_op)
    return work


def reduce_scatter_into(
    out: torch.Tensor, x: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Call torch.distributed.reduce_scatter_tensor, renamed likewise."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(out, x, op=op, group=group, async_op=async_op)
    return work


GATHER, SCATTER = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default
"""Operations that these two functions call in every version of torch."""


def wrapper(kind: type[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass with a shape but no memory. torch uses this in its own subclasses only."""
    size = torch.Size(shape)
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(kind, size, dtype=like.dtype, device=like.device)
    return tensor


def real_tensors() -> AbstractContextManager[Any]:
    """Suspend all dispatch modes inside `with`, so that tensors hold numbers even during a dry run.

    torch has no public way to leave a mode that a caller entered.
    """
    return _disable_current_modes()


def operation_name(operation: Any) -> str:
    """Return `mm` for aten::mm.default. torch prints operations with their overload and has no public bare name."""
    return getattr(operation, "_opname", "") or str(operation or "")


def profiled_allocations(profile: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (ns, address, bytes) of CPU allocations from a finished memory profile, unordered. Frees have bytes < 0.

    torch's public memory figures are sums per operation. Single events exist only in Kineto's tree.
    """
    # Operations nest, so the tree is walked whole.
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        kind, allocation = node.typed
        if kind.name == "Allocation" and allocation.device.type == "cpu":
            yield node.start_time_ns, allocation.ptr, allocation.alloc_size
        waiting.extend(node.children)


def profiled_kernels(profile: Any) -> list[tuple[str, float, float]]:
    """Return (name, start, end) in seconds of all GPU activity. The public `events()` include those of the host."""
    return [
        (event.name(), event.start_ns() / 1e9, event.end_ns() / 1e9)
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def record_allocations(entries: int) -> bool:
    """Let a GPU's allocator record its last `entries` events without tracebacks. Return False if it cannot.

    cudaMallocAsync cannot, for example. torch documents this (CUDA memory usage) under a private name.
    """
    with suppress(*_CANNOT):
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=entries, clear_history=True)
        return True
    return False


def stop_recording_allocations() -> dict[str, Any] | None:
    """Stop `record_allocations` and return its records, or None if that fails."""
    snapshot = None
    with suppress(*_CANNOT):
        snapshot = torch.cuda.memory._snapshot()
    with suppress(*_CANNOT):
        torch.cuda.memory._record_memory_history(None)
    return snapshot if isinstance(snapshot, dict) else None


@cache
def processors(index: int | None) -> int:
    """Return the number of multiprocessors of a CUDA device, which torch's stubs lack."""
    return int(torch.cuda.get_device_properties(index or 0).multi_processor_count)


@cache
def capability(index: int | None) -> int:
    """Return the compute capability of a CUDA device, such as 90."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


REPEATS, SLEEP_CYCLES, SCRATCH_BYTES = 9, 2_000_000, 2**28
"""Number of measurements, sleep cycles that let the host run ahead, and bytes written to flush the cache."""


def device_seconds(run: Callable[[], object]) -> float:
    """Return the median device time of a call with a cold cache, in seconds.

    The device sleeps until the host has launched everything, as in a CUDA graph.
    """
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
    # The first call may compile, and choose algorithms.
    run()
    marks = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Drives the operands out of the cache.
        scratch.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        run()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    middle: float = median(begin.elapsed_time(end) for begin, end in marks) / 1e3
    return middle
