"""A micro-batch in memory that stays where it is, for passes that are launched as CUDA graphs."""

from collections.abc import Hashable, Iterator
from dataclasses import replace

from torch import Tensor

from meshwright.training.batches import Batch, each_tensor


def form_of(batch: Batch) -> Hashable:
    """What two batches have in common that one graph can serve: sizes, and the room that documents take. None where
    that is not known on the host."""
    if batch.documents is not None and not batch.documents_of_rows:
        return None
    sizes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(batch))
    return sizes, batch.answers_of_rows, _room(batch)


def standing(batch: Batch) -> Batch:
    """The same batch with memory of its own, and with room for as many and as long documents as others of its form
    have: those that are not there have no tokens."""
    own = each_tensor(batch, lambda tensor: tensor.clone())
    return own if batch.documents is None else replace(own, documents_of_rows=(_room(batch),))


def take(into: Batch, batch: Batch) -> None:
    """Copy the tensors of a batch of the same form."""
    for (_, own), (_, given) in zip(_tensors(into), _tensors(batch), strict=True):
        own.copy_(given)


def _room(batch: Batch) -> tuple[int, int]:
    """(documents, tokens of the longest), up to powers of two, so that few forms serve all batches. A kernel looks at
    room without tokens and goes on; below a quarter of a row that is not worth a form."""
    if batch.documents is None:
        return 0, 0
    number, longest, _ = batch.spans
    rows, length = batch.tokens.shape
    return min(_power(number), rows * length), min(max(_power(longest), length // 4), length)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    named = {"tokens": batch.tokens, "targets": batch.targets, "documents": batch.documents,
             "positions": batch.positions, **batch.more}  # fmt: skip
    return ((name, tensor) for name, tensor in named.items() if tensor is not None)
