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
from meshwright.kernels.target import acts
from meshwright.kernels.triton.narrow_piece import UpdateNumbers


@dataclass(frozen=True, slots=True)
class WideStates:
    """Parameters that are updated together, as lists."""

    masters: list[Tensor]
    """fp32."""
    moments: tuple[list[Tensor], list[Tensor]]
    """fp32, as large."""
    steps: list[Tensor]
    """() fp32 each: updates so far, this one included."""


def in_one_pass(masters: Sequence[Tensor], prefer: str = "auto") -> bool:
    """Whether `adamw` takes gradients of any dtype and writes copies by itself; `prefer` is one of
    chooser.PREFERENCES. A dry run of a GPU does not update, which takes no memory there either."""
    if acts() == "cuda" and prefer in ("auto", "triton"):
        return True
    return bool(masters) and uses_triton("adamw", masters[0], prefer=prefer)


def adamw(
    states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers
) -> None:  # fmt: skip
    """One update in place where `in_one_pass`. Gradients of fp32 or 16 bits; `copies`: the weights that are computed
    with, 16-bit ones, or those of fp32 that are the masters themselves."""
    if acts():
        return
    from meshwright.kernels.triton import many_tensors

    forms: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for place, (gradient, copy) in enumerate(zip(gradients, copies, strict=True)):
        if copy.numel():
            forms.setdefault((gradient.dtype, copy.dtype), []).append(place)
    for (_, dtype), places in forms.items():
        masters, first, second, steps = (
            [some[place] for place in places] for some in (states.masters, *states.moments, states.steps)
        )
        many_tensors.adamw(
            [gradients[place].contiguous() for place in places], masters, (first, second),
            None if dtype == torch.float32 else [copies[place] for place in places], steps, numbers,
        )  # fmt: skip


def adamw_reference(
    states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers
) -> None:
    """The same by torch's fused kernel, of gradients in fp32."""
    compat.fused_adamw(
        states.masters, list(gradients), states.moments, states.steps, lr=numbers.rate, beta1=numbers.beta1,
        beta2=numbers.beta2, weight_decay=numbers.decay, eps=numbers.epsilon, grad_scale=numbers.divide_by,
        found_inf=numbers.skip,
    )  # fmt: skip
    pairs = [pair for pair in zip(copies, states.masters, strict=True) if pair[0].dtype != torch.float32]
    if pairs:
        compat.copy_each(*map(list, zip(*pairs, strict=True)))


def euclidean_norm(tensors: Sequence[Tensor], prefer: str = "auto") -> Tensor:
    """Euclidean norm () fp32 over all elements of some tensors, whatever their dtypes."""
    plain = all(type(one) is Tensor for one in tensors)
    if not (tensors and plain and uses_triton("square_sums", tensors[0], prefer=prefer)):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(compat.norms(list(tensors))))
        return norm
    from meshwright.kernels.triton import many_tensors

    forms: dict[torch.dtype, list[Tensor]] = {}
    for one in tensors:
        if one.numel():
            forms.setdefault(one.dtype, []).append(one.contiguous())
    sums = [many_tensors.squares(some) for some in forms.values()]
    if not sums:
        return torch.zeros((), device=tensors[0].device)
    return torch.cat(sums).sum(dtype=torch.float64).sqrt().float()
