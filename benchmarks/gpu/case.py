"""One operation at one size: its inputs, who computes it, and what it must move and multiply at least."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import chooser

Run = Callable[..., Any]
"""Leaves -> a tensor, or several."""
PASSES = ("forward", "backward")
ROWS, HEAD, ATTENTION, EIGHT_BITS = "rows", "head weight", "attention", "8 bits"
BARS = {ROWS: 1.05, HEAD: 1.2, ATTENTION: 2.0, EIGHT_BITS: 1.05}
"""How many times as far from fp64 as plain code of the same dtype an output of each kind may be (issue 15); of 8 bits
as plain code that rounds to them."""

SINGLE = 1e-6
"""Error that an fp32 form may have in any case: some roundings. Long sums differ by that with the order alone."""


@dataclass(frozen=True, slots=True)
class Count:
    """The least that a pass moves and multiplies: each input read once, each result written once."""

    bytes_moved: float
    flop: float = 0.0


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input: normal numbers times `scale`, in the case's dtype unless another is named."""

    size: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation at one size. All functions take the leaves in their order."""

    operation: str
    size: str
    dtype: torch.dtype
    leaves: tuple[Leaf, ...]
    exact: Run
    """What is right, given fp64."""
    eager: Run
    """Plain code in the case's dtype."""
    ours: dict[str, Run]
    chosen: str
    """Which of ours `auto` takes."""
    rivals: dict[str, Run] = field(default_factory=dict)
    counts: dict[str, Count]
    kinds: tuple[str, ...]
    """Of BARS, for each result and then the gradient of each leaf."""
    learns: bool = True
    """Whether there is a backward pass."""
    compiles: bool = True
    """Whether the compiled form of `eager` takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSet:
    """Inputs of one run, and the gradients of its results."""

    leaves: list[Tensor]
    upstream: list[Tensor]

    @property
    def bytes_held(self) -> int:
        """Of all of them."""
        return sum(x.numel() * x.element_size() for x in (*self.leaves, *self.upstream))


def implementations(
    operation: str, function: Run, device: torch.device, dtype: torch.dtype, triton: Run | None = None
) -> dict[str, Run]:
    """Those that the chooser knows: torch's, and Triton's where it can run (`triton`: how it is called, where
    `prefer` does not lead there)."""
    runs: dict[str, Run] = {"ours, torch": partial(function, prefer="eager")}
    if chooser.choice(operation, device, dtype, prefer="triton").by == "triton":
        runs["ours, Triton"] = triton or partial(function, prefer="triton")
    return runs


def taken(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Which of them training takes by itself. On a CPU `auto` never asks."""
    by_triton = device.type != "cpu" and chooser.choice(operation, device, dtype).by == "triton"
    return "ours, Triton" if by_triton else "ours, torch"


def several(value: Any) -> list[Tensor]:
    """Results as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def inputs(case: Case, device: torch.device, seed: int = 0) -> InputSet:
    """Random leaves, and random gradients of what `eager` makes of them; 1 for a result that is one number."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(size: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype)

    leaves = [normal(leaf.size, leaf.dtype or case.dtype, leaf.scale) for leaf in case.leaves]
    if not case.learns:
        return InputSet(leaves=leaves, upstream=[])
    with torch.no_grad():
        made = [(x.shape, x.dtype) for x in several(case.eager(*leaves))]
    upstream = [normal(shape, dtype) if shape else torch.ones((), dtype=dtype, device=device) for shape, dtype in made]
    return InputSet(leaves=[leaf.requires_grad_() for leaf in leaves], upstream=upstream)


def gradients(results: Any, input_set: InputSet) -> list[Tensor]:
    """Of all leaves."""
    return list(torch.autograd.grad(several(results), input_set.leaves, input_set.upstream))
