"""Kind of device for which kernels are chosen: that of the tensors, unless a dry run simulates another one.

A build of torch without CUDA has no gradients of CUDA tensors, not even of fake ones (2.13). A dry run's tensors are
therefore fake CPU tensors, and whoever chooses between kernels asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_acting: ContextVar[str] = ContextVar("acting", default="")
"""Simulated kind. CPU tensors run their backward pass on the calling thread, in its context."""


def kind(x: Tensor) -> str:
    """Return the kind of device, such as `cpu` or `cuda`, whose kernels compute with x."""
    return acts() or x.device.type


def acts() -> str:
    """Return the kind of device that CPU tensors stand for. Empty = they stand for themselves."""
    return str(_acting_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def _acting_now() -> str:
    """Return a constant of compiled code: what a dry run compiles, nothing else runs."""
    return _acting.get()


@contextmanager
def acting_as(kind: str) -> Iterator[None]:
    """Choose kernels as on such a device, inside the context."""
    token = _acting.set(kind)
    try:
        yield
    finally:
        _acting.reset(token)
