"""A teacher that is run once: its distributions of every row of a run, stored on disk and read as targets.

It is laid out as the student will be, and is gone before the student is built. Ranks share the rows, and each writes
its own. Rows stored by an earlier, stopped or killed run are not computed again.

A folder of the user's cache, named by content, holds two tables and a list of the rows that exist. A row of a table
belongs to a row of the text, in the text's own order. A table is as long as the text but takes only the disk space of
written rows. So a run adds the rows that it needs, another one continues from there, and a killed process loses one
batch.

    ids     (rows, S, K) uint16, or uint32 for larger vocabularies
    logs    (rows, S, K + 1) fp16, that of all other tokens last

Letters: B rows, S positions of a row, or of this rank's part of it, K stored tokens.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.corpus.corpus import read_json, write_json
from meshwright.data.sequences.numbered_rows import MixedRows, numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import Sampler
from meshwright.kernels.loss.linear_divergence import KnownTop
from meshwright.model.transformer import Predictions
from meshwright.parallel import Mesh
from meshwright.parallel.groups.group import RankZero, gather_objects
from meshwright.spec import Plan
from meshwright.spec.errors import RunError
from meshwright.spec.recipe.recipe import DataRead
from meshwright.spec.units import GB, duration
from meshwright.spec.user_cache import default_root
from meshwright.store.durable import free_bytes, report_in_one_line
from meshwright.training.objectives.objectives import LIKELIEST, LOGS
from meshwright.training.objectives.teacher import build_teacher, load_weights, open_teacher, shared_tokens
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch, RowReader, Share, to_batch
from meshwright.training.step.evaluate import evaluating, group_batches
from meshwright.training.step.interrupt import Interrupt
from meshwright.training.step.step import EVALUATION, MicroPass

if TYPE_CHECKING:
    from meshwright.data.sequences.stored_rows import StoredRows

_FORMAT = 1
"""Raised whenever the same teacher and text would give other numbers."""
IDS_FILE, LOGS_FILE, DONE, ABOUT = "ids.bin", "logs.bin", "done.bin", "about.json"
NARROW = 2**16
"""Largest vocabulary whose ids take two bytes."""
ROUNDED = 0.02
"""Largest deviation from 1 of a sum of probabilities with fp16 logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """Sizes of the tables of one teacher over one text."""

    rows: int
    sequence: int
    top: int
    vocab: int

    @property
    def id_type(self) -> np.dtype[Any]:
        """Type of a token."""
        return np.dtype(np.uint16 if self.vocab <= NARROW else np.uint32)

    @property
    def token_bytes(self) -> int:
        """Bytes per position."""
        return self.top * self.id_type.itemsize + (self.top + 1) * 2

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.sequence * self.token_bytes


def cached_path(*content: object) -> Path:
    """Return the folder in the user's cache for this content."""
    digest = hashlib.blake2b(repr((_FORMAT, *content)).encode(), digest_size=16).hexdigest()
    return default_root() / "teachers" / digest


@dataclass(frozen=True, slots=True)
class TeacherTables:
    """The tables of a folder. Rows that do not exist yet hold arbitrary numbers."""

    folder: Path
    sizes: TableSizes

    def create(self) -> None:
        """Create the files at full size, unwritten, unless they exist.

        Raises RunError when their description or sizes differ, since somebody changed them.
        """
        sizes = self.sizes
        self.folder.mkdir(parents=True, exist_ok=True)
        description = {"rows": sizes.rows, "sequence": sizes.sequence, "top": sizes.top, "vocab": sizes.vocab}
        if (self.folder / ABOUT).is_file():
            if read_json(self.folder / ABOUT) != description or any(
                (self.folder / name).stat().st_size != size for name, size in self._files().items()
            ):
                raise self._changed_error("")
            return
        for name, size in self._files().items():
            with (self.folder / name).open("wb") as file:
                # Sparse: rows that are never computed take no room on disk.
                file.truncate(size)
        write_json(self.folder / ABOUT, description)

    def check(self, ids: NDArray[Any], logs: NDArray[np.float16]) -> None:
        """Raise RunError when rows (B, S, K) and (B, S, K + 1) are no distributions, so somebody changed them."""
        if ids.size and int(ids.max()) >= self.sizes.vocab:
            raise self._changed_error(f": it names token {int(ids.max())} of {self.sizes.vocab}")
        # Each position holds K likeliest and the rest as one, which together are 1.
        off = np.abs(np.exp(logs, dtype=np.float32).sum(-1) - 1)
        if not bool((off <= ROUNDED).all()):
            raise self._changed_error(": probabilities do not sum to 1")

    def _changed_error(self, how: str) -> RunError:
        return RunError(f"{self.folder} was changed{how}: remove it, and what a teacher says is asked anew")

    def _files(self) -> dict[str, int]:
        sizes = self.sizes
        positions = sizes.rows * sizes.sequence
        return {
            IDS_FILE: positions * sizes.top * sizes.id_type.itemsize,
            LOGS_FILE: positions * (sizes.top + 1) * 2,
            DONE: sizes.rows,
        }  # fmt: skip

    def missing(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows among these that do not exist yet."""
        done = np.fromfile(self.folder / DONE, dtype=np.uint8)
        absent: NDArray[np.int64] = numbers[done[numbers] == 0]
        return absent

    def mark(self, numbers: NDArray[np.int64]) -> None:
        """Mark these rows as existing, safe against a power cut."""
        # Numbers reach the disk before their marks: after a power cut no mark is without numbers.
        for name in (IDS_FILE, LOGS_FILE):
            with (self.folder / name).open("r+b") as file:
                os.fsync(file.fileno())
        done = np.memmap(self.folder / DONE, dtype=np.uint8, mode="r+")
        done[numbers] = 1
        done.flush()

    def tables(self, mode: str = "r") -> tuple[NDArray[Any], NDArray[np.float16]]:
        """Return (ids, logs), memory-mapped."""
        sizes = self.sizes
        shape = (sizes.rows, sizes.sequence)
        ids = np.memmap(self.folder / IDS_FILE, dtype=sizes.id_type, mode=mode, shape=(*shape, sizes.top))  # type: ignore[call-overload]  # its mode is a literal
        logs = np.memmap(self.folder / LOGS_FILE, dtype=np.float16, mode=mode, shape=(*shape, sizes.top + 1))  # type: ignore[call-overload]  # the same
        return ids, logs

    def check_room(self, rows: int) -> None:
        """Raise RunError when the disk has no space for that many more rows."""
        needed, free = rows * self.sizes.row_bytes, free_bytes(self.folder)
        if free is not None and needed > free:
            raise RunError(
                f"the disk is too small for the teacher's targets: they take {needed / GB:.1f} GB "
                f"({self.sizes.token_bytes} bytes per token) in {self.folder}, and {free / GB:.1f} GB are free. "
                "Lower recipe.distillation_top_k or recipe.steps, or move the cache (XDG_CACHE_HOME)"
            )


log = logging.getLogger(__name__)
NumberedOnce: TypeAlias = "Sampler | SampleRows | StoredRows"
"""Rows of one text or token store, whose numbers are the same in every epoch. A mixture's are not."""
REPORT_S = 15.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """Stored targets of a run."""

    read_rows: RowReader
    sentence: str
    """A sentence for the first lines of the run."""


def store_targets(
    plan: Plan, corpus: Corpus, read: DataRead, mesh: Mesh, device: torch.device, rank_zero: RankZero, stop: Interrupt
) -> TeacherTargets:  # fmt: skip
    """Return the teacher's targets of all rows that the run still reads, and compute missing ones. All ranks together.

    A signal to any rank ends the computation after a batch. The signal stays set, so the run makes no step, and
    computed rows are kept. Raises RunError when the disk has no room.
    """
    read_rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    assert not isinstance(read_rows, MixedRows), "the rules of objectives refuse mixtures"
    rows = cast(NumberedOnce, read_rows)
    assert plan.teacher is not None, "a distillation has one"
    tables = TeacherTables(folder=_cache_folder(plan, corpus, device), sizes=sizes_of(plan, len(rows)))
    unread = plan.recipe.tokens_of_run(read) // plan.recipe.sequence - read.rows
    # Several epochs read the same rows, which are computed once.
    needed = np.unique(rows.windows(read.rows, min(unread, len(rows)))) if len(rows) else np.zeros(0, np.int64)
    # One rank looks, since others may still see the folder as it was.
    missing = rank_zero.broadcast(lambda: _find_missing(tables, needed).tolist())
    started = time.perf_counter()
    computed = _fill(tables, np.array(missing), plan, rows, mesh, device, rank_zero, stop) if missing else 0
    size_words = f"{tables.sizes.top} log-probabilities per token, {tables.sizes.token_bytes} bytes, {tables.folder}"
    stopped = "" if computed == len(missing) else f"stopped after {computed:,} of {len(missing):,} rows, "
    took = f"{stopped}asked in {duration(time.perf_counter() - started)}" if missing else "found"
    return TeacherTargets(read_rows=read_in_order(tables, rows), sentence=f"{took}: {size_words}")


def sizes_of(plan: Plan, rows: int) -> TableSizes:
    """Return the sizes of the tables of a plan's teacher over that many rows."""
    assert plan.teacher is not None, "a distillation has one"
    vocab = shared_tokens(plan) or plan.teacher.vocab
    top = min(plan.recipe.distillation_top_k, vocab)
    return TableSizes(rows=rows, sequence=plan.recipe.sequence, top=top, vocab=vocab)


def read_in_order(tables: TeacherTables, rows: NumberedOnce) -> RowReader:
    """Return a reader of the tables in the order of a run. It raises RunError when they were changed."""
    ids, logs = tables.tables()

    def read(cursor: int, count: int) -> Mapping[str, NDArray[Any]]:
        numbers = rows.windows(cursor, count)
        likeliest, theirs = ids[numbers], np.ascontiguousarray(logs[numbers])
        tables.check(likeliest, theirs)
        return {LIKELIEST: likeliest.astype(np.int32), LOGS: theirs}

    return read


def _cache_folder(plan: Plan, corpus: Corpus, device: torch.device) -> Path:
    """Return the folder for everything that decides the numbers. Ranks verify a checkpoint together."""
    recipe, data = plan.recipe, plan.data
    # The precision and the kind of device are part of the name: they round differently.
    weights = open_teacher(Path(plan.teacher_init)).fingerprint()
    computed = recipe.precision, recipe.tf32, device.type
    rows = corpus.fingerprint, recipe.sequence, recipe.document_mask, data.form, data.packing, data.overlong
    stored = recipe.distillation_top_k, recipe.distillation_temperature, shared_tokens(plan)
    return cached_path(weights, plan.teacher, rows, stored, computed)


def _find_missing(tables: TeacherTables, needed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows to compute, on rank 0, and announce them."""
    with report_in_one_line(tables.folder, "cache folder (XDG_CACHE_HOME)"):
        tables.create()
        missing = tables.missing(needed)
        tables.check_room(len(missing))
    if len(missing):
        log.warning(
            "the teacher is asked about %s rows: %d bytes per token, %.3g GB in %s",
            f"{len(missing):,}", tables.sizes.token_bytes, len(missing) * tables.sizes.row_bytes / GB, tables.folder,
        )  # fmt: skip
    return missing


def _fill(
    tables: TeacherTables, missing: NDArray[np.int64], plan: Plan, rows: NumberedOnce, mesh: Mesh,
    device: torch.device, rank_zero: RankZero, stop: Interrupt,
) -> int:  # fmt: skip
    """Compute missing rows and return their number: all, unless a rank was told to stop."""
    engine = build_teacher(plan, mesh, device)
    load_weights(engine, open_teacher(Path(plan.teacher_init)).weights(DTYPES[plan.recipe.precision]))
    columns, parts = engine.columns(plan.recipe.sequence), plan.layout.dp
    share = Share(index=mesh.reader, parts=parts, columns=columns)
    size = plan.layout.micro_batch_of(plan.recipe.global_batch)
    ids, logs = tables.tables("r+")
    # All tp ranks get the same numbers.
    writes = mesh["tp"].index == 0
    reporter, asked_rows = _ProgressReporter(len(missing)), 0
    with evaluating(engine):
        for group in group_batches(
            _numbered_batches(missing, rows, size, share, plan.recipe.document_mask, device), mesh["pp"].size
        ):
            recorders = [
                TopRecorder(tables.sizes.top, plan.recipe.distillation_temperature, shared_tokens(plan)) for _ in group
            ]
            engine.evaluate([
                MicroPass(batch, EVALUATION, recorder) for (batch, _), recorder in zip(group, recorders, strict=True)
            ])  # fmt: skip
            for (_, numbers), recorder in zip(group, recorders, strict=True):
                if recorder.top_tokens is None or not writes:
                    continue
                cells = numbers if columns is None else np.ix_(numbers, np.array(columns))
                # Rows beyond `numbers` only fill up the batch.
                ids[cells] = recorder.top_tokens.ids[: len(numbers)].cpu().numpy()
                logs[cells] = recorder.top_tokens.log_probabilities[: len(numbers)].half().cpu().numpy()
            ids.flush()  # type: ignore[attr-defined]  # a mapped array
            logs.flush()  # type: ignore[attr-defined]  # the same
            written = np.concatenate([numbers for _, numbers in group])
            # A row counts once all ranks with a part of its positions have written theirs.
            done, stops = _gather_progress(mesh, written, stop.requested is not None)
            rank_zero.run(partial(tables.mark, done))
            asked_rows += len(done)
            if rank_zero.is_here:
                reporter.report(asked_rows)
            if stops:
                break
    return asked_rows


def _gather_progress(mesh: Mesh, written: NDArray[np.int64], stops: bool) -> tuple[NDArray[np.int64], bool]:
    """Return the rows that the ranks have written, and whether any was told to stop; the same on every rank."""
    world = mesh["world"]
    report = (written.tolist(), stops)
    reports = gather_objects(report, world.process_group) if world.size > 1 else [report]
    rows = [number for numbers, _ in reports for number in numbers]
    return np.unique(np.array(rows, dtype=np.int64)), any(stops for _, stops in reports)


class _ProgressReporter:
    """Logs how many rows the teacher has processed, at most once every REPORT_S seconds."""

    def __init__(self, rows: int) -> None:
        self.rows, self.began = rows, time.monotonic()
        self.reported = self.began

    def report(self, done: int) -> None:
        now = time.monotonic()
        if now - self.reported < REPORT_S or done == self.rows:
            return
        self.reported, rate = now, done / (now - self.began)
        remaining = duration((self.rows - done) / rate)
        log.warning(
            "the teacher was asked about %s of %s rows, %.3g rows/s, %s left",
            f"{done:,}", f"{self.rows:,}", rate, remaining,
        )  # fmt: skip


def _numbered_batches(
    missing: NDArray[np.int64], rows: NumberedOnce, size: int, share: Share, document_mask: bool,
    device: torch.device,
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:  # fmt: skip
    """Yield this rank's part of the rows with their numbers: equally many batches of one size on every rank."""
    for start in range(0, len(missing), size * share.parts):
        numbers = missing[start : start + size * share.parts]
        local = slice(share.index * size, (share.index + 1) * size)
        sequences = rows.rows_of(numbers).rows(local)
        yield to_batch(sequences, device, document_mask=document_mask, share=share, rows=size), numbers[local]


class TopRecorder:
    """Stand-in for an objective that records the likeliest tokens of a batch on the last stage."""

    figures: tuple[str, ...] = ()

    def __init__(self, top: int, temperature: float, shared: int) -> None:
        self.top, self.temperature, self.shared = top, temperature, shared
        self.top_tokens: KnownTop | None = None

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Record the tokens and return zero."""
        self.top_tokens = predictions.top(self.top, self.temperature, self.shared)
        return torch.zeros((), device=batch.tokens.device)
