"""fp32 products by oneDNN of operands in any order, which torch has no public way to ask for.

torch's own `mm` calls oneDNN where fp32 matrices may be rounded to bf16 inside, by the setting
`torch.backends.mkldnn.matmul.fp32_precision`. oneDNN rounds them only where that is faster, with AMX; on other
processors it multiplies in fp32, and reads transposed operands as they lie. `are_exact` tries that. The setting is that
of the whole process: it is changed for each call alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_ONE_CALL = RLock()
"""Else a thread would take what another one has set for what it was before. The same thread may come again: a signal's
handler, or a mode of torch's."""
if hasattr(os, "register_at_fork"):  # else a child had the lock and the setting of a thread that it has not
    os.register_at_fork(
        before=_ONE_CALL.acquire, after_in_parent=_ONE_CALL.release, after_in_child=_ONE_CALL.release
    )  # fmt: skip
ROUNDED = 1e-5
"""Relative error (norms) above which operands were rounded: fp32's is 1e-6, that of bf16 2e-3."""


@contextmanager
def _by_onednn() -> Iterator[None]:
    library: Any = torch.backends.mkldnn
    setting = library.matmul
    with _ONE_CALL:
        before = setting.fp32_precision
        if before == library.fp32_precision:  # it is read as what it inherits, and would inherit no more
            before = "none"
        setting.fp32_precision = "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N), fp32 -> (M, N). Autocast leaves a product alone whose result is given."""
    found = a.new_empty(a.shape[0], b.shape[1])
    with _by_onednn():
        return torch.mm(a, b, out=found)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (M, N) += a (M, K) times b (K, N), fp32, in place."""
    with _by_onednn():
        return total.addmm_(a, b)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def are_exact() -> bool:
    """Whether both functions multiply in fp32 on this processor: tried once, with either operand transposed."""
    return _are_exact()


@cache
def _are_exact() -> bool:
    with _disable_current_modes():  # of a run without values
        kinds: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(160, 160, generator=generator, **kinds) for _ in range(2))
        for left, right in ((a, b), (a.t(), b), (a, b.t()), (a.t(), b.t())):
            exact = left.double() @ right.double()
            for found in (multiply(left, right), add_product(torch.zeros(160, 160, **kinds), left, right)):
                if (found.double() - exact).norm() > ROUNDED * exact.norm():
                    return False
    return True
