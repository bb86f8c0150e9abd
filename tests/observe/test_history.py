"""A GPU's allocator as a snapshot tells of it: hand-made, in the shape that torch.cuda.memory._snapshot documents."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright import compat
from meshwright.observe.profile import allocator as account
from meshwright.observe.profile.allocator import DeviceAllocationRecorder, read_history

KB, MB = 2**10, 2**20
DEVICE = torch.device("cuda", 1)


class Allocator:
    """Gives memory of one segment of 20 MB, in blocks of 512 bytes and more; time goes on by 1 ms an event."""

    def __init__(self, entries: int = 10**6) -> None:
        self.entries, self.recording = entries, False
        self.now_us = 1_000_000
        self.trace: list[dict[str, Any]] = []
        self.held: dict[int, tuple[int, str]] = {}
        self.peak = self.level = 0

    def act(self, action: str, address: int, size: int) -> None:
        self.now_us += 1000
        if self.recording:
            entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.now_us, "frames": []}
            self.trace = [*self.trace, entry][-self.entries :]

    def take(self, address: int, size: int) -> None:
        self.held[address] = size, "active_allocated"
        self._count()
        self.act("alloc", address, size)

    def give(self, address: int, *, later: bool = False) -> None:
        size, _ = self.held[address]
        self.held[address] = size, "active_pending_free"
        self.act("free_requested", address, size)
        if not later:
            self.finish(address)
        self._count()

    def finish(self, address: int) -> None:
        size, _ = self.held.pop(address)
        self.act("free_completed", address, size)

    def _count(self) -> None:
        self.level = sum(-(-size // 512) * 512 for size, state in self.held.values() if state == "active_allocated")
        self.peak = max(self.peak, self.level)

    def snapshot(self) -> dict[str, Any]:
        blocks = [
            {"size": -(-size // 512) * 512, "requested_size": size, "address": address, "state": state, "frames": []}
            for address, (size, state) in sorted(self.held.items())
        ]
        free = {"size": 20 * MB - sum(block["size"] for block in blocks), "state": "inactive"}  # type: ignore[misc]
        empty = {"device": 1, "blocks": [{"size": 2 * MB, "state": "inactive"}]}
        other = {"device": 0, "blocks": [{"size": 7 * MB, "requested_size": 7 * MB, "state": "active_allocated"}]}
        return {
            "segments": [{"device": 1, "blocks": [*blocks, free]}, empty, other],
            "device_traces": [[{"action": "alloc", "addr": 1, "size": 7 * MB, "stream": 0, "time_us": 5}], self.trace],
        }


def used(allocator: Allocator) -> Allocator:
    """3 MB stay; 5 MB and a little are there in between, and wait for another stream when 4 MB come."""
    allocator.recording = True
    allocator.act("segment_alloc", 0, 20 * MB)
    allocator.take(0, 3 * MB)
    allocator.take(8 * MB, 5 * MB + 100)
    allocator.give(8 * MB, later=True)
    allocator.take(16 * MB, 4 * MB)
    allocator.finish(8 * MB)
    allocator.give(16 * MB)
    allocator.act("snapshot", 0, 0)
    return allocator


def test_levels_between_the_parts() -> None:
    history = read_history(used(Allocator()).snapshot(), 1, 512)
    assert history is not None
    assert [size for _, size in history.allocated] == [3 * MB, 8 * MB + 512, 3 * MB, 7 * MB, 3 * MB]
    assert [at for at, _ in history.allocated] == [1_000_000_000 + 1_000_000 * n for n in (2, 3, 4, 5, 7)]
    assert history.active_peak_bytes == 12 * MB + 512
    assert history.inactive_split_bytes == 17 * MB  # not those of the segment that is empty


def test_a_history_without_its_beginning_has_the_right_levels() -> None:
    history = read_history(used(Allocator(entries=5)).snapshot(), 1, 512)
    assert history is not None and [size for _, size in history.allocated] == [7 * MB, 3 * MB]


def test_what_is_held_at_the_end_counts() -> None:
    allocator = used(Allocator())
    allocator.take(9 * MB, 2 * MB)
    allocator.give(9 * MB, later=True)
    history = read_history(allocator.snapshot(), 1, 512)
    assert history is not None and history.allocated[-1][1] == 3 * MB and history.inactive_split_bytes == 15 * MB


@pytest.mark.parametrize(
    "snapshot",
    [
        {}, {"segments": [], "device_traces": []}, {"segments": None, "device_traces": [[], []]},
        {"segments": [{"blocks": [{"state": "inactive"}]}], "device_traces": [[], []]},
        {"segments": [], "device_traces": [[], [{"action": "alloc", "size": "1"}]]},
        {"segments": [], "device_traces": [[], [{"addr": 1}]]},
    ],
)  # fmt: skip
def test_another_shape_is_no_history(snapshot: dict[str, Any]) -> None:
    assert read_history(snapshot, 1, 512) is None


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """In place of the one of a GPU that is not there."""
    simulated = Allocator()

    def record(
        enabled: str | None = "all", context: Any = "all", max_entries: int = 0, clear_history: bool = False
    ) -> None:
        assert enabled is None or (enabled, context, clear_history) == ("all", None, True)
        simulated.recording, simulated.entries = enabled is not None, max_entries or simulated.entries

    def reset(device: Any) -> None:
        simulated.peak = simulated.level

    def stats(device: Any) -> dict[str, int]:
        return {
            "active_bytes.all.peak": simulated.peak + MB,
            "inactive_split_bytes.all.peak": 20 * MB - simulated.level,
        }

    for name, value in (
        ("empty_cache", lambda: None), ("reset_peak_memory_stats", reset), ("memory_stats", stats),
        ("max_memory_allocated", lambda device: simulated.peak), ("max_memory_reserved", lambda device: 20 * MB),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", simulated.snapshot)
    monkeypatch.setattr(account, "time_ns", lambda: simulated.now_us * 1000)
    yield simulated


def recorded(allocator: Allocator) -> account.AllocatorAccount:
    """Of two parts: in the first 3 MB, and 6 MB in between; in the second 4 MB more."""
    with DeviceAllocationRecorder(DEVICE) as recorder:
        allocator.take(0, 3 * MB)
        allocator.take(4 * MB, 6 * MB)
        allocator.give(4 * MB)
        recorder.begin("step 1")
        allocator.take(4 * MB, 4 * MB)
        allocator.give(4 * MB)
    assert not allocator.recording
    return recorder.account()


PARTS = [("start", 9 * MB, 17 * MB), ("step 1", 7 * MB, 17 * MB)]


def test_the_curve_is_that_of_the_events(allocator: Allocator) -> None:
    summary = recorded(allocator)
    assert [size // MB for _, size in summary.curve] == [3, 9, 3, 7, 3]
    assert [at for at, _ in summary.curve] == pytest.approx([0.001, 0.002, 0.003, 0.005, 0.006])
    assert summary.events == 5 and summary.peak_bytes == max(size for _, size in summary.curve)
    assert [
        (stretch.name, stretch.allocated_bytes, stretch.inactive_split_bytes) for stretch in summary.stretches
    ] == PARTS
    assert (summary.active_bytes, summary.inactive_split_bytes, summary.reserved_bytes) == (10 * MB, 17 * MB, 20 * MB)


def test_events_that_were_dropped_are_the_parts_peaks(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "EVENTS", 3)
    summary = recorded(allocator)
    assert [size // MB for _, size in summary.curve] == [9, 7, 3] and summary.events == 2


def test_statistics_without_pieces_leave_them_to_the_history(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    summary = recorded(allocator)
    assert (summary.active_bytes, summary.inactive_split_bytes) == (9 * MB, 17 * MB)


def _fails(*arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError("cudaMallocAsync does not yet support recordHistory")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_record_memory_history", _fails), ("_record_memory_history", lambda enabled: None),
        ("_record_memory_history", None), ("_snapshot", _fails), ("_snapshot", lambda: {"segments": []}),
        ("_snapshot", lambda: None),
    ],
)  # fmt: skip
def test_without_a_history_a_profile_has_its_parts(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(torch.cuda.memory, name, value)
    summary = recorded(allocator)
    assert [size // MB for _, size in summary.curve] == [9, 7] and summary.events == 0
    assert [
        (stretch.name, stretch.allocated_bytes, stretch.inactive_split_bytes) for stretch in summary.stretches
    ] == PARTS
    assert summary.peak_bytes == 9 * MB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_without_cuda_has_none() -> None:
    assert compat.record_allocations(10) is False and compat.stop_recording_allocations() is None


def above(summary: account.AllocatorAccount, before_bytes: int) -> tuple[int, int]:
    """The highest point of the curve and the peak, without what others held before."""
    return max(size for _, size in summary.curve) - before_bytes, summary.peak_bytes - before_bytes


def test_what_others_held_before_can_be_told_apart(allocator: Allocator) -> None:
    allocator.take(12 * MB, 2 * MB)
    assert above(recorded(allocator), allocator.level - 3 * MB) == (9 * MB, 9 * MB)


@pytest.mark.gpu
def test_of_a_real_gpu() -> None:
    gc.collect()  # what earlier tests left may not go in between
    before = torch.cuda.memory_allocated()
    with DeviceAllocationRecorder(torch.device("cuda", torch.cuda.current_device())) as recorder:
        held = torch.empty(8 * MB, dtype=torch.uint8, device="cuda")
        torch.empty(24 * MB, dtype=torch.uint8, device="cuda")
        recorder.begin("step 1")
        held = held + 1
    summary = recorder.account()
    highest, peak = above(summary, before)
    assert summary.events >= 4 and 32 * MB <= highest <= peak <= 34 * MB
    assert summary.active_bytes is not None and summary.inactive_split_bytes is not None
