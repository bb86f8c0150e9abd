"""From windows of tokens to micro-batches: borders, counts, reading ahead."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data import Sampler, Sequences, TokenStream
from meshwright.spec.errors import DataError
from meshwright.training.step.batches import (
    Feed,
    PackedRows,
    Share,
    forms,
    held_out_batches,
    split,
    to_batch,
    valid_tokens,
)

CPU = torch.device("cpu")


def stream(count: int, starts: tuple[int, ...] = (0,)) -> TokenStream:
    tokens = (np.arange(count) * 7 % 50).astype(np.uint16)
    return TokenStream(
        tokens=tokens, starts=np.array(starts), num_tokens=count, num_bytes=count, num_documents=len(starts)
    )


def sampler(count: int = 200, starts: tuple[int, ...] = (0,), sequence: int = 8, **options: Any) -> Sampler:
    return Sampler(stream(count, starts), sequence=sequence, tokenizer_separator=False, seed=1, **options)


def test_tensors_say_what_the_windows_said() -> None:
    windows = sampler(starts=(0, 13, 77)).take(0, 25)
    assert windows.packed
    made = to_batch(windows, CPU, document_mask=True)
    assert made.documents is not None and made.positions is not None
    for tensor, array in (
        (made.tokens, windows.tokens),
        (made.targets, windows.targets),
        (made.documents, windows.documents),
        (made.positions, windows.positions),
    ):
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert made.tokens.dtype == made.targets.dtype == torch.int64
    assert made.valid == int((windows.targets != -100).sum()) == 25 * 8 - 2


def test_a_gpu_copies_from_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that the host does not wait for may read after the array is gone, unless pages are locked."""
    locked: list[int] = []
    sent: list[bool] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        locked.append(copy.data_ptr())
        return copy

    def send(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda" and non_blocking
        sent.append(tensor.data_ptr() in locked)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(torch.Tensor, "to", send)
    to_batch(sampler(starts=(0, 13, 77)).take(0, 25), torch.device("cuda"), document_mask=True)
    assert sent == [True] * 4


def test_borders_are_only_carried_where_there_are_some_and_they_are_wanted() -> None:
    with_borders, without = sampler(starts=(0, 13)).take(0, 24), sampler().take(0, 24)
    assert to_batch(without, CPU, document_mask=True).documents is None
    unmasked = to_batch(with_borders, CPU, document_mask=False)
    assert unmasked.documents is None and unmasked.positions is None


@pytest.mark.parametrize("columns", [None, (0, 1, 6, 7)], ids=["whole", "cut"])
@pytest.mark.parametrize("starts", [(0,), (0, 13)], ids=["plain", "packed"])
def test_a_batch_has_the_forms_that_others_of_its_run_come_in(
    starts: tuple[int, ...], columns: tuple[int, ...] | None
) -> None:
    """The same tensors are there, in the same sizes, as where such a batch is read."""
    share = Share(columns=columns)
    read = {
        other: to_batch(sampler(starts=other).take(0, 24), CPU, document_mask=True, share=share)
        for other in ((0,), (0, 13))
    }
    batch_forms = forms(split(read[starts], 24)[0])
    assert list(batch_forms) == [False, True]
    for form, like in zip(batch_forms.values(), read.values(), strict=True):
        for name in ("tokens", "targets", "documents", "positions"):
            tensor, other = getattr(form, name), getattr(like, name)
            assert (tensor is None) == (other is None), name
            assert tensor is None or (tensor.shape == other.shape and tensor.dtype == other.dtype), name
    unmasked = to_batch(sampler(starts=starts).take(0, 24), CPU, document_mask=False, share=share)
    assert list(forms(unmasked)) == [False]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_micro_batches_are_the_rows_in_order(size: int) -> None:
    whole = to_batch(sampler(starts=(0, 13, 77)).take(3, 8), CPU, document_mask=True)
    parts = split(whole, size)
    assert len(parts) == 8 // size and all(len(part.tokens) == size for part in parts)
    for name in ("tokens", "targets", "documents", "positions"):
        if getattr(whole, name) is not None:
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert [part.valid for part in parts] == [int((part.targets >= 0).sum()) for part in parts]
    assert valid_tokens(parts) == whole.valid


class Counted:
    """A sampler that remembers what it was asked, and in which thread."""

    def __init__(self, inner: Sampler, failing: int = -1) -> None:
        self.inner, self.failing, self.asked = inner, failing, []

    def take(self, cursor: int, count: int) -> Sequences:
        self.asked.append((cursor, count, threading.current_thread().name))
        if cursor == self.failing:
            raise DataError("the file is gone")
        return self.inner.take(cursor, count)


@pytest.fixture
def counted() -> Counted:
    return Counted(sampler())


@pytest.fixture
def feed(counted: Counted) -> Iterator[Feed]:
    reader = Feed(PackedRows(counted, True), CPU)  # type: ignore[arg-type]
    yield reader
    reader.close()


def test_the_next_batch_is_read_ahead_and_every_one_once(feed: Feed, counted: Counted) -> None:
    """With a ramp: 2, then 4 sequences a step."""
    cursor = 0
    for count, following in ((2, 2), (2, 4), (4, 4), (4, 0)):
        taken = feed.take(cursor, count, following)
        np.testing.assert_array_equal(taken.tokens.numpy(), sampler().take(cursor, count).tokens)
        cursor += count
    feed.close()
    assert [(at, count) for at, count, _ in counted.asked] == [(0, 2), (2, 2), (4, 4), (8, 4)]
    threads = [name for _, _, name in counted.asked]
    assert threads[0] == threading.current_thread().name and all(t.startswith("batches") for t in threads[1:])


def test_what_was_read_ahead_in_vain_is_not_given_out(feed: Feed) -> None:
    feed.take(0, 2, following=4)
    taken = feed.take(2, 3)
    np.testing.assert_array_equal(taken.tokens.numpy(), sampler().take(2, 3).tokens)
    np.testing.assert_array_equal(feed.take(2, 4).tokens.numpy(), sampler().take(2, 4).tokens)


def test_an_error_ahead_is_raised_where_the_batch_is_needed() -> None:
    failing_feed = Feed(PackedRows(Counted(sampler(), failing=2), True), CPU)  # type: ignore[arg-type]
    failing_feed.take(0, 2, following=2)
    with pytest.raises(DataError, match="the file is gone"):
        failing_feed.take(2, 2)
    failing_feed.close()


def test_held_out_windows_are_scored_once() -> None:
    inner = sampler(count=203, starts=(0, 50), shuffle=False)
    batches = list(held_out_batches(inner, CPU, rows=4, limit=0, document_mask=True))
    assert sum(len(batch.tokens) for batch in batches) == 28
    assert len(batches[-1].tokens) == 4 and batches[-1].valid_of_rows[2:] == (0, 0), (
        "filled up with rows that count not"
    )
    assert valid_tokens(batches) == 202 - 1, "all but the first token, and the first of the second document"
    spread = list(held_out_batches(inner, CPU, rows=4, limit=5, document_mask=True))
    assert [sum(map(bool, batch.valid_of_rows)) for batch in spread] == [4, 1]


def test_held_out_text_shorter_than_a_window_is_padded() -> None:
    [only] = held_out_batches(sampler(count=5, shuffle=False), CPU, rows=4, limit=0, document_mask=True)
    assert only.tokens.shape == (1, 8) and only.valid == 4
