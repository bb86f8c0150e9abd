"""Collectives as operators: compiled code calls them like a product, and the compiler does not look inside.

Without them every collective ends a graph. Recomputation, whose body the compiler takes whole or not at all, would then
run uncompiled. An operator takes tensors and plain numbers, so a group is named by its number. Operators run the code
of the uncompiled model, so values, bytes sent and their counts are the same.

Every rank of a group compiles the same block. Its collectives depend on one another's outputs, so all ranks call them
in one order. An operator leaves its inputs unchanged and returns new tensors.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.axes.sequence import gather, resized, scatter
from meshwright.parallel.groups.group import find_group


@torch.library.custom_op("meshwright::enter", mutates_args=())
def enter(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    """Compute tensor.enter: f, or g with sp."""
    return gather(find_group(group), x, pieces) if sp else x.clone(memory_format=torch.contiguous_format)


@enter.register_fake
def _(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    return x.new_empty(resized(x.shape, find_group(group).size if sp else 1, 1))


@torch.library.custom_op("meshwright::leave", mutates_args=())
def leave(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    """Compute tensor.leave: f*, or g* with sp."""
    ranks = find_group(group)
    return scatter(ranks, x, pieces) if sp else ranks.all_reduce(x.clone(memory_format=torch.contiguous_format))


@leave.register_fake
def _(x: Tensor, group: int, sp: bool, pieces: int) -> Tensor:
    return x.new_empty(resized(x.shape, 1, find_group(group).size if sp else 1))


@torch.library.custom_op("meshwright::mean_over", mutates_args=())
def mean_over(x: Tensor, group: int) -> Tensor:
    """Compute expert._MeanOver: the mean of all ranks' x. Its gradient is passed to x unchanged."""
    ranks = find_group(group)
    return ranks.all_reduce(x.clone(memory_format=torch.contiguous_format)) / ranks.size


@mean_over.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape)


mean_over.register_autograd(lambda ctx, gradient: (gradient, None))


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group, ctx.sp, ctx.pieces = inputs


def _enter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return leave(gradient, ctx.group, ctx.sp, ctx.pieces), None, None, None


def _leave_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return enter(gradient, ctx.group, True, ctx.pieces) if ctx.sp else gradient, None, None, None


enter.register_autograd(_enter_backward, setup_context=_keep_group)
leave.register_autograd(_leave_backward, setup_context=_keep_group)
