"""Memory that kernels take from torch's allocator inside an operation and return before it ends.

No tensor shows it, and it exists beside the operation's outputs. Sources for GPUs: torch 2.13,
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd) and mem_eff_attention/kernel_backward.h.
Workspaces of matrix products are permanent: they are the planner's reserve.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright import compat

FP32_BYTES = 4
ROWS = 128
"""Multiple to which the flash kernel rounds the rows of queries."""
BLOCK = 64
"""Multiple to which the memory-efficient kernel rounds."""


def workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a GPU takes inside `operation` beyond its outputs. 0 = nothing known."""
    rule = WORKSPACES.get(operation)
    return rule(*args[1:]) if rule else 0


def cpu_workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a CPU takes inside `operation`; its ranks communicate by Gloo."""
    rule = CPU_WORKSPACES.get(operation)
    return rule(*args) if rule else 0


def _gather(whole: Tensor, *_: Any) -> int:
    """Return the buffer of Gloo's gathers and scatters: the whole tensor (torch 2.13, ProcessGroupGloo.cpp)."""
    return whole.nbytes


def _scatter(part: Tensor, whole: Tensor, *_: Any) -> int:
    return whole.nbytes


def _add(total: Tensor, other: Any, *_: Any) -> int:
    """Return the copies that an in-place addition of two dtypes makes: the narrower one is widened whole."""
    if not isinstance(other, Tensor) or other.dim() == 0 or other.dtype == total.dtype:
        return 0
    wide = torch.promote_types(total.dtype, other.dtype)
    return sum(tensor.numel() * wide.itemsize for tensor in (total, other) if tensor.dtype != wide)


def _flash_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the workspace of q (B, H, S, E) and k (B, K, T, E).

    It holds the gradient of q and one number per row in fp32. Where heads share keys it also holds gradients of keys
    and values for each head, which are summed afterwards.
    """
    batch, heads, rows, dim = q.shape
    rounded = batch * heads * _round_up(rows, ROWS)
    sums = rounded * (_round_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    apart = k.shape[1] != heads
    return sums + apart * 2 * batch * k.shape[2] * heads * dim * q.element_size()


def _varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Tensor | None, *_: Any
) -> int:  # fmt: skip
    """Return the workspace of q (T, H, E) and k (T, K, E) of documents that begin at `borders` (N + 1,).

    Each document is rounded. Without borders: q (B, S, H, E), k (B, T, K, E).
    """
    if borders is None:
        return _flash_backward(q.transpose(1, 2), k.transpose(1, 2))
    total, heads, dim = q.shape
    rounded = heads * (total + ROWS * (len(borders) - 1))
    sums = rounded * (_round_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    return sums + (k.shape[1] != heads) * 2 * len(k) * heads * dim * q.element_size()


def _efficient_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the workspace of q (B, H, S, E): its fp32 gradient if it has 16 bits, and one number per row."""
    batch, heads, rows, dim = q.shape
    sums = _round_up(rows, BLOCK) * _round_up(dim, BLOCK) if q.element_size() < FP32_BYTES else 0
    return batch * heads * (sums + rows) * FP32_BYTES


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


WORKSPACES = {
    compat.attention_backward("flash"): _flash_backward,
    compat.attention_backward("efficient"): _efficient_backward,
    compat.varlen_backward(): _varlen_backward,
}
CPU_WORKSPACES: dict[Any, Callable[..., int]] = {
    compat.GATHER: _gather,
    compat.SCATTER: _scatter,
    torch.ops.aten.add_.Tensor: _add,
}
