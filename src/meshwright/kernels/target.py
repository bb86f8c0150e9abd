"""Kind of device for which kernels are chosen: that of the tensors, unless a dry run simulates another one.

A build of torch without CUDA has no gradients of CUDA tensors, not even of fake ones (2.13). A dry run's tensors are
therefore fake CPU tensors, and whoever chooses between kernels asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_simulated: ContextVar[str] = ContextVar("simulated", default="")
"""Simulated kind. CPU tensors run their backward pass on the calling thread, in its context."""


def device_kind(x: Tensor) -> str:
    """Return the kind of device, such as `cpu` or `cuda`, whose kernels compute with x."""
    return simulated_kind() or x.device.type


def simulated_kind() -> str:
    """Return the kind of device that CPU tensors stand for. Empty = they stand for themselves."""
    return str(_simulated_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def _simulated_now() -> str:
    """Return a constant of compiled code: what a dry run compiles, nothing else runs."""
    return _simulated.get()


@contextmanager
def simulate_device(kind: str) -> Iterator[None]:
    """Choose kernels as on such a device, inside the context."""
    token = _simulated.set(kind)
    try:
        yield
    finally:
        _simulated.reset(token)
