"""Rotary positions of queries and keys, both in one kernel and in their own memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, power_of_two


@triton.jit
def _turn(
    x: Arg, out: Arg, stride: Arg, out_stride: Arg, heads: Arg, half: Arg, cos: Arg, sin: Arg, STEP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate pairs of all heads of one position. STEP 2 = interleaved: a pair is contiguous."""
    pair = tl.arange(0, BLOCK)[None, :]
    other = half if STEP == 1 else 1
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (pair < half)
        at = head * stride + pair * STEP
        first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + at + other, mask=inside, other=0.0).to(tl.float32)
        at = head * out_stride + pair * STEP
        tl.store(out + at, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + other, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_rows(
    q: Arg, q_batch: Arg, q_position: Arg, q_head: Arg, q_out: Arg, q_out_batch: Arg, q_out_position: Arg,
    q_out_head: Arg, q_heads: Arg, k: Arg, k_batch: Arg, k_position: Arg, k_head: Arg, k_out: Arg, k_out_batch: Arg,
    k_out_position: Arg, k_out_head: Arg, k_heads: Arg, cos: Arg, sin: Arg, table_batch: Arg, table_position: Arg,
    half: Arg, SIGN: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate each pair of q and k by the angle of its position. SIGN -1 rotates back, which is the gradient."""
    position = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    table = batch * table_batch + position * table_position + pair
    c = tl.load(cos + table, mask=pair < half, other=0.0).to(tl.float32)
    # The inverse of a rotation is that by the negative angle, which changes the sine alone.
    s = tl.load(sin + table, mask=pair < half, other=0.0).to(tl.float32) * SIGN
    from_q = q + batch * q_batch + position * q_position
    to_q = q_out + batch * q_out_batch + position * q_out_position
    _turn(from_q, to_q, q_head, q_out_head, q_heads, half, c, s, STEP, HEADS, BLOCK)
    if k_heads > 0:
        from_k = k + batch * k_batch + position * k_position
        to_k = k_out + batch * k_out_batch + position * k_out_position
        _turn(from_k, to_k, k_head, k_out_head, k_heads, half, c, s, STEP, HEADS, BLOCK)


def _launch(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """Return q (B, S, H, E) and k (B, S, K, E), rotated."""
    batch, length, heads, width = q.shape
    q_out = q if in_place else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = k if in_place or k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    keys, keys_out = (q if k is None else k), (q_out if k_out is None else k_out)
    block, key_heads = power_of_two(width // 2), 0 if k is None else keys.shape[2]
    rotate_rows[(length, batch)](
        q, *q.stride()[:3], q_out, *q_out.stride()[:3], heads, keys, *keys.stride()[:3], keys_out,
        *keys_out.stride()[:3], key_heads, cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1),
        width // 2, SIGN=-1.0 if back else 1.0, STEP=2 if interleaved else 1, HEADS=min(power_of_two(max(heads,
        key_heads)), max(1, 2048 // block)), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _RotatePair(torch.autograd.Function):
    """Rotation that saves the tables only."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = _dense(cos), _dense(sin)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        q_turned, k_turned = _launch(_dense(q), _dense(k), cos, sin, interleaved, False, in_place)
        assert k_turned is not None
        # Autograd then refuses the backward pass of functions that saved q or k.
        if in_place:
            torch.autograd.graph.increment_version((q, k))
        return q_turned.detach(), k_turned.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, other: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        gradients = _launch(_dense(gradient), _dense(other), cos, sin, ctx.interleaved, True, False)
        return *gradients, None, None, None, None


def rotate_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """Rotate as kernels.rope.rotate_pair.

    `in_place`: nobody reads q and k again. Parameters and inputs of a graph are copied all the same.
    """
    in_place = in_place and not any(x.is_leaf and x.requires_grad for x in (q, k))
    turned: tuple[Tensor, Tensor] = _RotatePair.apply(q, k, cos, sin, interleaved, in_place)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return turned
