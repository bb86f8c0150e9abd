"""The reference of an objective over pairs: log-probabilities of every answer under the first weights.

The run's own engine computes them once, under the run's layout, so no second model is held. A run resumes with those
that it started with, from its folder. The user's cache holds them by content, for other runs over equal weights and
pairs.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.corpus.corpus import Stream, read_json, write_json
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine
from meshwright.parallel.groups.group import RankZero
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, RunError, argument
from meshwright.spec.model.shape import SAME_BASE, ModelShape
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.recipe.recipe import most_answers
from meshwright.spec.units import duration
from meshwright.spec.user_cache import default_root
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.durable import replace_file
from meshwright.training.objectives.objectives import REFERENCE, TEXT, Task, answer_sums, objective_of
from meshwright.training.step.batches import AnswerReader, Batch, Share, held_out_batches
from meshwright.training.step.evaluate import evaluating, group_batches
from meshwright.training.step.step import EVALUATION, MicroPass

TABLES_FILE = "reference.safetensors"
_FORMAT: Final = 1
"""Raised whenever the same weights and pairs would give other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTables:
    """Log-probability of each sample (N,) in nats, 0 for those in no row."""

    train: NDArray[np.float64]
    validation: NDArray[np.float64]


def settings_of(plan: Plan, corpus: Corpus, device: str) -> str:
    """Return the hash of what decides the numbers in addition to the weights.

    That is the text and its template, where answers are cut, and how products are computed.
    """
    recipe = plan.recipe
    computed = recipe.precision, recipe.products, recipe.tf32, device
    return _hash(_FORMAT, corpus.fingerprint, recipe.sequence, plan.data.overlong, computed, _relevant_model(plan))


def _relevant_model(plan: Plan) -> tuple[ModelShape, str]:
    """Return the shape and the format of frozen matrices. Fresh adapters add nothing, and a name is no number."""
    return replace(plan.model.base, name=""), plan.model.lora.base if plan.model.lora else SAME_BASE


def weights_of(plan: Plan, checkpoint_path: Path | None) -> str:
    """Return a hash of the first weights: of a weights-only checkpoint, the files of `model.init`, or seed and model.

    Raises PlanError when the files are gone.
    """
    if checkpoint_path is not None:
        return _hash((checkpoint_path / checkpoint_folder.COMMIT).read_bytes())
    if plan.init == RANDOM:
        return _hash(RANDOM, plan.recipe.seed, _relevant_model(plan))
    files = sorted(Path(plan.init).glob("*.safetensors"))
    if not files:
        raise PlanError(
            f"model.init={plan.init} has no *.safetensors files, and the reference log-probabilities need these "
            "weights: put them back"
        )
    with ThreadPoolExecutor(4) as pool:
        return _hash(*pool.map(_file_hash, files))


def cached_path(settings: str, weights: str) -> Path:
    """Return the path in the user's cache."""
    return default_root() / "reference" / f"{_hash(settings, weights)}.safetensors"


def read_tables(path: Path, settings: str, weights: str | None) -> AnswerTables | None:
    """Return the tables in a file when settings and weights match, else None. `weights` None = any."""
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("settings") != settings or weights not in (None, about.get("weights")):
                return None
            return AnswerTables(train=file.get_tensor("train"), validation=file.get_tensor("validation"))
    except (OSError, SafetensorError):
        return None


def write_tables(path: Path, tables: AnswerTables, settings: str, weights: str) -> None:
    """Write the tables to a file, completely or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"train": tables.train, "validation": tables.validation}
    replace_file(path, save(arrays, {"settings": settings, "weights": weights}))


def _file_hash(path: Path) -> str:
    """Return the hash of a file's content. It is read again only when size or time have changed."""
    stat = path.stat()
    seen = _hash(os.fspath(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    index = default_root() / "index" / f"weights-{seen}.json"
    sha256 = read_json(index).get("sha256")
    if not isinstance(sha256, str):
        sha256 = checkpoint_folder.record_file(path).sha256
        index.parent.mkdir(parents=True, exist_ok=True)
        write_json(index, {"sha256": sha256})
    return sha256


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


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
        self._settings = settings_of(self.plan, self.corpus, self.device.type)
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
        run_file = self.run / TABLES_FILE
        earlier_weights = (
            str(checkpoint.read_values(self.checkpoint_path).get("first_weights", ""))
            if self._is_resumed and self.checkpoint_path
            else ""
        )
        if self._is_resumed and (tables := read_tables(run_file, self._settings, None)) is not None:
            return earlier_weights, f"log-probabilities that the run began with, {run_file}", tables
        weights = weights_of(self.plan, None if self._is_resumed else self.checkpoint_path)
        if self._is_resumed and earlier_weights and earlier_weights != weights:
            raise PlanError(
                f"{run_file} is missing, or was computed in another precision or on another kind of device. The "
                f"weights of model.init={self.plan.init} are not those of the start of the run. Put the file or "
                "the weights back"
            )
        for path in (run_file, cached_path(self._settings, weights)):
            if (tables := read_tables(path, self._settings, weights)) is not None:
                if path != run_file:
                    self._store(run_file, tables, weights)
                return weights, f"log-probabilities under the first weights, found in {path}", tables
        return weights, "", None

    def _write(self) -> None:
        assert self.tables is not None, "`measure` sets them"
        self._store(self.run / TABLES_FILE, self.tables, self.first_weights)
        with suppress(OSError):  # other runs compute it themselves
            write_tables(
                cached_path(self._settings, self.first_weights), self.tables, self._settings, self.first_weights
            )

    def _store(self, path: Path, tables: AnswerTables, weights: str) -> None:
        try:
            write_tables(path, tables, self._settings, weights)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; fix that, or choose another {argument('run')}") from error

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
            batches = announce_progress(batches, -(-len(rows) // (size * share.parts)))
        answers = most_answers(plan.recipe.sequence)
        return log_probabilities(engine, batches, stream.num_documents, answers, self.device).numpy()


def announce_progress(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
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
        for group in group_batches(batches, engine.mesh["pp"].size):
            recorders = [AnswerRecorder(answers) for _ in group]
            engine.evaluate(
                [MicroPass(batch, EVALUATION, recorder) for batch, recorder in zip(group, recorders, strict=True)]
            )
            for batch, recorder in zip(group, recorders, strict=True):
                if recorder.sums is not None and engine.mesh["cp"].index == 0:  # all ranks of cp have the same
                    _add_to_table(table, batch.more[NUMBERS], recorder.sums)
    return engine.mesh["losses"].all_reduce(table.to(device)).cpu()


def _add_to_table(table: Tensor, numbers: Tensor, sums: Tensor) -> None:
    is_answer = numbers >= 0
    table[numbers[is_answer].cpu()] = sums[is_answer].cpu()


class AnswerRecorder:
    """Stand-in for an objective that records the log-probabilities of a batch's answers (B, A) on the last stage."""

    figures: tuple[str, ...] = ()

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.sums: Tensor | None = None

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Record the sums and return zero."""
        self.sums = answer_sums(predictions, batch, self.answers).log_probability.detach()
        return torch.zeros((), device=self.sums.device)


def _table_reader(table: NDArray[np.float64]) -> AnswerReader:
    padded = np.append(table, 0.0)  # the last entry is that of number -1

    def read(numbers: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        return {REFERENCE: padded[numbers]}

    return read
