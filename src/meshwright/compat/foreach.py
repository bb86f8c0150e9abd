"""Operations on many tensors in few launches: private names of torch, each with its reason."""

from typing import Any

import torch


def fused_adamw(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    steps: list[torch.Tensor],
    **numbers: Any,
) -> None:
    """Run one fused AdamW pass over many tensors. `steps` are incremented by the caller.

    `torch.optim.AdamW(fused=True).step()` regroups tensors in Python at every call, a tenth of a millisecond plus some
    microseconds per tensor.
    """
    torch._fused_adamw_(masters, gradients, *moments, [], steps, amsgrad=False, maximize=False, **numbers)


def add_to_each(tensors: list[torch.Tensor], x: torch.Tensor) -> None:
    """Add x to each tensor in place, in one launch on a GPU. torch's own optimizers use these private functions."""
    torch._foreach_add_(tensors, [x] * len(tensors))  # by one tensor, it reads that on the host where tensors are fake


def copy_each(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor, converting dtypes, in one launch on a GPU."""
    torch._foreach_copy_(into, sources)


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm () fp32 of each. `torch.nn.utils.get_total_norm` squares 16-bit numbers in 16 bits."""
    return list(torch._foreach_norm(tensors, 2.0, torch.float32))
