"""One operation on many tensors, in few launches: private names of torch, each with its reason."""

from typing import Any

import torch


def fused_adamw(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    steps: list[torch.Tensor],
    **numbers: Any,
) -> None:
    """One AdamW pass over many tensors, by its kernel: `torch.optim.AdamW(fused=True).step()` sorts its groups anew in
    Python at every call, a tenth of a millisecond and some microseconds a tensor. `steps` were counted before."""
    torch._fused_adamw_(masters, gradients, *moments, [], steps, amsgrad=False, maximize=False, **numbers)


def add_to_each(tensors: list[torch.Tensor], x: torch.Tensor) -> None:
    """In place, in one launch on a GPU. The foreach functions are what torch's own optimizers call; they are private
    and documented for nobody else."""
    torch._foreach_add_(tensors, x)


def copy_each(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """The same for copies, of other dtypes too."""
    torch._foreach_copy_(into, given)


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Euclidean norm () fp32 of each. The public `torch.nn.utils.get_total_norm` squares 16-bit numbers as they are."""
    return list(torch._foreach_norm(tensors, 2.0, torch.float32))
