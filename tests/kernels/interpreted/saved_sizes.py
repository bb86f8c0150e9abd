"""A dry run of a GPU runs torch's operations in the place of Triton's kernels: these must keep no more for the backward
pass than those, or the dry run would promise memory that a GPU does not have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import Kernels, choose, chooser
from meshwright.kernels.chooser import simulate_device

ROWS, WIDTH, HEADS = 48, 64, 4


def norm(kernels: Kernels, make: Callable[..., Tensor]) -> Any:
    return kernels.rms_norm(make(ROWS, WIDTH), make(WIDTH), 1e-6)


def sum_and_norm(kernels: Kernels, make: Callable[..., Tensor]) -> Any:
    return kernels.add_rms_norm(make(ROWS, WIDTH), make(ROWS, WIDTH), make(WIDTH), 1e-6)


def gated(kernels: Kernels, make: Callable[..., Tensor]) -> Any:
    return kernels.swiglu_linear(make(ROWS, WIDTH), make(ROWS, WIDTH), make(32, WIDTH))


def rotated(kernels: Kernels, make: Callable[..., Tensor]) -> Any:
    tables = (torch.ones(1, ROWS, 1, 8), torch.zeros(1, ROWS, 1, 8))
    pair = (make(1, ROWS, HEADS, 16) * 1, make(1, ROWS, 2, 16) * 1)
    return kernels.rotate_pair(*pair, *tables, False, True)


def loss(kernels: Kernels, make: Callable[..., Tensor]) -> Any:
    targets = torch.arange(ROWS)
    return kernels.linear_cross_entropy(make(ROWS, WIDTH), make(320, WIDTH), targets)


def saved_bytes(operation: Callable[..., Any], kernels: Kernels) -> int:
    """Of distinct storages that wait for the backward pass."""
    seen: dict[int, int] = {}

    def make(*size: int) -> Tensor:
        return torch.ones(*size, dtype=torch.float32).requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = operation(kernels, make)
    assert made is not None
    return sum(seen.values())


@pytest.mark.parametrize(
    ("operation", "name"),
    [(norm, "rms_norm"), (sum_and_norm, "add_rms_norm"), (gated, "swiglu"), (rotated, "rope"), (loss, "loss_rows")],
)
def test_what_a_triton_kernel_keeps_is_what_a_dry_run_counts(operation: Callable[..., Any], name: str) -> None:
    chooser._choices.clear()
    on_a_gpu = saved_bytes(operation, choose("triton"))
    assert [implementation.by for implementation in chooser._choices.values() if implementation.operation == name] == [
        "triton"
    ]
    with simulate_device("cuda"), compat.fake_tensors():
        counted = saved_bytes(operation, choose("auto"))
    assert counted == on_a_gpu
