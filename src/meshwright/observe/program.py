"""The program of one training process: build, two optimizer steps, an evaluation, a checkpoint.

The steps have the largest size of the batch ramp. Where a thread writes checkpoints, its copy is made between them.
The functions are those that `train` calls. They run on tensors without values as well as on real ones. A dry run and
the measurement it is compared with are therefore the same program.
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
from meshwright.parallel import Mesh
from meshwright.parallel.groups.group import Group
from meshwright.planner.memory.engine_peak import moments
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import Layout, place_of
from meshwright.spec.layout.schedule import schedule
from meshwright.spec.memory.held import WIDTHS, cache_bytes, written_bytes
from meshwright.spec.recipe.recipe import most_answers
from meshwright.spec.rules.passes import draws_dropout
from meshwright.store.saver import Staging, copied_bytes
from meshwright.training.loop import new_state
from meshwright.training.objectives.objectives import LIKELIEST, LOGS, REFERENCE, objective_of
from meshwright.training.objectives.teacher import build_distillation
from meshwright.training.objectives.teacher_targets import sizes_of
from meshwright.training.optimizer.optimizer import learning_rate
from meshwright.training.step.batches import Batch, Share, split, to_batch, to_columns, with_token_keys
from meshwright.training.step.evaluate import summed_loss
from meshwright.training.step.state import TrainState, round_largest
from meshwright.training.step.step import CROSS_ENTROPY, Objective, train_step

PartListener = Callable[[str], None]
"""Called with the name of each part before it begins: `build`, `step 1`, `update 1` (its optimizer), `evaluate` ..."""
DOCUMENT_TOKENS = 512
"""Tokens of a packed document, which sizes the kernels' per-document memory. Web pages have a few hundred words."""
ENOUGH = 3
"""Micro-batches without a pipeline: the first, one that finds gradients, the last."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing by which every rank sends this rank's experts `load` times an even share; the others share the rest."""

    group: Group
    load: float = 1.0

    def counts(self, counts: Tensor, rows: int) -> list[list[int]]:
        """Return the row counts that replace model.seams.counts_on_host.

        `counts` is (1 or 2, X): rows that leave, and rows that arrive. Raises PlanError when the load exceeds all rows.
        """
        experts = counts.shape[1]
        leaving = self._dealt(rows, experts)
        if len(counts) == 1:
            return [leaving]
        # All ranks send alike, so what arrives is this rank's part of one deal, from each of them.
        local = experts // self.group.size
        arriving = leaving[self.group.index * local : (self.group.index + 1) * local]
        return [leaving, arriving * self.group.size]

    def _dealt(self, rows: int, experts: int) -> list[int]:
        """Return the rows of one rank over all experts; the first experts take the remainder."""
        local = experts // self.group.size
        begin = self.group.index * local
        if self.load == 1.0 or local == experts:
            return _even(rows, experts)
        rows_here = round(rows * local / experts * self.load)
        if not 0 <= rows_here <= rows:
            raise PlanError(
                f"a load of {self.load:g} on one of {self.group.size} ranks is more than all rows: take less"
            )
        others = _even(rows - rows_here, experts - local)
        return others[:begin] + _even(rows_here, local) + others[begin:]


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (part < rows % parts) for part in range(parts)]


@dataclass(slots=True, kw_only=True)
class TrainingProgram:
    """One rank's part of the training program."""

    plan: Plan
    mesh: Mesh
    device: torch.device
    on_part: PartListener
    routing: float | None = None
    """Rows that this rank's experts get, relative to an even share. None = the router decides."""
    documents: bool = False
    """True if rows hold document borders and attention has a mask."""
    initialize: bool = False
    acts_as: str = ""
    """Kind of device that the tensors stand for: cpu or cuda. Empty = that of `device`."""
    assigned: Callable[[Mapping[str, Tensor]], set[str] | None] | None = None
    """Returns the names of those tensors that this rank writes. None = an even share.

    Asked on a CPU when a thread writes checkpoints. Without it no copy is made.
    """
    staging_bytes: int = field(default=0, init=False)
    """Host memory of the copy that the thread writes from; on a GPU it adds to the device's."""
    state: TrainState = field(init=False)
    objective: Objective = field(init=False)
    batches: list[Batch] = field(init=False)
    read_ahead: list[Batch] = field(init=False)
    """Micro-batches of the next step, which a thread reads during this one."""
    _staging: Staging = field(default_factory=Staging, init=False)

    def __post_init__(self) -> None:
        self.plan = replace(self.plan, recipe=self.plan.recipe.largest)

    def build(self) -> None:
        """Create the model, the optimizer and the tokens of a step."""
        self.on_part("build")
        self.state = new_state(self.plan, self.mesh, self.device, initialize=self.initialize)
        if not self.initialize:
            round_largest(self.state, self.plan)
        self.state.engine.train()
        self.objective = self._objective()
        if self.routing is not None:
            for stage in self.state.engine.stages:
                stage.seams.counts_on_host = Routing(self.mesh["ep"], self.routing).counts
        self.on_part("tokens")
        # Two steps' tokens: a thread reads the next batch during a step, and both are in memory.
        self.batches, self.read_ahead = self._tokens(), self._tokens()

    def _objective(self) -> Objective:
        if not self.plan.recipe.traits.teacher:
            return objective_of(self.plan.recipe)
        return build_distillation(self.plan, self.mesh, self.device, loads=False)

    def step(self, number: int, count: int) -> None:
        """Run optimizer step `number` (from 1) over the first `count` micro-batches.

        The second step also measures the noise scale where the recipe does: it needs one more copy of all gradients.
        """
        recipe, state = self.plan.recipe, self.state
        if recipe.distillation_on_policy:
            self._sample(number)
        self.on_part(f"step {number}")
        train_step(
            state.engine, state.optimizer, self.batches[:count], rate=learning_rate(recipe, number),
            clip=recipe.clip, balance_loss=recipe.balance_loss, scaler=state.scaler,
            measure_noise=bool(recipe.noise_scale_every) and number == 2,
            before_update=lambda: self.on_part(f"update {number}"), objective=self.objective,
        )  # fmt: skip

    def _sample(self, number: int) -> None:
        """Allocate the cache of a student that writes answers. Its tokens are unknown, so nothing is computed."""
        self.on_part(f"sample {number}")
        layout, width = self.plan.layout, WIDTHS[self.plan.recipe.precision].parameter
        size = cache_bytes(self.plan.model, self.plan.recipe, layout, width)
        torch.zeros(size, dtype=torch.uint8, device=self.device)

    def copy(self) -> None:
        """Copy what this rank writes to the first checkpoint, where a thread writes it. The memory stays in use."""
        kind = self.acts_as or self.device.type
        if self.assigned is None or not self.plan.copies_state(kind):
            return
        self.on_part("copy")
        offered = self.state.pieces()
        names = self.assigned(offered) if kind == "cpu" else None
        if names is None:
            recipe, layout = self.plan.recipe, self.plan.layout
            self.staging_bytes = written_bytes(
                self.plan.model, layout, recipe.precision, self.mesh.rank, storage=recipe.storage
            )
            return
        written = {name: offered[name] for name in offered if name in names}
        self.staging_bytes = copied_bytes(written.values())
        self._staging.copy(written)

    def rest(self) -> None:
        """Run the evaluation, and read the state as a checkpoint does."""
        self.on_part("evaluate")
        # A distilled student is evaluated on the text itself, without its teacher.
        scored = CROSS_ENTROPY if self.plan.recipe.traits.teacher else self.objective
        summed_loss(self.state.engine, self.batches[: self.plan.layout.pp], scored)
        self.on_part("save")
        self.state.pieces()
        self.on_part("end")

    def _tokens(self) -> list[Batch]:
        """Return the micro-batches of one step; all tokens are zero and valid."""
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
            read_answers=(lambda numbers: {REFERENCE: numbers.astype(np.float64)}) if traits.reference else None,
        )  # fmt: skip
        # A GPU's kernels make room for each document, whose number real text would give.
        if self.documents:
            documents = (-(-recipe.sequence // DOCUMENT_TOKENS), recipe.sequence)
            batch = replace(batch, documents_of_rows=(documents,) * rows)
        if recipe.distillation_top_k:
            batch = replace(batch, more=to_columns(self._teacher_answers(rows), share, self.device))
        if draws_dropout(self.plan.model, recipe):
            batch = with_token_keys(batch, recipe.seed, 0, share)
        return split(batch, layout.micro_batch_of(recipe.global_batch))

    def _teacher_answers(self, rows: int) -> dict[str, NDArray[Any]]:
        """Return columns for a teacher's likeliest tokens, in the widths that a run reads."""
        sizes = sizes_of(self.plan, rows)
        shape = rows, sizes.sequence
        return {
            LIKELIEST: np.zeros((*shape, sizes.top), dtype=np.int32),
            LOGS: np.zeros((*shape, sizes.top + 1), dtype=np.float16),
        }  # fmt: skip


@contextmanager
def without_values() -> Iterator[None]:
    """Run a program on tensors without values. Raises PlanError when a size or a choice depends on values."""
    try:
        yield
    except compat.data_dependent_errors() as error:
        raise PlanError(
            f"this model cannot be run without values: a size or a choice depends on them ({str(error)[:200]})"
        ) from None


def probe_counts(plan: Plan, rank: int) -> tuple[int, int]:
    """Return micro-batch counts of two steps after which nothing new happens on a rank.

    A short step is taken whole. A long one is cut to a few micro-batches, enough to reach every peak of memory:
    micro-batches in flight, gradients that wait for their weights, and gradients that exist already.
    """
    layout, all_micro_batches = plan.layout, plan.layout.micro_batches(plan.recipe.global_batch)
    if layout.pp == 1:
        return (all_micro_batches, all_micro_batches) if all_micro_batches <= ENOUGH else (1, ENOUGH)
    stage = place_of(layout, rank)["pp"]
    legal = [count for count in range(1, all_micro_batches) if _has_schedule(layout, count)]
    full = moments(layout, all_micro_batches, stage)
    enough = next((index for index, count in enumerate(legal) if moments(layout, count, stage) == full), len(legal))
    # Two steps of different sizes tell what a micro-batch costs.
    enough = max(1, enough)
    return (
        (legal[0], legal[enough] if enough < len(legal) else all_micro_batches)
        if legal
        else (all_micro_batches, all_micro_batches)
    )


def _has_schedule(layout: Layout, micro_batches: int) -> bool:
    try:
        schedule(layout.schedule, layout.pp, micro_batches, layout.vp)
    except IllegalLayout:
        return False
    return True


def extrapolate_step(first: int, second: int, counts: tuple[int, int], whole: int) -> int:
    """Extrapolate a whole step from two steps with `counts` micro-batches: a fixed part and one per micro-batch."""
    if counts[0] == counts[1]:
        return second
    parts, rest = divmod((second - first) * (whole - counts[0]), counts[1] - counts[0])
    assert not rest, "what a step sends is a fixed part and one for each micro-batch"
    return first + parts
