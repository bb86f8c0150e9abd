"""From numbered windows of tokens to micro-batches on a device, one step ahead of the training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.kernels.attention import DocumentSpans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.data import Sequences
    from meshwright.data.numbered_rows import NumberedRows


PADDING: Final = "padding"
"""Name of a tensor (B, S): which positions fill a row up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: tokens, targets (B, S) int64 with -100 = ignored; documents and positions (B, S) int32, only
    when a row holds a document border."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    valid: int = 0
    """Targets that count, known on the host."""
    valid_of_rows: tuple[int, ...] = ()
    """The same for each row, so that splitting needs no look at the device."""
    documents_of_rows: tuple[tuple[int, int], ...] = ()
    """How many documents each row holds and how long the longest is, known on the host; empty = unknown."""
    begins_of_rows: tuple[tuple[int, ...], ...] = ()
    """Where this rank holds a part of the positions: those of each whole row at which its documents begin."""
    masked: bool = False
    """Whether a document mask applies: a batch of the same run may have documents where this one has none."""
    cut: bool = False
    """Whether this rank holds a part of the positions: they are there without documents, too."""
    answers_of_rows: tuple[int, ...] = ()
    """How many answers of pairs each row holds: its first documents, the better one of a pair first. Known on the
    host."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """What is read beside, by name: (B,), (B, S), or of answers (B, A). Most is for an objective; PADDING is for the
    balance loss of experts."""

    @property
    def spans(self) -> DocumentSpans:
        """What the host knows of the documents of all rows."""
        found = self.documents_of_rows
        longest = max((longest for _, longest in found), default=0)
        return DocumentSpans(sum(number for number, _ in found), longest, self.begins_of_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of a step's sequences a rank reads: run `index` of `parts` equal ones, and of each the `columns`
    (positions in the sequence; None = all)."""

    index: int = 0
    parts: int = 1
    columns: tuple[int, ...] | None = None


WHOLE = Share()


OfAnswers = Callable[["NDArray[np.int64]"], "Mapping[str, NDArray[Any]]"]
"""Numbers of answers (B, A), -1 = none -> what an objective reads of each, by name (B, A)."""


OfRows = Callable[[int, int], "Mapping[str, NDArray[Any]]"]
"""(cursor, count) of samples of a run -> what an objective reads of each position, by name (B, S, ...)."""


def to_batch(
    sequences: "Sequences",
    device: torch.device,
    *,
    document_mask: bool,
    share: Share = WHOLE,
    rows: int = 0,
    of_answers: OfAnswers | None = None,
    by_role: bool = False,
    padding: bool = False,
) -> Batch:
    """Torch tensors of the windows; without a document mask rows are plain text. Fewer than `rows` windows are filled
    up with rows that have no target, so that every rank makes the same passes over the same shapes. `by_role`: with
    who says each target, as `more["roles"]`; `padding`: with what fills rows of samples up, as `more[PADDING]`."""
    packed = document_mask and sequences.packed
    positions = sequences.positions if packed else None
    targets = sequences.targets
    if positions is None and share.columns is not None:
        positions = np.broadcast_to(np.arange(targets.shape[1], dtype=np.int32), targets.shape)

    def put(array: "NDArray[Any]", filling: int) -> Tensor:
        if share.columns is not None:
            array = array[:, list(share.columns)]
        if len(array) < rows:
            array = np.concatenate((array, np.full((rows - len(array), array.shape[1]), filling, array.dtype)))
        return _sent(array, device)

    kept = targets if share.columns is None else targets[:, list(share.columns)]
    beside = {"roles": put(sequences.roles, 0)} if by_role and sequences.roles is not None else {}
    if padding and sequences.roles is not None:
        beside[PADDING] = put(_padding_of(sequences), True)
    valid_of_rows = [*(kept >= 0).sum(axis=1).tolist(), *[0] * (rows - len(kept))]
    begins = _begins_of(sequences) if packed else []
    filling = [[0]] * (rows - len(kept))
    return Batch(
        tokens=put(sequences.tokens, 0),
        targets=put(targets, -100),
        documents=put(sequences.documents, 0) if packed else None,
        positions=None if positions is None else put(positions, 0),
        valid=sum(valid_of_rows),
        valid_of_rows=tuple(valid_of_rows),
        documents_of_rows=_sizes_of([*begins, *filling], targets.shape[1]) if packed else (),
        begins_of_rows=tuple(map(tuple, [*begins, *filling])) if packed and share.columns is not None else (),
        masked=document_mask,
        cut=share.columns is not None,
        **_of_answers(sequences, device, rows, of_answers, beside),
    )


def _sent(array: "NDArray[Any]", device: torch.device) -> Tensor:
    """The array on a device, with no host waiting for it. A copy to a GPU starts in page-locked memory, which torch
    keeps until the copy has ended: ordinary memory may be read after the call, and this array is gone then."""
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _of_answers(
    sequences: "Sequences", device: torch.device, rows: int, wanted: OfAnswers | None, beside: Mapping[str, Tensor]
) -> dict[str, Any]:  # fmt: skip
    """The fields of a batch that its answers have; and what there is `beside`."""
    if sequences.answers is None:
        return {"more": beside}
    filled = np.full((max(0, rows - len(sequences.answers)), sequences.answers.shape[1]), -1)
    answers = np.concatenate((sequences.answers, filled))
    more = wanted(answers) if wanted is not None else {}
    return {
        "answers_of_rows": tuple((answers >= 0).sum(axis=1).tolist()),
        "more": {
            **{name: _sent(array, device) for name, array in more.items()}, **beside
        },
    }  # fmt: skip


def _padding_of(sequences: "Sequences") -> "NDArray[np.bool_]":
    """[B, S]: documents without a target. A sample has one, or would not be in a row."""
    numbers = sequences.documents.astype(np.int64) + np.arange(len(sequences.documents))[:, None] * 2**32
    return ~np.isin(numbers, numbers[sequences.targets >= 0])


def _begins_of(sequences: "Sequences") -> list[list[int]]:
    """Of each row: where its documents begin."""
    changes = np.diff(sequences.documents, axis=1) != 0
    return [[0, *(np.flatnonzero(row) + 1).tolist()] for row in changes]


def _sizes_of(begins: Sequence[Sequence[int]], length: int) -> tuple[tuple[int, int], ...]:
    """Of each row: how many documents, and how long the longest is."""
    return tuple((len(row), int(np.diff(row, append=length).max())) for row in begins)


def select(batch: Batch, share: Share = WHOLE) -> Batch:
    """A rank's part of a batch that is there already, with its targets counted."""
    rows = len(batch.tokens) // share.parts
    here = slice(share.index * rows, (share.index + 1) * rows)
    columns = slice(None) if share.columns is None else list(share.columns)
    positions = batch.positions
    if positions is None and share.columns is not None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand(batch.tokens.shape)
    targets = batch.targets[here][:, columns]
    valid_of_rows = tuple((targets >= 0).sum(1).tolist())
    return Batch(
        tokens=batch.tokens[here][:, columns],
        targets=targets,
        documents=None if batch.documents is None else batch.documents[here][:, columns],
        positions=None if positions is None else positions[here][:, columns],
        valid=sum(valid_of_rows),
        valid_of_rows=valid_of_rows,
        documents_of_rows=batch.documents_of_rows[here],
        begins_of_rows=batch.begins_of_rows[here],
        masked=batch.masked,
        cut=share.columns is not None,
        more={name: t[here][:, columns] if t.dim() > 1 else t[here] for name, t in batch.more.items()},
    )


def split(batch: Batch, size: int) -> list[Batch]:
    """The batch in micro-batches of `size` sequences. Documents stay with all parts or none: equal rows, equal path."""
    parts = []
    counts = batch.valid_of_rows or tuple((batch.targets >= 0).sum(1).tolist())
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        part = each_tensor(batch, itemgetter(rows))
        part = replace(part, valid=sum(counts[rows]), valid_of_rows=counts[rows])
        documents, begins = batch.documents_of_rows[rows], batch.begins_of_rows[rows]
        part = replace(part, documents_of_rows=documents, begins_of_rows=begins)
        parts.append(replace(part, answers_of_rows=batch.answers_of_rows[rows]))
    return parts


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors on a device."""
    return each_tensor(batch, lambda tensor: tensor.to(device))


def forms(batch: Batch) -> dict[bool, Batch]:
    """The forms in which a batch of this size may come, by whether documents are given; each runs code of its own.
    The order is the same for every batch."""
    if not batch.masked:
        return {batch.documents is not None: batch}
    order = torch.arange(batch.tokens.shape[1], dtype=torch.int32, device=batch.tokens.device).expand_as(batch.tokens)
    positions = order if batch.positions is None else batch.positions
    documents = torch.zeros_like(batch.tokens, dtype=torch.int32) if batch.documents is None else batch.documents
    known = batch.documents_of_rows or ((1, batch.tokens.shape[1]),) * len(batch.tokens)
    begins = batch.begins_of_rows or (((0,),) * len(batch.tokens) if batch.cut and batch.documents is None else ())
    return {
        False: replace(
            batch, documents=None, positions=positions if batch.cut else None, documents_of_rows=(), begins_of_rows=()
        ),
        True: replace(batch, documents=documents, positions=positions, documents_of_rows=known, begins_of_rows=begins),
    }


def each_tensor(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with each of its tensors changed."""
    put = {name: getattr(batch, name) for name in ("tokens", "targets", "documents", "positions")}
    more = {name: change(tensor) for name, tensor in batch.more.items()}
    changed: dict[str, Any] = {name: None if t is None else change(t) for name, t in put.items()}
    return replace(batch, more=more, **changed)


def columns_of(arrays: "Mapping[str, NDArray[Any]]", share: Share, device: torch.device) -> dict[str, Tensor]:
    """Arrays (B, S, ...) of whole rows as tensors of the positions that are here."""
    here = slice(None) if share.columns is None else list(share.columns)
    return {name: _sent(array[:, here], device) for name, array in arrays.items()}


class BatchSource(Protocol):
    """Where batches come from. The samples of a run are numbered; a number gives the same sample on every rank, in
    every layout and after a restart, and costs the same wherever it lies."""

    def take(self, cursor: int, count: int, device: torch.device, share: Share) -> Batch:
        """Samples cursor .. cursor + count - 1; of each the columns of `share`. Called from a thread, one at a time."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a corpus, each one sample of the run."""

    sampler: "NumberedRows"
    document_mask: bool
    of_answers: OfAnswers | None = None
    of_rows: OfRows | None = None
    padding: bool = False

    def take(self, cursor: int, count: int, device: torch.device, share: Share) -> Batch:
        """As Source."""
        rows = self.sampler.take(cursor, count)
        found = to_batch(
            rows, device, document_mask=self.document_mask, share=share, of_answers=self.of_answers,
            padding=self.padding,
        )  # fmt: skip
        if self.of_rows is None:
            return found
        return replace(found, more={**found.more, **columns_of(self.of_rows(cursor, count), share, device)})


class Feed:
    """Reads the batch after the current one in a thread, so that a step does not wait for its source."""

    def __init__(self, source: BatchSource, device: torch.device, *, share: Share = WHOLE) -> None:
        self.source, self.device, self.share = source, device, share
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[tuple[int, int], Future[Batch]] | None = None

    def _read(self, cursor: int, count: int) -> Batch:
        """This rank's part of samples cursor .. cursor + count - 1."""
        own = count // self.share.parts
        return self.source.take(cursor + own * self.share.index, own, self.device, self.share)

    def take(self, cursor: int, count: int, following: int = 0) -> Batch:
        """This rank's part of samples cursor .. cursor + count - 1; then begins to read the next `following` ones."""
        if self._next is not None and self._next[0] == (cursor, count):
            batch = self._next[1].result()
        else:
            batch = self._read(cursor, count)
        self._next = None
        if following:
            key = (cursor + count, following)
            self._next = (key, self._pool.submit(self._read, *key))
        return batch

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def held_out(
    sampler: "NumberedRows",
    device: torch.device,
    *,
    rows: int,
    limit: int,
    document_mask: bool,
    share: Share = WHOLE,
    of_answers: OfAnswers | None = None,
    by_role: bool = False,
) -> Iterator[Batch]:
    """Held-out windows, `rows` at a time on each rank: all in order, or `limit` > 0 of them spread evenly; none twice.

    Every rank is given equally many batches of one size; the last ones are filled up with rows that do not count.
    """
    for number, sequences in enumerate(sampler.windows_in_order(rows * share.parts, limit=limit)):
        if number == 0:
            rows = -(-len(sequences.tokens) // share.parts)
        own = sequences.rows(slice(share.index * rows, (share.index + 1) * rows))
        yield to_batch(
            own, device, document_mask=document_mask, share=share, rows=rows, of_answers=of_answers, by_role=by_role
        )


def valid_tokens(micro_batches: Sequence[Batch]) -> int:
    """Targets that count in all micro-batches together."""
    return sum(batch.valid for batch in micro_batches)
