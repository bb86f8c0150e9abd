"""Memory that kernels take from torch's allocator inside an operation and give back before it ends: no tensor shows it,
and it stands beside what the operation gives.

Sources of a GPU's: torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd) and
mem_eff_attention/kernel_backward.h. Matrix products have workspaces that stay: they are the planner's reserve.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright import compat

FP32_BYTES = 4
ROWS = 128
"""Of queries, to a multiple of which the flash kernel rounds."""
BLOCK = 64
"""The same of the memory-efficient kernel."""


def workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """What a GPU takes inside `operation` (as a dispatch mode is given it) beyond its results; 0 = nothing known."""
    of = WORKSPACES.get(operation)
    return of(*args[1:]) if of else 0


def cpu_workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """The same of a CPU, whose ranks speak by Gloo."""
    of = CPU_WORKSPACES.get(operation)
    return of(*args) if of else 0


def _gathered(whole: Tensor, *_: Any) -> int:
    """Gloo gathers and scatters in a tensor of its own, as large as the whole (torch 2.13, ProcessGroupGloo.cpp)."""
    return whole.nbytes


def _scattered(part: Tensor, whole: Tensor, *_: Any) -> int:
    return whole.nbytes


def _added(total: Tensor, other: Any, *_: Any) -> int:
    """What is added to numbers of another dtype is widened first, whole, and so is a narrower sum."""
    if not isinstance(other, Tensor) or other.dim() == 0 or other.dtype == total.dtype:
        return 0
    wide = torch.promote_types(total.dtype, other.dtype)
    return sum(one.numel() * wide.itemsize for one in (total, other) if one.dtype != wide)


def _flash_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """q (B, H, S, E), k (B, K, T, E): the gradient of q and a number a row in fp32; where keys are shared by heads,
    gradients of keys and values for each head, which are summed then."""
    batch, heads, rows, dim = q.shape
    rounded = batch * heads * _up(rows, ROWS)
    sums = rounded * (_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    apart = k.shape[1] != heads
    return sums + apart * 2 * batch * k.shape[2] * heads * dim * q.element_size()


def _varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Tensor | None, *_: Any
) -> int:  # fmt: skip
    """The same for q (T, H, E), k (T, K, E) of documents that begin at `borders` (N + 1,): each is rounded. Without
    borders q (B, S, H, E), k (B, T, K, E)."""
    if borders is None:
        return _flash_backward(q.transpose(1, 2), k.transpose(1, 2))
    total, heads, dim = q.shape
    rounded = heads * (total + ROWS * (len(borders) - 1))
    sums = rounded * (_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    return sums + (k.shape[1] != heads) * 2 * len(k) * heads * dim * q.element_size()


def _efficient_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """q (B, H, S, E): in 16 bits its gradient is summed in fp32; a number a row always."""
    batch, heads, rows, dim = q.shape
    sums = batch * heads * _up(rows, BLOCK) * _up(dim, BLOCK) * FP32_BYTES if q.element_size() < FP32_BYTES else 0
    return sums + batch * heads * rows * FP32_BYTES


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


WORKSPACES = {
    compat.attention_backward("flash"): _flash_backward,
    compat.attention_backward("efficient"): _efficient_backward,
    compat.varlen_backward(): _varlen_backward,
}
CPU_WORKSPACES: dict[Any, Callable[..., int]] = {
    compat.GATHER: _gathered,
    compat.SCATTER: _scattered,
    torch.ops.aten.add_.Tensor: _added,
}
