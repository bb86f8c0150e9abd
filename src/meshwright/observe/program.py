"""What a training process does, once: build, two optimizer steps of the largest size of the batch ramp, an evaluation,
the state as a checkpoint reads it; and between the steps the copy of it that a thread writes, where one does.

The functions are those that `train` calls. They run here on tensors without values as well as on real ones, so a dry
run and the measurement it is compared with are the same program.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright import compat
from meshwright.data import Sequences
from meshwright.observe.uniform_routing import Routing
from meshwright.parallel import Mesh
from meshwright.planner.memory.engine_peak import moments
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.held import WIDTHS, written_bytes
from meshwright.spec.layout import Layout
from meshwright.spec.objective_traits import most_answers
from meshwright.spec.places import place_of
from meshwright.spec.sampling_memory import cache_bytes
from meshwright.spec.schedule import schedule
from meshwright.store.staging import Staging, copied_bytes
from meshwright.training.batches import Batch, Share, columns_of, split, to_batch
from meshwright.training.distillation import LIKELIEST, LOGS
from meshwright.training.evaluate import summed_loss
from meshwright.training.loop import new_state
from meshwright.training.objectives import objective_of
from meshwright.training.preference import REFERENCE
from meshwright.training.pretrained import round_largest
from meshwright.training.rate import learning_rate
from meshwright.training.state import TrainState
from meshwright.training.step import CROSS_ENTROPY, Objective, train_step
from meshwright.training.teacher import distillation
from meshwright.training.teacher_targets import sizes_of

Stage = Callable[[str], None]
"""Told of each part of the program before it begins: `build`, `step 1`, `update 1` (its optimizer), `evaluate` ..."""


@dataclass(slots=True, kw_only=True)
class TrainingProgram:
    """One rank's part. `routing` tells how tokens go to experts where their choice cannot be computed."""

    plan: Plan
    mesh: Mesh
    device: torch.device
    told: Stage
    routing: float | None = None
    """Rows that this rank's experts get over an even share; None = the router decides."""
    documents: bool = False
    """Whether rows hold borders of documents, and attention a mask."""
    initialize: bool = False
    acts_as: str = ""
    """cpu or cuda: for which kind of device the tensors stand; empty = what `device` says."""
    assigned: Callable[[Mapping[str, Tensor]], set[str] | None] | None = None
    """Names of the tensors that this rank writes of those it offers, None = an even share; asked on a CPU where a
    thread writes checkpoints. Without it none does."""
    staging_bytes: int = field(default=0, init=False)
    """Host memory of the copy that the thread writes from; on a GPU it lies beside the device's."""
    state: TrainState = field(init=False)
    objective: Objective = field(init=False)
    batches: list[Batch] = field(init=False)
    read_ahead: list[Batch] = field(init=False)
    """Of the next step, which a thread reads while this one is made."""
    _staging: Staging = field(default_factory=Staging, init=False)

    def __post_init__(self) -> None:
        self.plan = replace(self.plan, recipe=self.plan.recipe.largest)

    def build(self) -> None:
        """Model, optimizer, the tokens of a step."""
        self.told("build")
        self.state = new_state(self.plan, self.mesh, self.device, initialize=self.initialize)
        if not self.initialize:
            round_largest(self.state, self.plan)
        self.state.engine.train()
        self.objective = self._objective()
        if self.routing is not None:
            for stage in self.state.engine.stages:
                stage.seams.counts_on_host = Routing(self.mesh["ep"], self.routing).counts
        self.told("tokens")
        self.batches, self.read_ahead = self._tokens(), self._tokens()

    def _objective(self) -> Objective:
        if not self.plan.recipe.traits.teacher:
            return objective_of(self.plan.recipe)
        return distillation(self.plan, self.mesh, self.device, loads=False)

    def step(self, number: int, count: int) -> None:
        """Optimizer step `number` (from 1) over the first `count` micro-batches. Where the noise scale is measured, the
        second step does: it keeps one more copy of all gradients."""
        recipe, state = self.plan.recipe, self.state
        if recipe.distillation_on_policy:
            self._sample(number)
        self.told(f"step {number}")
        train_step(
            state.engine, state.optimizer, self.batches[:count], rate=learning_rate(recipe, number),
            clip=recipe.clip, balance_loss=recipe.balance_loss, scaler=state.scaler,
            measure_noise=bool(recipe.noise_scale_every) and number == 2,
            before_update=lambda: self.told(f"update {number}"), objective=self.objective,
        )  # fmt: skip

    def _sample(self, number: int) -> None:
        """The cache of a student that writes answers, for as long as it does. Which tokens come is not known here, so
        that nothing is computed with it."""
        self.told(f"sample {number}")
        layout, width = self.plan.layout, WIDTHS[self.plan.recipe.precision].parameter
        size = cache_bytes(self.plan.model, self.plan.recipe, layout, width)
        torch.zeros(size, dtype=torch.uint8, device=self.device)

    def copy(self) -> None:
        """The first checkpoint, where a thread writes it: what this rank writes, in memory kept from then on."""
        kind = self.acts_as or self.device.type
        if self.assigned is None or not self.plan.copies_state(kind):
            return
        self.told("copy")
        offered = self.state.pieces()
        names = self.assigned(offered) if kind == "cpu" else None
        if names is None:
            recipe, layout = self.plan.recipe, self.plan.layout
            self.staging_bytes = written_bytes(
                self.plan.model, layout, recipe.precision, self.mesh.rank, storage=recipe.storage
            )
            return
        own = {name: offered[name] for name in offered if name in names}
        self.staging_bytes = copied_bytes(own.values())
        self._staging.copy(own)

    def rest(self) -> None:
        """Evaluation, and what a checkpoint reads."""
        self.told("evaluate")
        scored = CROSS_ENTROPY if self.plan.recipe.traits.teacher else self.objective
        summed_loss(self.state.engine, self.batches[: self.plan.layout.pp], scored)
        self.told("save")
        self.state.pieces()
        self.told("end")

    def _tokens(self) -> list[Batch]:
        """The micro-batches of a step; tokens are a row of zeros, valid all of them."""
        recipe, layout = self.plan.recipe, self.plan.layout
        rows = recipe.global_batch // layout.dp
        share = Share(index=self.mesh.reader, parts=layout.dp, columns=self.state.engine.columns(recipe.sequence))
        zeros, places = (np.zeros((rows, recipe.sequence), dtype=dtype) for dtype in (np.int64, np.int32))
        traits = recipe.traits
        answers = np.zeros((rows, most_answers(recipe.sequence)), dtype=np.int64) if traits.pairs else None
        blank = Sequences(
            tokens=zeros, targets=zeros, documents=places, positions=places, packed=self.documents, answers=answers
        )
        batch = to_batch(
            blank, self.device, document_mask=self.documents, share=share,
            of_answers=(lambda numbers: {REFERENCE: numbers.astype(np.float64)}) if traits.reference else None,
        )  # fmt: skip
        if self.documents:  # a GPU's kernels have room for each
            known = (-(-recipe.sequence // DOCUMENT_TOKENS), recipe.sequence)
            batch = replace(batch, documents_of_rows=(known,) * rows)
        if recipe.distillation_top_k:
            batch = replace(batch, more=columns_of(self._kept(rows), share, self.device))
        return split(batch, layout.micro_batch_of(recipe.global_batch))

    def _kept(self, rows: int) -> dict[str, NDArray[Any]]:
        """What rows have of a teacher that was asked before: its likeliest tokens, in the widths that a run reads."""
        sizes = sizes_of(self.plan, rows)
        shape = rows, sizes.sequence
        return {
            LIKELIEST: np.zeros((*shape, sizes.top), dtype=np.int32),
            LOGS: np.zeros((*shape, sizes.top + 1), dtype=np.float16),
        }  # fmt: skip


@contextmanager
def without_values() -> Iterator[None]:
    """A program on tensors without values runs inside. PlanError where a size or a choice depends on values."""
    try:
        yield
    except compat.data_dependent() as error:
        raise PlanError(
            f"this model cannot be run without values: a size or a choice depends on them ({str(error)[:200]})"
        ) from None


def shortened(plan: Plan, rank: int) -> tuple[int, int]:
    """Micro-batches of two steps after which nothing new happens on a rank: the whole step where it is short, else a
    few, and as many as bring every moment at which it may hold most: of micro-batches in flight, of gradients of
    weights that wait, of gradients that are there already."""
    layout, whole = plan.layout, plan.layout.micro_batches(plan.recipe.global_batch)
    if layout.pp == 1:
        return (whole, whole) if whole <= ENOUGH else (1, ENOUGH)
    place = place_of(layout, rank)["pp"]
    legal = [count for count in range(1, whole) if _has_schedule(layout, count)]
    full = moments(layout, whole, place)
    enough = next((index for index, count in enumerate(legal) if moments(layout, count, place) == full), len(legal))
    enough = max(1, enough)  # two steps of different sizes tell what a micro-batch costs
    return (legal[0], legal[enough] if enough < len(legal) else whole) if legal else (whole, whole)


DOCUMENT_TOKENS = 512
"""Of a packed document, for what its kernels take for each: web pages have a few hundred words."""
ENOUGH = 3
"""Micro-batches without a pipeline: the first, one that finds gradients, the last."""


def _has_schedule(layout: Layout, micro_batches: int) -> bool:
    try:
        schedule(layout.schedule, layout.pp, micro_batches, layout.vp)
    except IllegalLayout:
        return False
    return True


def at_whole(first: int, second: int, counts: tuple[int, int], whole: int) -> int:
    """What a whole step costs, of two steps with `counts` micro-batches: a fixed part and one for each micro-batch."""
    if counts[0] == counts[1]:
        return second
    parts, rest = divmod((second - first) * (whole - counts[0]), counts[1] - counts[0])
    assert not rest, "what a step sends is a fixed part and one for each micro-batch"
    return first + parts
