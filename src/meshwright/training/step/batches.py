"""Micro-batches on a device, made of numbered windows of tokens one step ahead of the training."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.kernels.attention.attend import DocumentSpans
from meshwright.kernels.norm.dropout import token_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.data import Sequences
    from meshwright.data.sequences.numbered_rows import NumberedRows


PADDING: Final = "padding"
"""Name of a bool tensor (B, S) that marks the positions which fill up a row."""
TOKEN_KEYS: Final = "token_keys"
"""Name of an int32 tensor (B, S) of keys for dropout, equal in every layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: tokens and targets (B, S) int64, targets -100 = ignored.

    Documents and positions (B, S) int32 exist only when a row holds a document border.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    valid: int = 0
    """Number of targets that count, known on the host."""
    valid_of_rows: tuple[int, ...] = ()
    """The same per row, so that splitting does not wait for the device."""
    documents_of_rows: tuple[tuple[int, int], ...] = ()
    """(documents, tokens of the longest) per row, known on the host. Empty = unknown."""
    begins_of_rows: tuple[tuple[int, ...], ...] = ()
    """Start positions of the documents of each whole row, when this rank holds a part of the positions."""
    masked: bool = False
    """True when a document mask applies. Another batch of the run may then have documents where this one has none."""
    cut: bool = False
    """True when this rank holds a part of the positions. Positions are then set even without documents."""
    answers_of_rows: tuple[int, ...] = ()
    """Number of answers of pairs per row: its first documents, the better one of a pair first. Known on the host."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors by name: (B,), (B, S), or per answer (B, A).

    Most are for an objective; PADDING is for the balance loss of experts.
    """

    @property
    def spans(self) -> DocumentSpans:
        """Counts and lengths of the documents of all rows, as far as the host knows them."""
        longest = max((longest for _, longest in self.documents_of_rows), default=0)
        return DocumentSpans(sum(number for number, _ in self.documents_of_rows), longest, self.begins_of_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a step's sequences that a rank reads: the `index`-th of `parts` equal runs.

    `columns` are the positions that it reads of each sequence. None = all.
    """

    index: int = 0
    parts: int = 1
    columns: tuple[int, ...] | None = None


WHOLE = Share()


AnswerReader = Callable[["NDArray[np.int64]"], "Mapping[str, NDArray[Any]]"]
"""Numbers of answers (B, A), -1 = none -> the arrays (B, A) that an objective reads of them, by name."""


RowReader = Callable[[int, int], "Mapping[str, NDArray[Any]]"]
"""(cursor, count) of samples of a run -> the arrays (B, S, ...) that an objective reads of each position, by name."""


def to_batch(
    sequences: "Sequences",
    device: torch.device,
    *,
    document_mask: bool,
    share: Share = WHOLE,
    rows: int = 0,
    read_answers: AnswerReader | None = None,
    by_role: bool = False,
    padding: bool = False,
) -> Batch:
    """Return the windows as tensors. Without a document mask rows are plain text.

    Args:
        rows: Fewer windows are filled up with rows without targets, so that all ranks make the same passes over equal
            shapes.
        read_answers: Further arrays of the answers, for the objective.
        by_role: Add the role that says each target, as `more["roles"]`.
        padding: Add the positions that fill up rows of samples, as `more[PADDING]`.
    """
    packed = document_mask and sequences.packed
    positions = sequences.positions if packed else None
    targets = sequences.targets
    # A part of a row no longer says where it begins, and rotations need the position in the whole.
    if positions is None and share.columns is not None:
        positions = np.broadcast_to(np.arange(targets.shape[1], dtype=np.int32), targets.shape)

    def put(array: "NDArray[Any]", filler: int) -> Tensor:
        if share.columns is not None:
            array = array[:, list(share.columns)]
        # Ranks without a row still take part in the collectives of a pass.
        if len(array) < rows:
            array = np.concatenate((array, np.full((rows - len(array), array.shape[1]), filler, array.dtype)))
        return _to_device(array, device)

    local_targets = targets if share.columns is None else targets[:, list(share.columns)]
    extra = {"roles": put(sequences.roles, 0)} if by_role and sequences.roles is not None else {}
    if padding and sequences.roles is not None:
        extra[PADDING] = put(_padding_mask(sequences), True)
    valid_of_rows = [*(local_targets >= 0).sum(axis=1).tolist(), *[0] * (rows - len(local_targets))]
    changes = np.diff(sequences.documents, axis=1) != 0
    starts = [[0, *(np.flatnonzero(row) + 1).tolist()] for row in changes] if packed else []
    filler = [[0]] * (rows - len(local_targets))
    return Batch(
        tokens=put(sequences.tokens, 0),
        targets=put(targets, -100),
        documents=put(sequences.documents, 0) if packed else None,
        positions=None if positions is None else put(positions, 0),
        valid=sum(valid_of_rows),
        valid_of_rows=tuple(valid_of_rows),
        documents_of_rows=_document_sizes([*starts, *filler], targets.shape[1]) if packed else (),
        begins_of_rows=tuple(map(tuple, [*starts, *filler])) if packed and share.columns is not None else (),
        masked=document_mask,
        cut=share.columns is not None,
        **_answer_fields(sequences, device, rows, read_answers, extra),
    )


def _to_device(array: "NDArray[Any]", device: torch.device) -> Tensor:
    """Return the array on a device without a wait of the host."""
    # torch keeps page-locked memory until the copy has ended. Ordinary memory may be read after this call returns, when
    # the array is gone.
    return _without_wait(torch.as_tensor(np.ascontiguousarray(array)), device)


def _without_wait(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _answer_fields(
    sequences: "Sequences",
    device: torch.device,
    rows: int,
    read_answers: AnswerReader | None,
    extra: Mapping[str, Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a batch that describe its answers, with the `extra` tensors."""
    if sequences.answers is None:
        return {"more": extra}
    filler = np.full((max(0, rows - len(sequences.answers)), sequences.answers.shape[1]), -1)
    answers = np.concatenate((sequences.answers, filler))
    more = read_answers(answers) if read_answers is not None else {}
    return {
        "answers_of_rows": tuple((answers >= 0).sum(axis=1).tolist()),
        "more": {**{name: _to_device(array, device) for name, array in more.items()}, **extra},
    }


def _padding_mask(sequences: "Sequences") -> "NDArray[np.bool_]":
    """Return [B, S] true in documents without a target."""
    # A sample has a target, or it would not be in a row.
    # Documents are numbered within a row. The row's number makes them unique in the batch.
    numbers = sequences.documents.astype(np.int64) + np.arange(len(sequences.documents))[:, None] * 2**32
    return ~np.isin(numbers, numbers[sequences.targets >= 0])


def _document_sizes(begins: Sequence[Sequence[int]], length: int) -> tuple[tuple[int, int], ...]:
    """Return (documents, tokens of the longest) of each row."""
    return tuple((len(row), int(np.diff(row, append=length).max())) for row in begins)


def select(batch: Batch, share: Share = WHOLE) -> Batch:
    """Return a rank's part of a batch in memory, with its targets counted."""
    rows = len(batch.tokens) // share.parts
    local = slice(share.index * rows, (share.index + 1) * rows)
    columns = slice(None) if share.columns is None else list(share.columns)
    positions = batch.positions
    if positions is None and share.columns is not None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand(batch.tokens.shape)
    targets = batch.targets[local][:, columns]
    valid_of_rows = tuple((targets >= 0).sum(1).tolist())
    return Batch(
        tokens=batch.tokens[local][:, columns],
        targets=targets,
        documents=None if batch.documents is None else batch.documents[local][:, columns],
        positions=None if positions is None else positions[local][:, columns],
        valid=sum(valid_of_rows),
        valid_of_rows=valid_of_rows,
        documents_of_rows=batch.documents_of_rows[local],
        begins_of_rows=batch.begins_of_rows[local],
        masked=batch.masked,
        cut=share.columns is not None,
        more={name: t[local][:, columns] if t.dim() > 1 else t[local] for name, t in batch.more.items()},
    )


def split(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into micro-batches of `size` sequences.

    All parts have documents or none has, so all take one code path.
    """
    # Counting on the device would make the host wait for all work before it.
    counts = batch.valid_of_rows or tuple((batch.targets >= 0).sum(1).tolist())
    return [
        replace(
            map_tensors(batch, itemgetter(rows)),
            valid=sum(counts[rows]),
            valid_of_rows=counts[rows],
            documents_of_rows=batch.documents_of_rows[rows],
            begins_of_rows=batch.begins_of_rows[rows],
            answers_of_rows=batch.answers_of_rows[rows],
        )
        for rows in (slice(start, start + size) for start in range(0, len(batch.tokens), size))
    ]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def forms(batch: Batch) -> dict[bool, Batch]:
    """Return the forms that a batch of this size may take, by whether it has documents. Each form runs different code.

    The order is the same for every batch.
    """
    if not batch.masked:
        return {batch.documents is not None: batch}
    order = torch.arange(batch.tokens.shape[1], dtype=torch.int32, device=batch.tokens.device).expand_as(batch.tokens)
    positions = order if batch.positions is None else batch.positions
    documents = torch.zeros_like(batch.tokens, dtype=torch.int32) if batch.documents is None else batch.documents
    sizes = batch.documents_of_rows or ((1, batch.tokens.shape[1]),) * len(batch.tokens)
    begins = batch.begins_of_rows or (((0,),) * len(batch.tokens) if batch.cut and batch.documents is None else ())
    return {
        False: replace(
            batch, documents=None, positions=positions if batch.cut else None, documents_of_rows=(), begins_of_rows=()
        ),
        True: replace(batch, documents=documents, positions=positions, documents_of_rows=sizes, begins_of_rows=begins),
    }


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `change` applied to each of its tensors."""
    fields = {name: getattr(batch, name) for name in ("tokens", "targets", "documents", "positions")}
    more = {name: change(tensor) for name, tensor in batch.more.items()}
    changed: dict[str, Any] = {name: None if t is None else change(t) for name, t in fields.items()}
    return replace(batch, more=more, **changed)


def to_columns(arrays: "Mapping[str, NDArray[Any]]", share: Share, device: torch.device) -> dict[str, Tensor]:
    """Return arrays (B, S, ...) of whole rows as tensors of the positions of this rank."""
    columns = slice(None) if share.columns is None else list(share.columns)
    return {name: _to_device(array[:, columns], device) for name, array in arrays.items()}


def with_token_keys(batch: Batch, seed: int, first: int, share: Share = WHOLE) -> Batch:
    """Return samples `first` and following of a run with their keys of dropout, cut to the columns of `share`."""
    rows, length = batch.tokens.shape
    columns = torch.tensor(range(length) if share.columns is None else share.columns, device="cpu")
    keys = token_keys(seed, range(first, first + rows), columns)
    return replace(batch, more={**batch.more, TOKEN_KEYS: _without_wait(keys, batch.tokens.device)})


class BatchSource(Protocol):
    """Source of numbered samples.

    A number gives the same sample on every rank, in every layout and after a restart. The cost does not depend on it.
    """

    def take(self, cursor: int, count: int, device: torch.device, share: Share) -> Batch:
        """Return samples cursor .. cursor + count - 1, each cut to the columns of `share`. Called from one thread."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a corpus, each one sample of the run."""

    sampler: "NumberedRows"
    document_mask: bool
    read_answers: AnswerReader | None = None
    read_rows: RowReader | None = None
    padding: bool = False

    def take(self, cursor: int, count: int, device: torch.device, share: Share) -> Batch:
        """Return samples cursor .. cursor + count - 1 of the corpus, with what the objective reads in addition."""
        rows = self.sampler.take(cursor, count)
        batch = to_batch(
            rows, device, document_mask=self.document_mask, share=share, read_answers=self.read_answers,
            padding=self.padding,
        )  # fmt: skip
        if self.read_rows is None:
            return batch
        return replace(batch, more={**batch.more, **to_columns(self.read_rows(cursor, count), share, device)})


class Feed:
    """Reader that prepares the next batch in a thread, so that a step does not wait for its source."""

    def __init__(
        self, source: BatchSource, device: torch.device, *, share: Share = WHOLE, dropout_seed: int | None = None
    ) -> None:
        """Read from a source. `dropout_seed` adds keys of dropout (TOKEN_KEYS)."""
        self.source, self.device, self.share, self.dropout_seed = source, device, share, dropout_seed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[tuple[int, int], Future[Batch]] | None = None

    def _read(self, cursor: int, count: int) -> Batch:
        """Return this rank's part of samples cursor .. cursor + count - 1."""
        # Each rank reads its own rows only, so reading scales with the ranks.
        size = count // self.share.parts
        first = cursor + size * self.share.index
        batch = self.source.take(first, size, self.device, self.share)
        return batch if self.dropout_seed is None else with_token_keys(batch, self.dropout_seed, first, self.share)

    def take(self, cursor: int, count: int, following: int = 0) -> Batch:
        """Return this rank's part of samples cursor .. cursor + count - 1.

        Then start to read the next `following` ones.
        """
        # The prediction fails after a resume, and when the size of a step changes.
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


def held_out_batches(
    sampler: "NumberedRows",
    device: torch.device,
    *,
    rows: int,
    limit: int,
    document_mask: bool,
    share: Share = WHOLE,
    read_answers: AnswerReader | None = None,
    by_role: bool = False,
) -> Iterator[Batch]:
    """Yield held-out windows, `rows` at a time on each rank, none twice.

    `limit` > 0 takes that many, spread evenly; 0 = all in order. Every rank gets equally many batches of one size. The
    last ones are filled up with rows that do not count.
    """
    for number, sequences in enumerate(sampler.windows_in_order(rows * share.parts, limit=limit)):
        if number == 0:
            rows = -(-len(sequences.tokens) // share.parts)
        local_rows = sequences.rows(slice(share.index * rows, (share.index + 1) * rows))
        yield to_batch(
            local_rows,
            device,
            document_mask=document_mask,
            share=share,
            rows=rows,
            read_answers=read_answers,
            by_role=by_role,
        )


def valid_tokens(micro_batches: Sequence[Batch]) -> int:
    """Return the number of targets that count in all micro-batches."""
    return sum(batch.valid for batch in micro_batches)


def graph_form(batch: Batch) -> Hashable:
    """Return what batches that one CUDA graph can serve have in common: sizes, and room for documents.

    None = not known on the host.
    """
    if batch.documents is not None and not batch.documents_of_rows:
        return None
    sizes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(batch))
    return sizes, batch.answers_of_rows, _room(batch)


def static_copy(batch: Batch) -> Batch:
    """Return a copy of the batch with memory that stays where it is, for passes launched as CUDA graphs.

    It has room for as many and as long documents as others of its form; absent ones have no tokens.
    """
    copy = map_tensors(batch, lambda tensor: tensor.clone())
    return copy if batch.documents is None else replace(copy, documents_of_rows=(_room(batch),))


def copy_into(into: Batch, batch: Batch) -> None:
    """Copy the tensors of a batch of the same form."""
    for (_, target), (_, source) in zip(_tensors(into), _tensors(batch), strict=True):
        target.copy_(source)


def _room(batch: Batch) -> tuple[int, int]:
    """Return (documents, tokens of the longest), rounded up to powers of two, so that few forms serve all batches.

    A kernel skips room without tokens. Lengths below a quarter of a row are not worth a form of their own.
    """
    if batch.documents is None:
        return 0, 0
    number, longest, _ = batch.spans
    rows, length = batch.tokens.shape
    return min(_power(number), rows * length), min(max(_power(longest), length // 4), length)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    tensors = {"tokens": batch.tokens, "targets": batch.targets, "documents": batch.documents,
             "positions": batch.positions, **batch.more}  # fmt: skip
    return ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
