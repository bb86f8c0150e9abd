"""oneDNN: fp32 products of operands in any memory order, without a public function in torch, and its cache.

torch's `mm` calls oneDNN when fp32 matrices may be rounded to bf16 inside
(`torch.backends.mkldnn.matmul.fp32_precision`). oneDNN rounds them only where that is faster, with AMX. On other
processors it multiplies in fp32 and reads transposed operands in place. `are_exact` tests that. The setting is global
to the process, so it is changed for single calls only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_ONE_CALL = RLock()
"""Serializes changes of the setting, which a thread would otherwise restore to the value of another. Reentrant, since
a signal handler or dispatch mode may call in.
"""
if hasattr(os, "register_at_fork"):  # else a child had the lock and the setting of a thread that it has not
    os.register_at_fork(
        before=_ONE_CALL.acquire, after_in_parent=_ONE_CALL.release, after_in_child=_ONE_CALL.release
    )  # fmt: skip
ROUNDED = 1e-5
"""Relative error (norms) that indicates rounding: fp32 has 1e-6, bf16 2e-3."""


@contextmanager
def _use_onednn() -> Iterator[None]:
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
    """Return a (M, K) times b (K, N) in fp32 -> (M, N). Autocast does not touch a product with `out`."""
    out = a.new_empty(a.shape[0], b.shape[1])
    with _use_onednn():
        return torch.mm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute total (M, N) += a (M, K) times b (K, N) in fp32, in place."""
    with _use_onednn():
        return total.addmm_(a, b)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def are_exact() -> bool:
    """Return whether both functions multiply in fp32 on this processor, tested once with transposed operands."""
    return _are_exact()


@cache
def _are_exact() -> bool:
    with _disable_current_modes():  # of a run without values
        kinds: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(160, 160, generator=generator, **kinds) for _ in range(2))
        for left, right in ((a, b), (a.t(), b), (a, b.t()), (a.t(), b.t())):
            exact = left.double() @ right.double()
            for product in (multiply(left, right), add_product(torch.zeros(160, 160, **kinds), left, right)):
                if (product.double() - exact).norm() > ROUNDED * exact.norm():
                    return False
    return True


CAPACITY: Final = 128
"""Cached products, one per combination of sizes. A model with one batch shape has some tens."""
NAMES: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
"""oneDNN's environment variables. It reads the first that is set, at its first product."""


def keep_few_products() -> None:
    """Limit oneDNN's cache to CAPACITY products unless the environment sets a limit.

    With its default of 1,024, experts whose rows change in every step fill hundreds of MiB, and the gaps between these
    blocks are lost to larger tensors.
    """
    if not any(name in os.environ for name in NAMES):
        os.environ[NAMES[0]] = str(CAPACITY)
