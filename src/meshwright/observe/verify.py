"""A tiny model under any layout beside one device: loss, every gradient, gradient norm, weights after each step.

Each rank runs `outcome`; `assemble` puts the ranks' boxes together to whole tensors (and finds copies that differ);
`first_difference` names the first tensor, in the order of the forward pass, that is not that of one device, within
a `Band`: in fp32 each element, in bf16 the length of the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.boxes import Box
from meshwright.parallel.data import local
from meshwright.parallel.mesh import Made
from meshwright.spec.layout import Layout
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape
from meshwright.train.batches import Batch, Share, moved, select, split
from meshwright.train.optimizer import AdamW
from meshwright.train.precision import DTYPES
from meshwright.train.step import train_step

RECIPE = Recipe(epsilon=1e-3)
"""Epsilon above the rounding of a gradient: where the true one is 0 (biases of keys), Adam would step by noise
alone."""


ZERO = 1e-3
"""Largest element, as a share of the gradient norm, under which a tensor is compared with that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained: a shape on random tokens of which some are no targets, unequally many in each sequence."""

    shape: ModelShape
    sequence: int = 16
    global_batch: int = 8
    packed: bool = False
    """Several documents in a sequence."""
    precision: str = "fp32"
    """As recipe.precision."""
    steps: int = 2
    seed: int = 0
    balance_loss: float = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rank: losses and gradient norms by step, and its boxes of gradients and weights by step and name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tensors: dict[str, tuple[Box, Tensor]]


def case_batch(case: Case, step: int) -> Batch:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    size = (case.global_batch, case.sequence)
    tokens = torch.randint(0, case.shape.vocab, size, generator=generator)
    targets = torch.randint(0, case.shape.vocab, size, generator=generator)
    targets[torch.rand(size, generator=generator) < torch.rand(case.global_batch, 1, generator=generator)] = -100
    documents = positions = None
    if case.packed:
        starts = torch.rand(size, generator=generator) < 0.2
        documents = starts.long().cumsum(1)
        places = torch.arange(case.sequence).expand(size)
        begins = torch.where(starts, places, 0).cummax(1).values
        positions = places - begins
    return select(Batch(tokens=tokens, targets=targets, documents=documents, positions=positions))


class _Recording(AdamW):
    """Keeps a copy of every gradient before it is used."""

    gradients: list[dict[str, Tensor]]

    def step(self, rate: float, **options: Any) -> None:
        """As AdamW."""
        found = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.gradients = [*getattr(self, "gradients", []), {n: local(g).clone() for n, g in found.items()}]
        super().step(rate, **options)


def outcome(case: Case, layout: Layout, *, device: str = "cpu", made: Made | None = None) -> Outcome:
    """Train the case for its steps on this rank of an initialised process group (or alone)."""
    mesh = make_mesh(layout, made=made)
    engine = build_engine(
        case.shape,
        layout,
        mesh=mesh,
        device=device,
        dtype=DTYPES[case.precision],
        reduce_dtype=torch.float32,
        micro_batches=layout.micro_batches(case.global_batch),
        seed=case.seed,
    )
    engine.train()
    optimizer = _Recording(engine.parameters.items(), RECIPE)
    share = Share(
        index=mesh.reader,
        parts=layout.dp,
        columns=engine.columns(case.sequence),
    )
    losses, norms = [], []
    tensors: dict[str, tuple[Box, Tensor]] = {}
    for step in range(1, case.steps + 1):
        batch = moved(select(case_batch(case, step), share), torch.device(device))
        size = layout.micro_batch_of(case.global_batch)
        result = train_step(engine, optimizer, split(batch, size), rate=1e-3, clip=1.0, balance_loss=case.balance_loss)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        boxes = engine.local_boxes()
        for name, gradient in optimizer.gradients[-1].items():
            tensors[f"step {step} gradient of {name}"] = (boxes[name], gradient.float().cpu())
        for name, parameter in engine.parameters.items():
            tensors[f"step {step} weight {name}"] = (boxes[name], local(parameter.detach()).float().clone().cpu())
    return Outcome(tuple(losses), tuple(norms), tensors)


def assemble(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """The whole tensors by name. AssertionError where two ranks hold different copies or nobody holds a part."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for found in outcomes:
        for name, (box, tensor) in found.tensors.items():
            if name not in whole:
                whole[name], seen[name] = torch.zeros(box.whole), torch.zeros(box.whole, dtype=torch.bool)
            here, known = whole[name][box.slices], seen[name][box.slices]
            if known.any() and not torch.allclose(here[known], tensor[known], rtol=1e-6, atol=1e-9):
                raise AssertionError(f"ranks hold different copies of {name}")
            here.copy_(tensor)
            known.fill_(True)
    for name, complete in seen.items():
        if not complete.all():
            raise AssertionError(f"no rank holds all of {name}")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """How far a layout may be from one device: of each number, of every gradient and of every weight, relatively."""

    loss: float
    norm: float
    gradient: float
    weight: float
    by_length: bool = False
    """Tensors by the length of the difference; else by its largest element."""


BANDS = {
    "fp32": Band(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    "bf16": Band(loss=1.5e-3, norm=4e-3, gradient=5e-2, weight=4e-3, by_length=True),
}
"""By precision. A product in bf16 is rounded to 2**-9, and whether before or after a sum over ranks is what layouts
differ in: two to three times what was measured (docs/decisions/0005-gradient-precision.md)."""


def first_difference(one: Outcome, others: Sequence[Outcome], band: Band = BANDS["fp32"]) -> str | None:
    """What differs first between one device and the ranks of a layout, as a sentence; None = all is equal.

    Relative to the largest element of a tensor (or to its length), since a sum's rounding grows with its terms and not
    with what is left of them; a gradient that is zero but for rounding (of key biases) counts as one of ZERO times the
    gradient norm.
    """
    for index, other in enumerate(others):
        for what, mine, theirs, tolerance in (
            ("loss", one.losses, other.losses, band.loss),
            ("gradient norm", one.norms, other.norms, band.norm),
        ):
            for step, (a, b) in enumerate(zip(mine, theirs, strict=True), start=1):
                if not abs(a - b) <= tolerance * abs(a):
                    return f"step {step}: {what} is {b!r} on rank {index}, {a!r} on one device"
    try:
        whole = assemble(others)
    except AssertionError as error:
        return str(error)
    for name in one.tensors:
        if name not in whole:
            return f"{name} is on no rank"
        error = distance(name, one, whole, by_length=band.by_length)
        if not error <= (band.gradient if " gradient of " in name else band.weight):
            return f"{name} differs by {error:.1e} of its {'length' if band.by_length else 'largest element'}"
    return None


def distance(name: str, one: Outcome, whole: dict[str, Tensor], *, by_length: bool) -> float:
    """How far the ranks' tensor is from one device's: see first_difference."""
    size = torch.linalg.vector_norm if by_length else _largest
    expected = one.tensors[name][1]
    smallest = ZERO * max(one.norms)
    return float(size(whole[name] - expected) / max(size(expected).item(), smallest))


def _largest(x: Tensor) -> Tensor:
    return x.abs().max()
