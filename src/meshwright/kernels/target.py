"""For which kind of device a kernel is chosen: that of its tensors, unless a dry run stands in for another one.

A build of torch without CUDA has no gradients of CUDA tensors, not even of fake ones (2.13). A dry run's tensors are
therefore fake CPU tensors, and whoever chooses between kernels asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class _Acting:
    kind: str = ""


_acting = _Acting()


def kind(x: Tensor) -> str:
    """`cpu`, `cuda` ...: whose kernels `x` is computed with."""
    return _acting.kind or x.device.type


def acts() -> str:
    """The kind that CPU tensors stand for; empty where tensors are what they say."""
    return _acting.kind


@contextmanager
def acting_as(kind: str) -> Iterator[None]:
    """Inside, kernels are chosen as on such a device."""
    before, _acting.kind = _acting.kind, kind
    try:
        yield
    finally:
        _acting.kind = before
