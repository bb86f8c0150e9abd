"""The reference of an objective over pairs: what the model said of every answer before the first step.

Its own engine computes it under the run's layout, once, so that no second model is held. The numbers are kept on disk
(reference_store.py): a run goes on with those that it began with.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.corpus import Stream
from meshwright.data.numbered_rows import numbered_rows
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.parallel.agree import RankZero
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, RunError
from meshwright.spec.objective_traits import most_answers
from meshwright.spec.units import duration
from meshwright.store import checkpoint
from meshwright.training import reference_store as store
from meshwright.training.batches import Batch, OfAnswers, Share, held_out
from meshwright.training.evaluate import evaluating, runs
from meshwright.training.objectives import TEXT, Task, objective_of
from meshwright.training.preference import REFERENCE, answer_sums
from meshwright.training.reference_store import AnswerTables
from meshwright.training.step import EVALUATION, MicroPass

LONG_S = 30.0
"""What takes longer is announced."""
TIMED = 8
"""After so many batches, the first of which are slower than others."""
log = logging.getLogger(__name__)
NUMBERS = "numbers"
"""Name of the answers' numbers in their stream, (B, A), in `Batch.more`."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """The reference of one run: found on disk, or to be measured while the engine holds the first weights."""

    plan: Plan
    corpus: Corpus
    device: torch.device
    rank_zero: RankZero
    run: Path
    found: Path | None
    """The checkpoint that the run goes on from."""
    tables: AnswerTables | None = None
    said: str = ""
    """A sentence for the first lines of the run; empty where no reference is needed."""
    _settings: str = field(init=False, default="")
    _weights: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """PlanError where the first weights are gone and nothing was kept of them."""
        if not self.plan.recipe.traits.reference:
            return
        self._settings = store.settings_of(self.plan, self.corpus, self.device.type)
        known = self.rank_zero.broadcast(self._look)
        self._weights, self.said, self.tables = known

    @property
    def first_weights(self) -> str:
        """Hash of the weights that answers are compared with; empty where they are with none."""
        return self._weights

    @property
    def lost(self) -> bool:
        """The run goes on, and the first weights must be had once more."""
        return self._missing and self._goes_on

    @property
    def _missing(self) -> bool:
        return self.plan.recipe.traits.reference and self.tables is None

    @property
    def _goes_on(self) -> bool:
        """From weights that steps have changed."""
        return self.found is not None and not holds_weights_only(self.found)

    def measure(self, engine: Engine, share: Share) -> None:
        """Compute what is missing, with the first weights in the engine; the first rank writes it."""
        if not self._missing:
            return
        began = time.perf_counter()
        train, validation = (
            self._table(engine, share, stream) for stream in (self.corpus.train, self.corpus.validation)
        )
        self.tables = AnswerTables(train=train, validation=validation)
        took = duration(time.perf_counter() - began)
        self.said = f"log-probabilities under the first weights, computed in {took}"
        self.rank_zero.run(self._write)

    def task(self) -> Task:
        """What the run minimizes."""
        if self.plan.recipe.traits.teacher:
            return TEXT
        objective = objective_of(self.plan.recipe)
        if self.tables is None:
            return Task(objective=objective, scored=objective)
        of_training, of_validation = (_looked_up(one) for one in (self.tables.train, self.tables.validation))
        return Task(objective=objective, scored=objective, of_training=of_training, of_validation=of_validation)

    def _look(self) -> tuple[str, str, AnswerTables | None]:
        """(hash of the first weights, what is said, tables) on the first rank."""
        kept = self.run / store.NAME
        began = str(checkpoint.values(self.found).get("first_weights", "")) if self._goes_on and self.found else ""
        if self._goes_on and (tables := store.read(kept, self._settings, None)) is not None:
            return began, f"log-probabilities that the run began with, {kept}", tables
        weights = store.weights_of(self.plan, None if self._goes_on else self.found)
        if self._goes_on and began and began != weights:
            raise PlanError(
                f"{kept} is missing, or was computed in another precision or on another kind of device. The "
                f"weights of model.init={self.plan.init} are not those of the start of the run. Put the file or "
                "the weights back"
            )
        for path in (kept, store.cached(self._settings, weights)):
            if (tables := store.read(path, self._settings, weights)) is not None:
                if path != kept:
                    self._keep(kept, tables, weights)
                return weights, f"log-probabilities under the first weights, found in {path}", tables
        return weights, "", None

    def _write(self) -> None:
        assert self.tables is not None, "they were measured"
        self._keep(self.run / store.NAME, self.tables, self._weights)
        with suppress(OSError):  # other runs compute it themselves
            store.write(store.cached(self._settings, self._weights), self.tables, self._settings, self._weights)

    def _keep(self, path: Path, tables: AnswerTables, weights: str) -> None:
        try:
            store.write(path, tables, self._settings, weights)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; fix that, or choose another run=") from error

    def _table(self, engine: Engine, share: Share, stream: Stream) -> NDArray[np.float64]:
        plan = self.plan
        rows = numbered_rows(plan.data, plan.recipe, self.corpus, stream, shuffle=False)
        size = plan.layout.micro_batch_of(plan.recipe.global_batch)
        batches = held_out(
            rows,
            self.device,
            rows=size,
            limit=0,
            document_mask=plan.recipe.document_mask,
            share=share,
            of_answers=lambda numbers: {NUMBERS: numbers},
        )
        if self.rank_zero.is_here:
            batches = announced(batches, -(-len(rows) // (size * share.parts)))
        answers = most_answers(plan.recipe.sequence)
        return log_probabilities(engine, batches, stream.num_documents, answers, self.device).numpy()


def announced(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    """The batches, `number` of them; what takes long is said once it is known how long."""
    began = time.perf_counter()
    for done, batch in enumerate(batches):
        left_s = (time.perf_counter() - began) / max(1, done) * (number - done)
        if done == TIMED and left_s > LONG_S:
            log.warning("log-probabilities of answers under the first weights take about %s more", duration(left_s))
        yield batch


def holds_weights_only(found: Path) -> bool:
    """Of a checkpoint: it is of no step (an import)."""
    return not any(name.startswith("optimizer.") for name in checkpoint.names(found))


def log_probabilities(
    engine: Engine, batches: Iterable[Batch], samples: int, answers: int, device: torch.device
) -> Tensor:
    """Of every sample of a stream (N,) fp64 on the host, in nats, on every rank; 0 for those that no batch has.
    `answers`: the most of a row; batches have their numbers."""
    table = torch.zeros(samples, dtype=torch.float64)
    if not samples:
        return table
    with evaluating(engine):
        for some in runs(batches, engine.mesh["pp"].size):
            recorded = [RecordedAnswers(answers) for _ in some]
            engine.evaluate([MicroPass(*one) for one in zip(some, [EVALUATION] * len(some), recorded, strict=True)])
            for batch, one in zip(some, recorded, strict=True):
                if one.found is not None and engine.mesh["cp"].index == 0:  # all ranks of cp have the same
                    _note(table, batch.more[NUMBERS], one.found)
    return engine.mesh["losses"].all_reduce(table.to(device)).cpu()


def _note(table: Tensor, numbers: Tensor, found: Tensor) -> None:
    here = numbers >= 0
    table[numbers[here].cpu()] = found[here].cpu()


class RecordedAnswers:
    """In place of an objective: the log-probabilities of a batch's answers (B, A) are kept, on the last stage."""

    by_position = True
    figures = ()

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.found: Tensor | None = None

    def count(self, batch: Batch) -> float:
        """Nothing is divided."""
        return 1.0

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Zero."""
        self.found = answer_sums(predictions, batch, self.answers).log_probability.detach()
        return torch.zeros((), device=self.found.device)


def _looked_up(table: NDArray[np.float64]) -> OfAnswers:
    known = np.append(table, 0.0)  # the last one is that of -1

    def of(numbers: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        return {REFERENCE: known[numbers]}

    return of
