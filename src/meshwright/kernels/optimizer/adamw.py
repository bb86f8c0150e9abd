"""AdamW with fp32 moments and fp32 weights, and the norm of all gradients: passes over many tensors at once.

On a GPU each is one Triton kernel (triton/many_tensors.py), which reads gradients in the dtype that they have and
writes the 16-bit copy of a weight beside it. AdamW then moves 28 bytes per parameter of bf16 training: 2 of the
gradient, 4 + 4 of the master weight, 8 + 8 of the moments, 2 of the copy. torch's kernel reads fp32 gradients, writes
them back divided, and leaves both copies to passes of their own: 44 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.target import simulated_kind
from meshwright.kernels.triton.narrow_piece import UpdateNumbers


@dataclass(frozen=True, slots=True)
class WideStates:
    """Parameters that are updated together, as lists."""

    masters: list[Tensor]
    """Weights in fp32."""
    moments: tuple[list[Tensor], list[Tensor]]
    """First and second moments in fp32, as large."""
    steps: list[Tensor]
    """Updates so far, this one included, () fp32 each."""


def in_one_pass(masters: Sequence[Tensor], prefer: str = "auto") -> bool:
    """Return whether `adamw` takes gradients of any dtype and writes copies itself.

    A dry run of a GPU does not update, and the update takes no memory there either. `prefer` is one of
    chooser.PREFERENCES.
    """
    if simulated_kind() == "cuda" and prefer in ("auto", "triton"):
        return True
    return bool(masters) and uses_triton("adamw", masters[0], prefer=prefer)


def adamw(states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers) -> None:
    """Update in place where `in_one_pass`.

    Args:
        gradients: fp32 or 16 bits.
        copies: 16-bit weights for computation, or the fp32 masters themselves.
    """
    if simulated_kind():
        return
    from meshwright.kernels.triton import many_tensors

    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (gradient, copy) in enumerate(zip(gradients, copies, strict=True)):
        if copy.numel():
            by_dtypes.setdefault((gradient.dtype, copy.dtype), []).append(index)
    for (_, dtype), indices in by_dtypes.items():
        masters, first, second, steps = (
            [tensors[index] for index in indices] for tensors in (states.masters, *states.moments, states.steps)
        )
        many_tensors.adamw(
            [gradients[index].contiguous() for index in indices], masters, (first, second),
            None if dtype == torch.float32 else [copies[index] for index in indices], steps, numbers,
        )  # fmt: skip


def adamw_reference(
    states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers
) -> None:
    """Update with torch's fused kernel, from gradients in fp32."""
    compat.fused_adamw(
        states.masters, list(gradients), states.moments, states.steps, lr=numbers.rate, beta1=numbers.beta1,
        beta2=numbers.beta2, weight_decay=numbers.decay, eps=numbers.epsilon, grad_scale=numbers.divide_by,
        found_inf=numbers.skip,
    )  # fmt: skip
    pairs = [pair for pair in zip(copies, states.masters, strict=True) if pair[0].dtype != torch.float32]
    if pairs:
        compat.copy_each(*map(list, zip(*pairs, strict=True)))


def euclidean_norm(tensors: Sequence[Tensor], prefer: str = "auto") -> Tensor:
    """Return the Euclidean norm () fp32 over all elements of the tensors, whatever their dtypes."""
    plain = all(type(tensor) is Tensor for tensor in tensors)
    if not (tensors and plain and uses_triton("square_sums", tensors[0], prefer=prefer)):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(compat.norms(list(tensors))))
        return norm
    from meshwright.kernels.triton import many_tensors

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.contiguous())
    sums = [many_tensors.squares(group) for group in by_dtype.values()]
    if not sums:
        return torch.zeros((), device=tensors[0].device)
    return torch.cat(sums).sum(dtype=torch.float64).sqrt().float()
