"""From numbered windows of tokens to micro-batches on a device, one step ahead of the training."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from meshwright.data import Sampler, Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: tokens, targets (B, S) int64 with -100 = ignored; documents and positions (B, S) only when a
    row holds a document border."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    valid: int = 0
    """Targets that count, known on the host."""
    valid_of_rows: tuple[int, ...] = ()
    """The same for each row, so that splitting needs no look at the device."""


def to_batch(sequences: "Sequences", device: torch.device, *, document_mask: bool) -> Batch:
    """Torch tensors of the windows; without a document mask rows are plain text."""
    packed = document_mask and sequences.packed

    def put(array: object) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    valid_of_rows = (sequences.targets >= 0).sum(axis=1).tolist()
    return Batch(
        tokens=put(sequences.tokens),
        targets=put(sequences.targets),
        documents=put(sequences.documents) if packed else None,
        positions=put(sequences.positions) if packed else None,
        valid=sum(valid_of_rows),
        valid_of_rows=tuple(valid_of_rows),
    )


def split(batch: Batch, size: int) -> list[Batch]:
    """The batch in micro-batches of `size` sequences. Documents stay with all parts or none: equal rows, equal path."""
    parts = []
    counts = batch.valid_of_rows or tuple((batch.targets >= 0).sum(1).tolist())
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        parts.append(
            Batch(
                tokens=batch.tokens[rows],
                targets=batch.targets[rows],
                documents=None if batch.documents is None else batch.documents[rows],
                positions=None if batch.positions is None else batch.positions[rows],
                valid=sum(counts[rows]),
                valid_of_rows=counts[rows],
            )
        )
    return parts


class Feed:
    """Reads the batch after the current one in a thread, so that a step does not wait for the disk."""

    def __init__(self, sampler: "Sampler", device: torch.device, *, document_mask: bool) -> None:
        self.sampler, self.device, self.document_mask = sampler, device, document_mask
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[tuple[int, int], Future[Batch]] | None = None

    def _read(self, cursor: int, count: int) -> Batch:
        return to_batch(self.sampler.take(cursor, count), self.device, document_mask=self.document_mask)

    def take(self, cursor: int, count: int, following: int = 0) -> Batch:
        """Samples cursor .. cursor + count - 1; then begins to read the next `following` ones."""
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
    sampler: "Sampler", device: torch.device, *, rows: int, limit: int, document_mask: bool
) -> Iterator[Batch]:
    """Held-out windows, `rows` at a time: all in order, or `limit` > 0 of them spread evenly; none twice."""
    for sequences in sampler.windows_in_order(rows, limit=limit):
        yield to_batch(sequences, device, document_mask=document_mask)


def valid_tokens(micro_batches: Sequence[Batch]) -> int:
    """Targets that count in all micro-batches together."""
    return sum(batch.valid for batch in micro_batches)
