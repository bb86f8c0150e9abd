"""A tiny model under any layout compared with one device: loss, gradients, gradient norm, weights after each step.

Each rank runs `outcome`. `assemble` combines the ranks' boxes to whole tensors, and finds copies that differ.
`first_difference` names the first tensor, in the order of the forward pass, that differs from one device by more than a
`Band`: in fp32 by element, in bf16 by the length of the difference.

A case may have a teacher, whose numbers are drawn like the student's. `Margins` holds the narrowest choice of experts:
where two experts are nearly equal, rounding alone may choose another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.kernels.linear.linear import SAME
from meshwright.kernels.loss.linear_divergence import Divergence
from meshwright.model.feed_forward import Router
from meshwright.model.init import fill_initial, width_deviation
from meshwright.parallel import Engine, Mesh, build_engine, make_mesh
from meshwright.parallel.apply import round_weights
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import shards_are_masters
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import NO_TARGETS, SAME_BASE, LoRAShape, ModelShape, MoEShape
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, DISTILL, NO_SCHEME, Recipe
from meshwright.spec.rules.legal import teacher_layout
from meshwright.spec.rules.passes import draws_dropout
from meshwright.spec.weights.boxes import Box
from meshwright.training.objectives.objectives import Distillation
from meshwright.training.objectives.teacher import lay_out, place_beside
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES, LossScaler
from meshwright.training.step.batches import Batch, Share, select, split, to_device, with_token_keys
from meshwright.training.step.step import CROSS_ENTROPY as TEXT_OBJECTIVE
from meshwright.training.step.step import Objective, train_step

SHARP = 6.0
"""Gain of the last norm. Random weights predict almost evenly, so their divergence would consist of rounding."""
RECIPE = Recipe(epsilon=1e-3)
"""Epsilon is above the rounding of a gradient: where the true one is 0 (biases of keys), Adam would step by noise."""
SCALE, OVERFLOWING_SCALE = 2.0**8, 2.0**30
"""Loss scales at which no gradient of a tiny model overflows in fp16, and at which each does."""
GROWTH_STEPS = 2
"""Good steps after which the loss scale doubles: few, so that a case of two steps has such a step."""
ZERO = 1e-3
"""Largest element, as a share of the gradient norm, below which a tensor is compared with that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTeacher:
    """Sizes of a teacher, else equal to its student; beta, temperature and hard as in recipe.distillation_*."""

    layers: int = 2
    hidden: int = 24
    ffn: int = 40
    dense: bool = False
    """True if it has no experts although its student has."""
    filled: int = 0
    """Rows of padding in its vocabulary."""
    beta: float = 0.0
    temperature: float = 1.0
    hard: float = 0.0
    base: str = SAME_BASE
    """Same as teacher.lora.base: codes of its matrices."""

    def shape(self, student: ModelShape) -> ModelShape:
        """Return the teacher's shape. Raises PlanError when sizes contradict each other."""
        moe = None if self.dense or student.moe is None else student.moe
        codes = None if self.base == SAME_BASE else LoRAShape(rank=1, targets=NO_TARGETS, base=self.base)
        return replace(
            student, name="teacher", layers=self.layers, hidden=self.hidden, ffn=self.ffn, lora=codes,
            vocab=student.vocab + self.filled, window_from_layer=min(student.window_from_layer, self.layers),
            moe=moe and replace(moe, first_dense=min(moe.first_dense, self.layers)),
        )  # fmt: skip

    @property
    def form(self) -> Divergence:
        """The loss."""
        return Divergence(beta=self.beta, temperature=self.temperature, hard=self.hard)

    def objective(
        self, student: ModelShape, layout: Layout, mesh: Mesh, device: torch.device, dtype: torch.dtype, seed: int
    ) -> tuple[Distillation, Engine]:  # fmt: skip
        """Return the distillation that a case minimizes, and its teacher, initialized on this rank."""
        shape = self.shape(student)
        engine = lay_out(shape, teacher_layout(layout, shape), mesh, device, dtype, seed=seed)
        sharpen(engine)
        shared = student.vocab if self.filled else 0
        return Distillation(form=self.form, teacher=place_beside(engine, shared), shared=shared), engine


def case_objective(
    teacher: DrawnTeacher | None, student: ModelShape, layout: Layout, mesh: Mesh, device: torch.device,
    dtype: torch.dtype, seed: int,
) -> tuple[Objective, tuple[nn.Module, ...]]:  # fmt: skip
    """Return the objective of a case, and this rank's stages of its teacher."""
    if teacher is None:
        return TEXT_OBJECTIVE, ()
    objective, engine = teacher.objective(student, layout, mesh, device, dtype, seed + 1)
    return objective, engine.stages


@torch.no_grad()
def sharpen(engine: Engine) -> None:
    """Make the distributions of random weights distinct."""
    for name, parameter in engine.parameters.items():
        if name == "norm.weight":
            local(parameter).mul_(SHARP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Relative tolerances of scalars, of every gradient and of every weight."""

    loss: float
    norm: float
    gradient: float
    weight: float
    by_length: bool = False
    """Compare tensors by the length of the difference. False = by its largest element."""
    zero: float = ZERO
    """Share of the gradient norm with which tensors below it are compared.

    In 16 bits a gradient that must be zero, such as of queries with one key, is up to a ninth of the rounding times the
    norm on some layouts: the backward pass reads a rounded output of attention.
    """


BANDS = {
    "fp32": Band(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    "bf16": Band(loss=1.5e-3, norm=4e-3, gradient=5e-2, weight=4e-3, by_length=True, zero=2e-2),
    "fp8": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True, zero=4e-3),
    "fp8-all": Band(loss=3e-3, norm=2.5e-2, gradient=0.3, weight=1.2e-2, by_length=True, zero=4e-3),
    "fp16": Band(loss=4e-4, norm=1e-3, gradient=1.5e-2, weight=1e-3, by_length=True, zero=1e-2),
    "rounded rows": Band(loss=3e-4, norm=2e-3, gradient=2e-2, weight=1e-3, by_length=True),
    "narrow states": Band(loss=1e-5, norm=1e-5, gradient=5e-3, weight=1e-4, by_length=True),
}
"""Tolerances by precision.

A product in bf16 is rounded to 2**-9, before or after a sum over ranks depending on the layout. The bands are two to
three times the measured differences (docs/decisions/0005-gradient-precision.md). Narrow states in an fp32 run: where
moments differ by a rounding, a few are stored as neighbouring numbers. Rounded rows: where activations differ, a few
become the next of 127 numbers, which changed up to 2.4e-3 of a gradient. The rounding of a layout itself is compared
bit by bit elsewhere (tests/kernels/test_matrix_parts.py).
"""


class RecordingOptimizer(Optimizer):
    """Optimizer that records a copy of every gradient before it is used."""

    gradients: list[dict[str, Tensor]]
    """Gradients of each step, by name."""

    def step(self, rate: float, **options: Any) -> None:
        """Record the gradients, then step."""
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.gradients = [*getattr(self, "gradients", []), {n: local(g).clone() for n, g in gradients.items()}]
        super().step(rate, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training case: a shape on random tokens, of which unequally many per sequence are no targets.

    Fields that a recipe has too mean the same.
    """

    shape: ModelShape
    sequence: int = 16
    global_batch: int = 8
    packed: bool = False
    """True if a sequence has several documents."""
    precision: str = "fp32"
    optimizer: Literal["adamw", "muon"] = "adamw"
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    master_weights: Literal["fp32", "none"] = "fp32"
    products: str = SAME
    fake_quantize: str = NO_SCHEME
    dropout: float = 0.0
    steps: int = 2
    seed: int = 0
    balance_loss: float = 0.01
    clip: float = 1.0
    batches: tuple[int, ...] = ()
    """Sequences of each step, as under a batch ramp. () = global_batch in every step."""
    empty: tuple[int, ...] = ()
    """Sequences of a step without targets."""
    last_target: int = 0
    """Position from which on there are no targets. 0 = no limit."""
    overflow: int = 0
    """Step in which only `overflow_sequence` has targets, and gradients overflow in fp16. 0 = none."""
    overflow_sequence: int = 0
    teacher: DrawnTeacher | None = None
    """Teacher of the distillation. None = the text itself."""

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
        """Objective and optimizer settings. Raises PlanError."""
        keys = ("precision", "products", "optimizer", "optimizer_states", "master_weights", "fake_quantize", "dropout")
        words: dict[str, Any] = {key: getattr(self, key) for key in keys}
        words["objective"] = DISTILL if self.teacher else CROSS_ENTROPY
        return replace(RECIPE, **words)

    @property
    def band(self) -> Band:
        """Tolerance of a layout against one device."""
        if self.precision == "fp32" and self.rounds_rows:
            return BANDS["rounded rows"]
        narrow = self.precision == "fp32" and self.recipe.storage.narrow
        return BANDS["narrow states" if narrow else self.precision if self.products == SAME else self.products]

    @property
    def rounds_rows(self) -> bool:
        """True if activations are rounded to whole numbers."""
        base = self.shape.lora.scheme if self.shape.lora else None
        schemes = (SCHEMES.get(self.fake_quantize), base)
        return any(scheme is not None and scheme.activations == "int8" for scheme in schemes)

    @property
    def unrounded(self) -> "Case":
        """The same case in fp32."""
        return replace(self, precision="fp32", products=SAME, master_weights="fp32")

    def sequences(self, step: int) -> int:
        """Return the sequences of a step, counted from 1."""
        return self.batches[step - 1] if self.batches else self.global_batch


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Losses, norms and loss scales of one rank by step, and its boxes of gradients (unless skipped) and weights."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tensors: dict[str, tuple[Box, Any]]
    """Tensors, or arrays while it travels between processes."""
    scales: tuple[float, ...] = ()
    """Loss scale after each step, in fp16."""
    balances: tuple[float, ...] = ()
    """Balance losses by step, of a mixture of experts."""
    margin: float = inf
    """Smallest margin of a choice of experts, see `margin`."""
    skipped: tuple[bool, ...] = ()
    """True for steps that changed no weight."""
    overflow: int = 0
    """Step whose gradients must overflow; only there numbers may be infinite. 0 = none."""


def case_batch(case: Case, step: int) -> Batch:
    """Return the whole batch of a step, equal on every rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    sequences = case.sequences(step)
    size = (sequences, case.sequence)
    tokens = torch.randint(0, case.shape.vocab, size, generator=generator)
    targets = torch.randint(0, case.shape.vocab, size, generator=generator)
    # Unequal numbers of targets: a mean over ranks' means would be wrong, and must be noticed.
    targets[torch.rand(size, generator=generator) < torch.rand(sequences, 1, generator=generator)] = -100
    rows = [row for row in range(sequences) if row not in case.empty]
    if step == case.overflow:
        rows = [case.overflow_sequence % sequences]
        targets[rows] = tokens[rows]
    targets[[row for row in range(sequences) if row not in rows]] = -100
    if case.last_target:
        targets[:, case.last_target :] = -100
    if not (targets >= 0).any():
        # The loss of a step is a mean over its targets, so there must be one.
        targets[rows[0] if rows else 0, 0] = 0
    documents = positions = None
    if case.packed:
        starts = torch.rand(size, generator=generator) < 0.2
        documents = starts.long().cumsum(1)
        columns = torch.arange(case.sequence).expand(size)
        begins = torch.where(starts, columns, 0).cummax(1).values
        positions = columns - begins
    batch = Batch(tokens=tokens, targets=targets, documents=documents, positions=positions)
    if draws_dropout(case.shape, case.recipe):
        batch = with_token_keys(batch, case.seed, step * sequences)
    return select(batch)


def outcome(
    case: Case, layout: Layout, *, device: str = "cpu", process_groups: ProcessGroups | None = None
) -> RankOutcome:
    """Train the case on this rank of an initialized process group, or alone."""
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(
        case.shape,
        layout,
        mesh=mesh,
        device=device,
        dtype=DTYPES[case.precision],
        reduce_dtype=torch.float32,
        micro_batches=max(layout.micro_batches(case.sequences(step)) for step in range(1, case.steps + 1)),
        seed=case.seed,
        dropout=case.dropout,
        products=case.products,
        masters=shards_are_masters(case.precision, layout, case.recipe.storage),
    )
    round_weights(engine, case.fake_quantize)
    initialize_adapters(engine, case.seed)
    engine.train()
    objective, beside = case_objective(
        case.teacher, case.shape, layout, mesh, torch.device(device), DTYPES[case.precision], case.seed
    )
    # A hook would cut compiled graphs.
    margins = watch_margins((*engine.stages, *beside) if layout.compile == "off" else ())
    optimizer = RecordingOptimizer.for_engine(engine, case.recipe)
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(case.sequence))
    scaler = LossScaler(torch.device(device), growth_interval=GROWTH_STEPS) if case.precision == "fp16" else None
    numbers: dict[str, list[float]] = {"loss": [], "norm": [], "scale": [], "balance": []}
    skipped: list[bool] = []
    tensors: dict[str, tuple[Box, Tensor]] = {}
    for step in range(1, case.steps + 1):
        batch = to_device(select(case_batch(case, step), share), torch.device(device))
        size = layout.micro_batch_of(case.sequences(step))
        scale = _set_scale(scaler, case, step)
        train_result = train_step(
            engine,
            optimizer,
            split(batch, size),
            rate=1e-3,
            clip=case.clip,
            balance_loss=case.balance_loss,
            scaler=scaler,
            objective=objective,
        )
        numbers["loss"].append(train_result.loss.item())
        numbers["norm"].append(train_result.grad_norm.item())
        if scaler:
            numbers["scale"].append(scaler.scale.item())
        if train_result.balance is not None:
            numbers["balance"].append(train_result.balance.item())
        boxes = engine.local_boxes()
        skipped.append(bool(train_result.skipped.item()))
        # Gradients of a skipped step are infinite or NaN, and equal nothing.
        if not skipped[-1]:
            for name, gradient in optimizer.gradients[-1].items():
                tensors[f"step {step} gradient of {name}"] = (boxes[name], gradient.float().cpu() / scale)
        for name, parameter in engine.parameters.items():
            # Masters are rounded to the dtype of the weights, which is what ranks compute with.
            weight = local(parameter.detach()).to(DTYPES[case.precision])
            tensors[f"step {step} weight {name}"] = (boxes[name], weight.float().clone().cpu())
    loss, norms, scales, balances = (tuple(values) for values in numbers.values())
    overflow = case.overflow if scaler else 0
    return RankOutcome(loss, norms, tensors, scales, balances, margins.smallest, tuple(skipped), overflow)


def _set_scale(scaler: LossScaler | None, case: Case, step: int) -> float:
    """Set the loss scale of a step: far above the range of fp16 where it overflows, far below in the next step."""
    if scaler is None:
        return 1.0
    if step == 1 or case.overflow in (step, step - 1):
        scaler.scale.fill_(OVERFLOWING_SCALE if step == case.overflow else SCALE)
    return scaler.scale.item()


def assemble(outcomes: Sequence[RankOutcome]) -> dict[str, Tensor]:
    """Return whole tensors by name. Raises AssertionError when copies on two ranks differ or a part is missing."""
    tensors: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for rank_outcome in outcomes:
        for name, (box, tensor) in rank_outcome.tensors.items():
            if name not in tensors:
                tensors[name], seen[name] = torch.zeros(box.whole), torch.zeros(box.whole, dtype=torch.bool)
            part, filled = tensors[name][box.slices], seen[name][box.slices]
            # Ranks that hold the same piece may have added its terms in another order.
            if filled.any() and not torch.allclose(part[filled], tensor[filled], rtol=1e-6, atol=1e-9):
                raise AssertionError(f"ranks hold different copies of {name}")
            part.copy_(tensor)
            filled.fill_(True)
    for name, complete in seen.items():
        if not complete.all():
            raise AssertionError(f"no rank holds all of {name}")
    return tensors


def first_difference(alone: RankOutcome, others: Sequence[RankOutcome], band: Band = BANDS["fp32"]) -> str | None:
    """Return the first difference between one device and the ranks of a layout. None = all is equal.

    Differences are relative to a tensor's largest element (or its length), since the rounding of a sum grows with its
    terms, not with their total. A gradient that is zero but for rounding (of key biases) counts as a small share of the
    gradient norm (Band.zero). Infinite numbers equal nothing, except in the step that must overflow.
    """
    # Scalars first: they differ already where a sum over ranks is wrong, and cost nothing to compare.
    for index, other in enumerate(others):
        for what, mine, theirs, tolerance in (
            ("loss", alone.losses, other.losses, band.loss),
            ("gradient norm", alone.norms, other.norms, band.norm),
            ("balance loss", alone.balances, other.balances, band.loss),
            ("loss scale", alone.scales, other.scales, 0.0),
        ):
            for step, (a, b) in enumerate(zip(mine, theirs, strict=True), start=1):
                if not (_is_close(a, b, tolerance) or (step == alone.overflow and not isfinite(a) and not isfinite(b))):
                    return f"step {step}: {what} is {b!r} on rank {index}, {a!r} on one device"
        for step, (a, b) in enumerate(zip(alone.skipped, other.skipped, strict=True), start=1):
            if a != b:
                return f"step {step}: skipped is {b} on rank {index}, {a} on one device"
    try:
        tensors = assemble(others)
    except AssertionError as error:
        return str(error)
    for name in alone.tensors:
        if name not in tensors:
            return f"{name} is on no rank"
        off = distance(name, alone, tensors, band)
        if not off <= (band.weight if begins_large(name) else band.gradient):
            return f"{name} differs by {off:.1e} of its {'length' if band.by_length else 'largest element'}"
    return None


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return isfinite(a) and isfinite(b) and abs(a - b) <= tolerance * abs(a)


def begins_large(name: str) -> bool:
    """Return False for biases, which start at zero, and adapters' B: sums of updates are as exact as gradients."""
    return " weight " in name and not name.endswith((".bias", "lora.b"))


def distance(name: str, alone: RankOutcome, whole: dict[str, Tensor], band: Band) -> float:
    """Return how far the ranks' tensor is from one device's, see `first_difference`."""
    size = torch.linalg.vector_norm if band.by_length else _largest
    expected = alone.tensors[name][1]
    smallest = band.zero * max((norm for norm in alone.norms if isfinite(norm)), default=0.0)
    gaps = (whole[name] - expected) * ~_decided_by_rounding(name, alone, band)
    return relative(float(size(gaps)), max(size(expected).item(), smallest))


def relative(gap: float, size: float) -> float:
    """Return gap / size. For size 0: 0 without a gap, else infinity."""
    return gap / size if size else inf if gap else 0.0


def _decided_by_rounding(name: str, alone: RankOutcome, band: Band) -> Tensor:
    """Return the elements of a weight that rounding decides.

    In one of the steps so far their gradient was no larger than its rounding, and AdamW divides by its size, Muon by
    its length. The gradients are compared. In fp32 this concerns whole tensors, such as those of queries and keys if
    only first positions are targets. In 16 bits it concerns parts of biases.
    """
    undecided = torch.zeros(alone.tensors[name][1].shape, dtype=torch.bool)
    step, is_weight, parameter = name.removeprefix("step ").partition(" weight ")
    for number in range(1, int(step) + 1) if is_weight else ():
        key = f"step {number} gradient of {parameter}"
        # A skipped step has no gradients.
        if key not in alone.tensors:
            continue
        gradient, norm = alone.tensors[key][1], alone.norms[number - 1]
        largest = _largest(gradient)
        # Exactly zero here is zero in every layout in fp32 alone.
        if isfinite(norm) and largest <= torch.finfo(torch.float32).eps * norm and (largest > 0 or band.by_length):
            undecided |= True
        elif band.by_length and not begins_large(name):
            undecided |= gradient.abs() <= band.gradient * gradient.square().mean().sqrt()
    return undecided


def _largest(x: Tensor) -> Tensor:
    return x.abs().max()


@torch.no_grad()
def initialize_adapters(engine: Engine, seed: int) -> None:
    """Give adapters' B weights of ordinary size: at zero, A has no gradient and B is nothing but its first update."""
    shape, parameters = engine.model.shape, engine.parameters
    for name, box in engine.local_boxes().items():
        if name.endswith("lora.b") and shape.lora is not None:
            part, drawn = local(parameters[name]), f"{name.removesuffix('b')}a"
            fill_initial(part, drawn, shape, seed + 1, whole=box.whole, offsets=box.offsets)
            part.mul_(width_deviation(shape.hidden) / shape.lora.scale)


class Margins:
    """Smallest margin of all choices of watched routers: inf before the first."""

    def __init__(self) -> None:
        self.smallest = float("inf")

    def see(self, router: nn.Module, inputs: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record the choice of a router, as its forward hook."""
        assert isinstance(router, Router)
        _, experts, probabilities = out
        self.smallest = min(self.smallest, margin(router.moe, probabilities, experts))


def margin(moe: MoEShape, scores: Tensor, experts: Tensor) -> float:
    """Return the smallest change of a score in (N, X) that would give any token other experts than (N, k).

    inf = no token has another choice. Two layouts may choose differently at a near tie, and both are right: routing is
    the only step of a model that rounding can change by more than rounding.
    """
    scores = scores.detach()
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    allowed, margins = torch.ones_like(is_chosen), []
    if moe.top_groups < moe.groups:
        grouped = scores.view(len(scores), moe.groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        ranked = strength.sort(dim=-1, descending=True)
        margins.append(ranked.values[:, moe.top_groups - 1] - ranked.values[:, moe.top_groups])
        best = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, ranked.indices[:, : moe.top_groups], True)
        allowed = best.repeat_interleave(grouped.shape[-1], dim=1)
    accepted = scores.masked_fill(~is_chosen, float("inf")).amin(1)
    rejected = scores.masked_fill(is_chosen | ~allowed, float("-inf")).amax(1)
    margins.append(accepted - rejected)
    return min(float(margin_of_tokens.min()) for margin_of_tokens in margins)


def watch_margins(stages: Iterable[nn.Module]) -> Margins:
    """Watch every router of a model from now on."""
    margins = Margins()
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Router):
            module.register_forward_hook(margins.see)
    return margins
