"""Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of dims of a head turn by position x frequency."""

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.c import serving_library, training_rows
from meshwright.kernels.chooser import uses_triton

FEW = 64
"""Most tokens for which one rotation of queries and keys together, without gradients, costs less than two."""


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of x (B, S, H, E) by the angle of its position; cos, sin (B or 1, S, 1, E/2).

    A pair is (i, i + E/2), or (2i, 2i + 1) when interleaved.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    new_first = first * cos - second * sin
    new_second = second * cos + first * sin
    pair = new_first, new_second
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return turned.to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    """Rotate into one buffer as wide as the tables, each half written once. sign = -1, the inverse, is the gradient."""
    if not interleaved and training_rows.takes_tables(x, cos, sin):
        return training_rows.rotate(x, cos, sin, sign)
    # Angles are fp32. In 16 bits late positions would turn by the wrong one.
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, cos.dtype))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    new_first, new_second = (out[..., 0::2], out[..., 1::2]) if interleaved else out.chunk(2, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=sign)
    return out.to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation that saves the two small tables only. The plain form saves four products of the size of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, ctx.interleaved, -1.0), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate as the reference does."""
    if torch.compiler.is_compiling():
        return rotate_reference(x, cos, sin, interleaved)
    # An autograd function costs some microseconds, as much as a small rotation itself.
    if not torch.is_grad_enabled():
        return _turn(x, cos, sin, interleaved, 1.0)
    turned: Tensor = _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return turned


def rotate_pair_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """Rotate queries (B, S, H, E) and keys (B, S, K, E).

    `in_place`: nobody reads q or k again, so a kernel may overwrite them. This one does not.
    """
    return rotate_reference(q, cos, sin, interleaved), rotate_reference(k, cos, sin, interleaved)


def rotate_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, in_place: bool = True,
    prefer: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate as the reference does, on a GPU in the memory of q and k where that is allowed."""
    if (
        len(q) == len(cos) == 1
        and not interleaved
        and (loops := serving_library.loops())
        and serving_library.takes(q, k, cos, sin)
    ):
        return loops.rotate_pair(q, k, cos, sin, in_place)
    if uses_triton("rope", q, prefer=prefer):
        from meshwright.kernels.triton import rotary

        return rotary.rotate_pair(q, k, cos, sin, interleaved, in_place=in_place)
    if q.shape[0] * q.shape[1] <= FEW and q.dtype == k.dtype and not torch.is_grad_enabled():
        both = rotate(torch.cat((q, k), dim=2), cos, sin, interleaved)
        return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
