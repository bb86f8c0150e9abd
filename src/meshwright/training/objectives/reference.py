"""The reference of an objective over pairs: log-probabilities of every answer under the first weights.

The run's own engine computes them once, under the run's layout, so no second model is held. They are stored on disk
(reference_store.py), and a run resumes with those that it started with.
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
from meshwright.data.corpus.corpus import Stream
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.parallel.groups.agree import RankZero
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, RunError
from meshwright.spec.recipe.recipe import most_answers
from meshwright.spec.units import duration
from meshwright.store import checkpoint
from meshwright.training.objectives import reference_store as store
from meshwright.training.objectives.objectives import TEXT, Task, objective_of
from meshwright.training.objectives.preference import REFERENCE, answer_sums
from meshwright.training.objectives.reference_store import AnswerTables
from meshwright.training.step.batches import AnswerReader, Batch, Share, held_out_batches
from meshwright.training.step.evaluate import evaluating, in_groups
from meshwright.training.step.step import EVALUATION, MicroPass

ANNOUNCED_S = 30.0
"""Passes that take longer are announced."""
TIMED_BATCHES = 8
"""Batches after which the time is estimated; the first ones are slower than others."""
log = logging.getLogger(__name__)
NUMBERS = "numbers"
"""Name in `Batch.more` of the answers' numbers in their stream, (B, A)."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """The reference of one run: read from disk, or measured while the engine holds the first weights."""

    plan: Plan
    corpus: Corpus
    device: torch.device
    rank_zero: RankZero
    run: Path
    checkpoint_path: Path | None
    """The checkpoint that the run resumes from."""
    tables: AnswerTables | None = None
    sentence: str = ""
    """A sentence for the first lines of the run. Empty = no reference is needed."""
    first_weights: str = field(init=False, default="")
    """Hash of the weights that answers are compared with. Empty = no reference is needed."""
    _settings: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Look for stored tables. Raises PlanError when neither they nor the first weights exist any more."""
        if not self.plan.recipe.traits.reference:
            return
        self._settings = store.settings_of(self.plan, self.corpus, self.device.type)
        self.first_weights, self.sentence, self.tables = self.rank_zero.broadcast(self._find_tables)

    @property
    def needs_first_weights(self) -> bool:
        """True when a resumed run must have the first weights once more."""
        return self._is_missing and self._is_resumed

    @property
    def _is_missing(self) -> bool:
        return self.plan.recipe.traits.reference and self.tables is None

    @property
    def _is_resumed(self) -> bool:
        """True when the run starts from weights that steps have changed."""
        return self.checkpoint_path is not None and not holds_weights_only(self.checkpoint_path)

    def measure(self, engine: Engine, share: Share) -> None:
        """Compute what is missing with the first weights in the engine. Rank 0 stores it."""
        if not self._is_missing:
            return
        started = time.perf_counter()
        train, validation = (
            self._compute_table(engine, share, stream) for stream in (self.corpus.train, self.corpus.validation)
        )
        self.tables = AnswerTables(train=train, validation=validation)
        took = duration(time.perf_counter() - started)
        self.sentence = f"log-probabilities under the first weights, computed in {took}"
        self.rank_zero.run(self._write)

    def task(self) -> Task:
        """Return what the run minimizes."""
        if self.plan.recipe.traits.teacher:
            return TEXT
        objective = objective_of(self.plan.recipe)
        if self.tables is None:
            return Task(objective=objective, scored=objective)
        training, validation = (_table_reader(table) for table in (self.tables.train, self.tables.validation))
        return Task(
            objective=objective,
            scored=objective,
            read_training_answers=training,
            read_validation_answers=validation,
        )

    def _find_tables(self) -> tuple[str, str, AnswerTables | None]:
        """Return (hash of the first weights, sentence, tables), on rank 0."""
        run_file = self.run / store.NAME
        earlier_weights = (
            str(checkpoint.read_values(self.checkpoint_path).get("first_weights", ""))
            if self._is_resumed and self.checkpoint_path
            else ""
        )
        if self._is_resumed and (tables := store.read(run_file, self._settings, None)) is not None:
            return earlier_weights, f"log-probabilities that the run began with, {run_file}", tables
        weights = store.weights_of(self.plan, None if self._is_resumed else self.checkpoint_path)
        if self._is_resumed and earlier_weights and earlier_weights != weights:
            raise PlanError(
                f"{run_file} is missing, or was computed in another precision or on another kind of device. The "
                f"weights of model.init={self.plan.init} are not those of the start of the run. Put the file or "
                "the weights back"
            )
        for path in (run_file, store.cached(self._settings, weights)):
            if (tables := store.read(path, self._settings, weights)) is not None:
                if path != run_file:
                    self._store(run_file, tables, weights)
                return weights, f"log-probabilities under the first weights, found in {path}", tables
        return weights, "", None

    def _write(self) -> None:
        assert self.tables is not None, "`measure` sets them"
        self._store(self.run / store.NAME, self.tables, self.first_weights)
        with suppress(OSError):  # other runs compute it themselves
            store.write(
                store.cached(self._settings, self.first_weights), self.tables, self._settings, self.first_weights
            )

    def _store(self, path: Path, tables: AnswerTables, weights: str) -> None:
        try:
            store.write(path, tables, self._settings, weights)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; fix that, or choose another run=") from error

    def _compute_table(self, engine: Engine, share: Share, stream: Stream) -> NDArray[np.float64]:
        plan = self.plan
        rows = numbered_rows(plan.data, plan.recipe, self.corpus, stream, shuffle=False)
        size = plan.layout.micro_batch_of(plan.recipe.global_batch)
        batches = held_out_batches(
            rows,
            self.device,
            rows=size,
            limit=0,
            document_mask=plan.recipe.document_mask,
            share=share,
            read_answers=lambda numbers: {NUMBERS: numbers},
        )
        if self.rank_zero.is_here:
            batches = with_progress(batches, -(-len(rows) // (size * share.parts)))
        answers = most_answers(plan.recipe.sequence)
        return log_probabilities(engine, batches, stream.num_documents, answers, self.device).numpy()


def with_progress(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    """Yield the batches, `number` of them. Announce a long pass once its time is known."""
    started = time.perf_counter()
    for done, batch in enumerate(batches):
        left_s = (time.perf_counter() - started) / max(1, done) * (number - done)
        if done == TIMED_BATCHES and left_s > ANNOUNCED_S:
            log.warning("log-probabilities of answers under the first weights take about %s more", duration(left_s))
        yield batch


def holds_weights_only(checkpoint_path: Path) -> bool:
    """Return whether a checkpoint is an import, which holds no optimizer states."""
    return not any(name.startswith("optimizer.") for name in checkpoint.names(checkpoint_path))


def log_probabilities(
    engine: Engine, batches: Iterable[Batch], samples: int, answers: int, device: torch.device
) -> Tensor:
    """Return the log-probability of every sample of a stream, (N,) fp64 on the host of every rank, in nats.

    Samples without a batch get 0. `answers` is the most of a row; batches carry their numbers.
    """
    table = torch.zeros(samples, dtype=torch.float64)
    if not samples:
        return table
    with evaluating(engine):
        for group in in_groups(batches, engine.mesh["pp"].size):
            recorders = [AnswerRecorder(answers) for _ in group]
            engine.evaluate(
                [MicroPass(batch, EVALUATION, recorder) for batch, recorder in zip(group, recorders, strict=True)]
            )
            for batch, recorder in zip(group, recorders, strict=True):
                if recorder.sums is not None and engine.mesh["cp"].index == 0:  # all ranks of cp have the same
                    _add_to_table(table, batch.more[NUMBERS], recorder.sums)
    return engine.mesh["losses"].all_reduce(table.to(device)).cpu()


def _add_to_table(table: Tensor, numbers: Tensor, sums: Tensor) -> None:
    here = numbers >= 0
    table[numbers[here].cpu()] = sums[here].cpu()


class AnswerRecorder:
    """Stand-in for an objective that records the log-probabilities of a batch's answers (B, A) on the last stage."""

    by_position = True
    figures = ()

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.sums: Tensor | None = None

    def count(self, batch: Batch) -> float:
        """Return 1: nothing is divided."""
        return 1.0

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Record the sums and return zero."""
        self.sums = answer_sums(predictions, batch, self.answers).log_probability.detach()
        return torch.zeros((), device=self.sums.device)


def _table_reader(table: NDArray[np.float64]) -> AnswerReader:
    padded = np.append(table, 0.0)  # the last entry is that of number -1

    def read(numbers: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        return {REFERENCE: padded[numbers]}

    return read
