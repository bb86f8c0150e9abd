"""For which kind of device a kernel is chosen: that of its tensors, unless a dry run stands in for another one.

A build of torch without CUDA has no gradients of CUDA tensors, not even of fake ones (2.13). A dry run's tensors are
therefore fake CPU tensors, and whoever chooses between kernels asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_acting: ContextVar[str] = ContextVar("acting", default="")
"""A dry run's tensors are on the CPU, whose backward pass runs on the thread that asks for it, in its context."""


def kind(x: Tensor) -> str:
    """`cpu`, `cuda` ...: whose kernels `x` is computed with."""
    return acts() or x.device.type


def acts() -> str:
    """The kind that CPU tensors stand for; empty where tensors are what they say."""
    return str(_acting_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def _acting_now() -> str:
    """A constant of compiled code: what a dry run compiles, nothing else runs."""
    return _acting.get()


@contextmanager
def acting_as(kind: str) -> Iterator[None]:
    """Inside, kernels are chosen as on such a device."""
    token = _acting.set(kind)
    try:
        yield
    finally:
        _acting.reset(token)
