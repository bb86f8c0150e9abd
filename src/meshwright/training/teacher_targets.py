"""A teacher that is asked once: what it says of every row that a run reads, kept on disk and read as targets.

It is laid out as the student will be, and gone before the student is made. Ranks share the rows; each writes what it
has. Rows that are there already, from a run before or from one that was stopped or killed, are not asked again.

Letters: B rows, S positions that are here, K kept tokens.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data import Corpus
from meshwright.data.numbered_rows import numbered_rows
from meshwright.data.sample_rows import SampleRows
from meshwright.data.windows import Sampler
from meshwright.kernels.linear_divergence import KnownTop
from meshwright.model.predictions import Predictions
from meshwright.parallel import Mesh
from meshwright.parallel.agree import RankZero, gather_objects
from meshwright.spec import Plan
from meshwright.spec.recipe import DataRead
from meshwright.spec.units import GB, duration
from meshwright.store.durable import one_line
from meshwright.training.batches import Batch, OfRows, Share, to_batch
from meshwright.training.distillation import LIKELIEST, LOGS
from meshwright.training.evaluate import evaluating, runs
from meshwright.training.interrupt import Interrupt
from meshwright.training.precision import DTYPES
from meshwright.training.step import EVALUATION, MicroPass
from meshwright.training.teacher import build_teacher, fill, folder_of, shared_tokens
from meshwright.training.teacher_store import TableSizes, TeacherTables, cached

log = logging.getLogger(__name__)
TOLD_S = 15.0
"""Between two lines about how far the asking is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """What a run reads of its teacher."""

    of_rows: OfRows
    said: str
    """A sentence for the first lines of the run."""


def ask(
    plan: Plan, corpus: Corpus, read: DataRead, mesh: Mesh, device: torch.device, rank_zero: RankZero, stop: Interrupt
) -> TeacherTargets:  # fmt: skip
    """What the teacher of a plan says of all rows that its run still reads; asked where it is not on disk. All ranks
    together. A signal that any rank has ends the asking after a batch: the run then makes no step, since the signal
    stands, and what was asked stays. RunError where there is no room for it."""
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, Sampler | SampleRows), "spec.objective_rules refuses mixtures"
    assert plan.teacher is not None, "a distillation has one"
    kept = TeacherTables(folder=_place(plan, corpus, device), sizes=sizes_of(plan, len(rows)))
    left = plan.recipe.tokens_of_run(read) // plan.recipe.sequence - read.rows
    needed = np.unique(rows.windows(read.rows, min(left, len(rows)))) if len(rows) else np.zeros(0, np.int64)
    missing = rank_zero.broadcast(lambda: _prepared(kept, needed).tolist())
    began = time.perf_counter()
    asked = _fill(kept, np.array(missing), plan, rows, mesh, device, rank_zero, stop) if missing else 0
    each = f"{kept.sizes.top} log-probabilities per token, {kept.sizes.token_bytes} bytes, {kept.folder}"
    some = "" if asked == len(missing) else f"stopped after {asked:,} of {len(missing):,} rows, "
    took = f"{some}asked in {duration(time.perf_counter() - began)}" if missing else "found"
    return TeacherTargets(of_rows=reader(kept, rows), said=f"{took}: {each}")


def sizes_of(plan: Plan, rows: int) -> TableSizes:
    """Of what is kept of a plan's teacher over so many rows."""
    assert plan.teacher is not None, "a distillation has one"
    vocab = shared_tokens(plan) or plan.teacher.vocab
    top = min(plan.recipe.distillation_top_k, vocab)
    return TableSizes(rows=rows, sequence=plan.recipe.sequence, top=top, vocab=vocab)


def reader(kept: TeacherTables, rows: Sampler | SampleRows) -> OfRows:
    """Rows of the tables in the order of a run. RunError where they were changed."""
    ids, logs = kept.tables()

    def read(cursor: int, count: int) -> Mapping[str, NDArray[Any]]:
        numbers = rows.windows(cursor, count)
        likeliest, theirs = ids[numbers], np.ascontiguousarray(logs[numbers])
        kept.check(likeliest, theirs)
        return {LIKELIEST: likeliest.astype(np.int32), LOGS: theirs}

    return read


def _place(plan: Plan, corpus: Corpus, device: torch.device) -> Path:
    """By all that decides the numbers. Ranks verify a checkpoint together."""
    recipe, data = plan.recipe, plan.data
    weights = folder_of(Path(plan.teacher_init)).fingerprint()
    computed = recipe.precision, recipe.tf32, device.type
    rows = corpus.fingerprint, recipe.sequence, recipe.document_mask, data.form, data.packing, data.overlong
    kept = recipe.distillation_top_k, recipe.distillation_temperature, shared_tokens(plan)
    return cached(weights, plan.teacher, rows, kept, computed)


def _prepared(kept: TeacherTables, needed: NDArray[np.int64]) -> NDArray[np.int64]:
    """On the first rank: which of the rows must be asked; said before it is done."""
    with one_line(kept.folder, "cache folder (XDG_CACHE_HOME)"):
        kept.make()
        missing = kept.missing(needed)
        kept.check_room(len(missing))
    if len(missing):
        log.warning(
            "the teacher is asked about %s rows: %d bytes per token, %.3g GB in %s",
            f"{len(missing):,}", kept.sizes.token_bytes, len(missing) * kept.sizes.row_bytes / GB, kept.folder,
        )  # fmt: skip
    return missing


def _fill(
    kept: TeacherTables, missing: NDArray[np.int64], plan: Plan, rows: Sampler | SampleRows, mesh: Mesh,
    device: torch.device, rank_zero: RankZero, stop: Interrupt,
) -> int:  # fmt: skip
    """How many rows were asked: all, unless a rank was told to stop."""
    engine = build_teacher(plan, mesh, device)
    fill(engine, folder_of(Path(plan.teacher_init)).weights(DTYPES[plan.recipe.precision]))
    columns, parts = engine.columns(plan.recipe.sequence), plan.layout.dp
    share = Share(index=mesh.reader, parts=parts, columns=columns)
    size = plan.layout.micro_batch_of(plan.recipe.global_batch)
    ids, logs = kept.tables("r+")
    writes = mesh["tp"].index == 0
    pace, asked_rows = _Pace(len(missing)), 0
    with evaluating(engine):
        for some in runs(_batches(missing, rows, size, share, plan.recipe.document_mask, device), mesh["pp"].size):
            asked = [
                RecordedTop(kept.sizes.top, plan.recipe.distillation_temperature, shared_tokens(plan)) for _ in some
            ]
            given = zip((batch for batch, _ in some), [EVALUATION] * len(some), asked, strict=True)
            engine.evaluate([MicroPass(*one) for one in given])
            for (_, numbers), one in zip(some, asked, strict=True):
                if one.found is None or not writes:
                    continue
                here = slice(0, len(numbers))
                where = numbers if columns is None else np.ix_(numbers, np.array(columns))
                ids[where] = one.found.ids[here].cpu().numpy()
                logs[where] = one.found.log_probabilities[here].half().cpu().numpy()
            ids.flush()  # type: ignore[attr-defined]  # a mapped array
            logs.flush()  # type: ignore[attr-defined]  # the same
            mine = np.concatenate([numbers for _, numbers in some])
            done, stops = _together(mesh, mine, stop.requested is not None)
            rank_zero.run(partial(kept.mark, done))
            asked_rows += len(done)
            if rank_zero.is_here:
                pace.tell(asked_rows)
            if stops:
                break
    return asked_rows


def _together(mesh: Mesh, mine: NDArray[np.int64], stops: bool) -> tuple[NDArray[np.int64], bool]:
    """Rows that the ranks have written, and whether any was told to stop; the same on every rank."""
    world = mesh["world"]
    every = gather_objects((mine.tolist(), stops), world.process_group) if world.size > 1 else [(mine.tolist(), stops)]
    rows = [number for numbers, _ in every for number in numbers]
    return np.unique(np.array(rows, dtype=np.int64)), any(asked for _, asked in every)


class _Pace:
    """Says how far the asking is, every TOLD_S seconds."""

    def __init__(self, rows: int) -> None:
        self.rows, self.began = rows, time.monotonic()
        self.said = self.began

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said < TOLD_S or done == self.rows:
            return
        self.said, rate = now, done / (now - self.began)
        left = duration((self.rows - done) / rate)
        log.warning(
            "the teacher was asked about %s of %s rows, %.3g rows/s, %s left", f"{done:,}", f"{self.rows:,}", rate, left
        )


def _batches(
    missing: NDArray[np.int64], rows: Sampler | SampleRows, size: int, share: Share, document_mask: bool,
    device: torch.device,
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:  # fmt: skip
    """(this rank's part, its numbers), as many on every rank and of one size."""
    for start in range(0, len(missing), size * share.parts):
        numbers = missing[start : start + size * share.parts]
        own = slice(share.index * size, (share.index + 1) * size)
        found = rows.rows_of(numbers)
        yield to_batch(found.rows(own), device, document_mask=document_mask, share=share, rows=size), numbers[own]


class RecordedTop:
    """In place of an objective: the likeliest tokens of a batch are kept, on the last stage."""

    by_position = True
    figures = ()

    def __init__(self, top: int, temperature: float, shared: int) -> None:
        self.top, self.temperature, self.shared = top, temperature, shared
        self.found: KnownTop | None = None

    def count(self, batch: Batch) -> float:
        """Nothing is divided."""
        return 1.0

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Zero."""
        self.found = predictions.top(self.top, self.temperature, self.shared)
        return torch.zeros((), device=batch.tokens.device)
