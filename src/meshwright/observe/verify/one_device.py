"""A tiny model under any layout beside one device: loss, every gradient, gradient norm, weights after each step.

Each rank runs `outcome`; `assemble` puts the ranks' boxes together to whole tensors (and finds copies that differ);
`first_difference` names the first tensor, in the order of the forward pass, that is not that of one device, within
a `Band`: in fp32 each element, in bf16 the length of the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.kernels.linear import SAME
from meshwright.observe.verify.adapters_begun import begin_adapters
from meshwright.observe.verify.bands import BANDS, Band
from meshwright.observe.verify.drawn_teacher import DrawnTeacher, objective_of
from meshwright.observe.verify.recording_optimizer import RecordingOptimizer
from meshwright.observe.verify.router_ties import watch_margins
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.data import local
from meshwright.parallel.mesh import Made
from meshwright.parallel.rounding import round_weights
from meshwright.spec.boxes import Box
from meshwright.spec.errors import PlanError
from meshwright.spec.held import shards_are_masters
from meshwright.spec.layout import Layout
from meshwright.spec.objective_traits import CROSS_ENTROPY, DISTILL
from meshwright.spec.quantization_schemes import SCHEMES
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.shape import ModelShape
from meshwright.training.batches import Batch, Share, moved, select, split
from meshwright.training.precision import DTYPES, LossScaler
from meshwright.training.step import train_step

RECIPE = Recipe(epsilon=1e-3)
"""Epsilon above the rounding of a gradient: where the true one is 0 (biases of keys), Adam would step by noise
alone."""


SCALE, OVERFLOWING_SCALE = 2.0**8, 2.0**30
"""Loss scales under which no gradient of a tiny model overflows in fp16, and under which each does."""
GROWTH_STEPS = 2
"""Good steps after which the loss scale doubles: few, so that a case of two steps has such a step."""

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
    optimizer: Literal["adamw", "muon"] = "adamw"
    """As recipe.optimizer."""
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    """As recipe.optimizer_states."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """As recipe.master_weights."""
    products: str = SAME
    """As recipe.products."""
    fake_quantize: str = NO_SCHEME
    """As recipe.fake_quantize."""
    steps: int = 2
    seed: int = 0
    balance_loss: float = 0.01
    clip: float = 1.0
    """As recipe.clip."""
    batches: tuple[int, ...] = ()
    """Sequences of each step, as under a batch ramp; () = global_batch in every step."""
    empty: tuple[int, ...] = ()
    """Sequences of a step that have no target."""
    last_target: int = 0
    """Positions from here on are no targets; 0 = no such limit."""
    overflow: int = 0
    """In this step only sequence `overflow_sequence` has targets, and in fp16 its gradients overflow; 0 = in none."""
    overflow_sequence: int = 0
    teacher: DrawnTeacher | None = None
    """What is learnt from; None = from the text."""

    def __post_init__(self) -> None:
        if self.batches and len(self.batches) != self.steps:
            raise PlanError(f"batches={list(self.batches)} names {len(self.batches)} steps, and steps={self.steps}")
        if min(self.global_batch, self.sequence, self.steps, *self.batches) < 1:
            raise PlanError("global_batch, sequence, steps and each of batches must be at least 1")
        if self.precision not in DTYPES:
            raise PlanError(f"precision={self.precision} is unknown: take one of {', '.join(DTYPES)}")
        if not 0 <= self.overflow <= self.steps:
            raise PlanError(f"overflow={self.overflow} must be a step of steps={self.steps}, or 0")

    @property
    def recipe(self) -> Recipe:
        """What is trained, and the optimizer. PlanError."""
        keys = ("precision", "products", "optimizer", "optimizer_states", "master_weights", "fake_quantize")
        words: dict[str, Any] = {key: getattr(self, key) for key in keys}
        words["objective"] = DISTILL if self.teacher else CROSS_ENTROPY
        return replace(RECIPE, **words)

    @property
    def band(self) -> Band:
        """How far a layout may be from one device."""
        if self.precision == "fp32" and self.rounds_rows:
            return BANDS["rounded rows"]
        narrow = self.precision == "fp32" and self.recipe.storage.narrow
        return BANDS["narrow states" if narrow else self.precision if self.products == SAME else self.products]

    @property
    def rounds_rows(self) -> bool:
        """Whether activations are rounded to whole numbers."""
        base = self.shape.lora.scheme if self.shape.lora else None
        return any(one is not None and one.activations == "int8" for one in (SCHEMES.get(self.fake_quantize), base))

    @property
    def unrounded(self) -> "Case":
        """The same in fp32."""
        return replace(self, precision="fp32", products=SAME, master_weights="fp32")

    def sequences(self, step: int) -> int:
        """Sequences of a step; the first is 1."""
        return self.batches[step - 1] if self.batches else self.global_batch


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Of one rank: losses, gradient norms and loss scales by step, and its boxes of gradients and weights by step and
    name. A skipped step has no gradients."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tensors: dict[str, tuple[Box, Any]]
    """Tensors; arrays while it travels between processes."""
    scales: tuple[float, ...] = ()
    """After each step, in fp16."""
    balances: tuple[float, ...] = ()
    """Balance losses by step, of a mixture of experts."""
    margin: float = inf
    """The smallest margin by which a token has its experts; see ties.py."""
    skipped: tuple[bool, ...] = ()
    """Which steps changed no weight."""
    overflow: int = 0
    """The step whose gradients must overflow, in which alone numbers may not be finite; 0 = none."""


def case_batch(case: Case, step: int) -> Batch:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    sequences = case.sequences(step)
    size = (sequences, case.sequence)
    tokens = torch.randint(0, case.shape.vocab, size, generator=generator)
    targets = torch.randint(0, case.shape.vocab, size, generator=generator)
    targets[torch.rand(size, generator=generator) < torch.rand(sequences, 1, generator=generator)] = -100
    kept = [row for row in range(sequences) if row not in case.empty]
    if step == case.overflow:
        kept = [case.overflow_sequence % sequences]
        targets[kept] = tokens[kept]
    targets[[row for row in range(sequences) if row not in kept]] = -100
    if case.last_target:
        targets[:, case.last_target :] = -100
    if not (targets >= 0).any():
        targets[kept[0] if kept else 0, 0] = 0  # the loss of a step is a mean over its targets
    documents = positions = None
    if case.packed:
        starts = torch.rand(size, generator=generator) < 0.2
        documents = starts.long().cumsum(1)
        places = torch.arange(case.sequence).expand(size)
        begins = torch.where(starts, places, 0).cummax(1).values
        positions = places - begins
    return select(Batch(tokens=tokens, targets=targets, documents=documents, positions=positions))


def outcome(case: Case, layout: Layout, *, device: str = "cpu", made: Made | None = None) -> RankOutcome:
    """Train the case for its steps on this rank of an initialised process group (or alone)."""
    mesh = make_mesh(layout, made=made)
    engine = build_engine(
        case.shape,
        layout,
        mesh=mesh,
        device=device,
        dtype=DTYPES[case.precision],
        reduce_dtype=torch.float32,
        micro_batches=max(layout.micro_batches(case.sequences(step)) for step in range(1, case.steps + 1)),
        seed=case.seed,
        products=case.products,
        masters=shards_are_masters(case.precision, layout, case.recipe.storage),
    )
    round_weights(engine, case.fake_quantize)
    begin_adapters(engine, case.seed)
    engine.train()
    objective, beside = objective_of(
        case.teacher, case.shape, layout, mesh, torch.device(device), DTYPES[case.precision], case.seed
    )
    margins = watch_margins(
        (*engine.stages, *beside) if layout.compile == "off" else ()
    )  # a hook would cut compiled graphs
    optimizer = RecordingOptimizer.of(engine, case.recipe)
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(case.sequence))
    scaler = LossScaler(torch.device(device), growth_interval=GROWTH_STEPS) if case.precision == "fp16" else None
    numbers: dict[str, list[float]] = {"loss": [], "norm": [], "scale": [], "balance": []}
    skipped: list[bool] = []
    tensors: dict[str, tuple[Box, Tensor]] = {}
    for step in range(1, case.steps + 1):
        batch = moved(select(case_batch(case, step), share), torch.device(device))
        size = layout.micro_batch_of(case.sequences(step))
        scale = _set_scale(scaler, case, step)
        result = train_step(
            engine,
            optimizer,
            split(batch, size),
            rate=1e-3,
            clip=case.clip,
            balance_loss=case.balance_loss,
            scaler=scaler,
            objective=objective,
        )
        numbers["loss"].append(result.loss.item())
        numbers["norm"].append(result.grad_norm.item())
        if scaler:
            numbers["scale"].append(scaler.scale.item())
        if result.balance is not None:
            numbers["balance"].append(result.balance.item())
        boxes = engine.local_boxes()
        skipped.append(bool(result.skipped.item()))
        if not skipped[-1]:
            for name, gradient in optimizer.gradients[-1].items():
                tensors[f"step {step} gradient of {name}"] = (boxes[name], gradient.float().cpu() / scale)
        for name, parameter in engine.parameters.items():
            weight = local(parameter.detach()).to(DTYPES[case.precision])
            tensors[f"step {step} weight {name}"] = (boxes[name], weight.float().clone().cpu())
    loss, norms, scales, balances = (tuple(found) for found in numbers.values())
    overflow = case.overflow if scaler else 0
    return RankOutcome(loss, norms, tensors, scales, balances, margins.smallest, tuple(skipped), overflow)


def _set_scale(scaler: LossScaler | None, case: Case, step: int) -> float:
    """The loss scale of a step. It is given, not found: far above what fp16 can hold in the step that overflows, and
    far below in the step after it."""
    if scaler is None:
        return 1.0
    if step == 1 or case.overflow in (step, step - 1):
        scaler.scale.fill_(OVERFLOWING_SCALE if step == case.overflow else SCALE)
    return scaler.scale.item()


def assemble(outcomes: Sequence[RankOutcome]) -> dict[str, Tensor]:
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


def first_difference(one: RankOutcome, others: Sequence[RankOutcome], band: Band = BANDS["fp32"]) -> str | None:
    """What differs first between one device and the ranks of a layout, as a sentence; None = all is equal.

    Relative to the largest element of a tensor (or to its length), since a sum's rounding grows with its terms and not
    with what is left of them; a gradient that is zero but for rounding (of key biases) counts as one of ZERO times the
    gradient norm. Numbers that are not finite equal nothing, except in the step that must overflow.
    """
    for index, other in enumerate(others):
        for what, mine, theirs, tolerance in (
            ("loss", one.losses, other.losses, band.loss),
            ("gradient norm", one.norms, other.norms, band.norm),
            ("balance loss", one.balances, other.balances, band.loss),
            ("loss scale", one.scales, other.scales, 0.0),
        ):
            for step, (a, b) in enumerate(zip(mine, theirs, strict=True), start=1):
                if not (_near(a, b, tolerance) or (step == one.overflow and not isfinite(a) and not isfinite(b))):
                    return f"step {step}: {what} is {b!r} on rank {index}, {a!r} on one device"
        for step, (a, b) in enumerate(zip(one.skipped, other.skipped, strict=True), start=1):
            if a != b:
                return f"step {step}: skipped is {b} on rank {index}, {a} on one device"
    try:
        whole = assemble(others)
    except AssertionError as error:
        return str(error)
    for name in one.tensors:
        if name not in whole:
            return f"{name} is on no rank"
        off = distance(name, one, whole, band)
        if not off <= (band.weight if begins_large(name) else band.gradient):
            return f"{name} differs by {off:.1e} of its {'length' if band.by_length else 'largest element'}"
    return None


def _near(a: float, b: float, tolerance: float) -> bool:
    return isfinite(a) and isfinite(b) and abs(a - b) <= tolerance * abs(a)


def begins_large(name: str) -> bool:
    """Biases begin at zero, adapters' B near it: they are sums of updates, which are as exact as gradients."""
    return " weight " in name and not name.endswith((".bias", "lora.b"))


def distance(name: str, one: RankOutcome, whole: dict[str, Tensor], band: Band) -> float:
    """How far the ranks' tensor is from one device's: see first_difference."""
    size = torch.linalg.vector_norm if band.by_length else _largest
    expected = one.tensors[name][1]
    smallest = ZERO * max((norm for norm in one.norms if isfinite(norm)), default=0.0)
    apart = (whole[name] - expected) * ~_undecided(name, one, band)
    return float(size(apart) / max(size(expected).item(), smallest))


def _undecided(name: str, one: RankOutcome, band: Band) -> Tensor:
    """Elements of a weight that rounding decides, since its gradient was, in one of the steps until now, no larger than
    what rounding makes of it: AdamW divides by its size, and Muon by its length. The gradients are compared.

    In fp32 a whole tensor, as of queries and keys where only first positions are targets. In 16 bits, parts of biases.
    """
    undecided = torch.zeros(one.tensors[name][1].shape, dtype=torch.bool)
    step, found, parameter = name.removeprefix("step ").partition(" weight ")
    names = {number: f"step {number} gradient of {parameter}" for number in range(1, int(step) + 1)} if found else {}
    for number, gradient in ((number, one.tensors[each][1]) for number, each in names.items() if each in one.tensors):
        norm = one.norms[number - 1]
        if isfinite(norm) and 0 < _largest(gradient) <= torch.finfo(torch.float32).eps * norm:
            undecided |= True
        elif band.by_length and not begins_large(name):
            undecided |= gradient.abs() <= band.gradient * gradient.square().mean().sqrt()
    return undecided


def _largest(x: Tensor) -> Tensor:
    return x.abs().max()
