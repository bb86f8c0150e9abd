"""Saving behind the training's back: the same files, one at a time, errors at the next step, nothing half there."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import CheckpointError, NonFiniteLoss
from meshwright.spec.weights.boxes import Box
from meshwright.store import checkpoint, checkpoint_files
from meshwright.store import saver as saver_module
from meshwright.store.saver import Piece, Saver, Staging
from meshwright.training import job, loop
from tests.store import saving
from tests.store.test_checkpoint import state
from tests.store.test_crash import newest, whole
from tests.training import running

OPTIONS: dict[str, Any] = {"steps": 8, "eval_every": 3, "checkpoint_every": 2, "keep_last": 9}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("saver") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which costs a second a run, and no waiting for the disk: the machine lives on."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)


class Gate:
    """Holds the writing of files until it is opened; may then fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.error = threading.Event(), threading.Event(), None
        self.real = checkpoint_files.write_safetensors
        monkeypatch.setattr(checkpoint_files, "write_safetensors", self.write)

    def write(self, *inputs: Any) -> Any:
        self.reached.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        return self.real(*inputs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    actual = Gate(monkeypatch)
    yield actual
    actual.open.set()


def saver(folder: Path, told: list[int] | None = None, *, behind: bool = True) -> Saver:
    steps: list[int] = [] if told is None else told
    return Saver(
        folder, keep_last=9, group=Group("saving") if behind else None, saved=lambda step, path: steps.append(step)
    )


def files(saved: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in saved.iterdir()}


def behind(plan: Plan, **layout: Any) -> Plan:
    return replace(plan, layout=replace(plan.layout, saving="async", **layout))


def test_the_files_are_those_of_a_save_that_was_waited_for(tmp_path: Path, gate: Gate) -> None:
    """Though the state has changed long before they are written."""
    tensors = state()
    tensors["piece"] = Piece(torch.arange(6.0).view(2, 3), Box(whole=(2, 3), offsets=(0, 0), sizes=(2, 3)))
    told: list[int] = []
    with saver(tmp_path / "behind", told) as ours:
        ours.save(3, tensors, {"step": 3}, 0.5)
        assert gate.reached.wait(30) and checkpoint.find_latest(tmp_path / "behind") is None and told == []
        before = {name: tensor.detach().clone() for name, tensor in tensors.items() if name != "piece"}
        for name in before:
            tensors[name].detach().zero_()
        tensors["piece"].held.zero_()
        gate.open.set()
    assert told == [3]
    before["piece"] = torch.arange(6.0).view(2, 3)
    right = checkpoint.save(tmp_path / "waited", step=3, tensors=before, values={"step": 3}, score=0.5, keep_last=9)
    assert files(tmp_path / "behind" / "step-000003") == files(right)


def test_one_save_is_under_way_at_most_and_one_buffer_is_used(tmp_path: Path, gate: Gate) -> None:
    tensors, told = saving.tensors_of(1), []
    with saver(tmp_path, told) as ours:
        ours.save(1, tensors, {}, None)
        slabs = [slab.data_ptr() for slab in ours._staging.slabs]
        opening = threading.Timer(0.3, gate.open.set)
        opening.start()
        started = time.perf_counter()
        ours.save(2, tensors, {}, None)
        assert time.perf_counter() - started > 0.2 and told == [1]
        assert [slab.data_ptr() for slab in ours._staging.slabs] == slabs
        assert ours.blocked_s > 0.2
    assert told == [1, 2] and [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [1, 2]


def test_every_tensor_that_is_written_is_a_sign_of_life(tmp_path: Path) -> None:
    begun, tensors = [], saving.tensors_of(1)
    group = Group("saving")
    with Saver(
        tmp_path, keep_last=1, group=group, saved=lambda step, path: None, begun=lambda: begun.append(1)
    ) as ours:
        ours.save(1, tensors, {}, None)
    assert len(begun) == len(tensors)


def test_a_last_save_is_not_copied(tmp_path: Path) -> None:
    with saver(tmp_path) as ours:
        ours.save(1, saving.tensors_of(1), {}, None, last=True)
        assert ours._staging.slabs == [] and checkpoint.find_latest(tmp_path) == tmp_path / "step-000001"


def test_staging_cuts_slabs_and_keeps_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SLAB_BYTES", 200)
    actual, tensors = Staging(), state()
    for _ in range(2):
        copies = actual.copy(tensors)
        assert len(actual.slabs) > 3
        for name, tensor in tensors.items():
            assert copies[name].dtype == tensor.dtype and copies[name].is_contiguous()
            assert torch.equal(copies[name].view(-1).view(torch.uint8), _bits(tensor)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def test_a_run_leaves_the_same_checkpoints(texts: Path, tmp_path: Path) -> None:
    plain = running.plan(texts, tmp_path / "plain", **OPTIONS)
    ours = behind(running.plan(texts, tmp_path / "behind", **OPTIONS))
    notes = running.Notes()
    loop.run(plain)
    summary = loop.run(ours, watchers=[notes])
    assert notes.saves == [2, 4, 6, 8] and 0 < summary.saving_seconds < summary.seconds + 60
    running.assert_same_end(tmp_path / "behind", tmp_path / "plain")
    for step in (2, 4, 6):
        entry, other = (tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in ("behind", "plain"))
        mine, theirs = files(entry), files(other)
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == theirs[name] for name in mine if name.endswith(".safetensors"))


def test_a_full_disk_is_told_at_the_next_step(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save fails in the background: training stops, the first checkpoint stays."""
    real, calls = checkpoint_files.write_safetensors, []

    def second_is_full(*inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*inputs)

    monkeypatch.setattr(checkpoint_files, "write_safetensors", second_is_full)
    plan = behind(running.plan(texts, tmp_path / "run", **{**OPTIONS, "steps": 40, "checkpoint_every": 10}))
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        loop.run(plan, watchers=[Patient()])
    assert "\n" not in str(caught.value) and "earlier checkpoints are kept" in str(caught.value)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [10]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000010"]
    assert 20 < max(running.steps_of(running.metrics(tmp_path / "run"))) < 30, "before the save after it"
    monkeypatch.undo()
    assert loop.run(plan, resume="auto").stopped == "done"


class Patient(running.Notes):
    """Gives the thread time after every step."""

    def stepped(self, metrics: Any) -> None:
        time.sleep(0.05 if metrics.step % 10 else 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_waits_for_what_is_under_way(texts: Path, tmp_path: Path, gate: Gate, number: signal.Signals) -> None:
    threading.Timer(0.5, gate.open.set).start()
    notes = running.Terminated(3, number)
    summary = loop.run(behind(running.plan(texts, tmp_path / "run", **OPTIONS)), watchers=[notes])
    assert summary.stopped != "done" and notes.saves == [2, 3]
    assert summary.checkpoint == tmp_path / "run" / "checkpoints" / "step-000003"


def test_a_second_interruption_ends_the_save(texts: Path, tmp_path: Path, gate: Gate) -> None:
    """At once, and nothing half there is visible."""

    class Twice(running.Notes):
        def stepped(self, metrics: Any) -> None:
            if metrics.step == 3:
                gate.open.set()
                raise KeyboardInterrupt

    slow = checkpoint_files.write_safetensors

    def asking(path: Path, items: Any, resolve: Any) -> Any:
        time.sleep(0.2)
        return slow(path, items, resolve)

    checkpoint_files.write_safetensors = asking  # over the gate, which a fixture takes away
    plan = behind(running.plan(texts, tmp_path / "run", **OPTIONS))
    with pytest.raises(KeyboardInterrupt):
        loop.run(plan, watchers=[Twice()])
    checkpoint_files.write_safetensors = gate.real
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert loop.run(plan, resume="auto").stopped == "done"


def test_a_loss_that_is_no_number_names_the_save_under_way(
    texts: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(running.Notes):
        def stepped(self, metrics: Any) -> None:
            if metrics.step == 2:
                threading.Timer(0.3, gate.open.set).start()
                monkeypatch.setattr("meshwright.training.trainer.learning_rate", lambda recipe, step: float("nan"))

    with pytest.raises(NonFiniteLoss, match=r"the last good checkpoint is .*step-000002"):
        loop.run(behind(running.plan(texts, tmp_path / "run", **OPTIONS)), watchers=[Breaks()])


def save_behind_for_ever(folder: Path, first: int) -> None:
    """To be killed; the state changes while it is being written."""
    step, tensors = first, saving.tensors_of(first)
    with Saver(folder, keep_last=1, group=Group("saving"), saved=lambda step, path: None) as ours:
        while True:
            for name, tensor in saving.tensors_of(step).items():
                tensors[name].copy_(tensor)
            ours.save(step, tensors, {"step": step}, 1 / step)
            step += 1


def test_killed_at_random_moments_only_whole_checkpoints_stay(tmp_path: Path) -> None:
    saving.save_step(tmp_path, 1)
    dice = random.Random(0)
    steps = [1]
    for _ in range(5):
        process = saving.start(save_behind_for_ever, tmp_path, steps[-1] + 1)
        started = time.monotonic()
        while newest(tmp_path) == steps[-1] and time.monotonic() < started + 30:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        saving.finish(process)
        steps.append(whole(tmp_path, 1.0))
    assert steps == sorted(set(steps)), "every child got somewhere"


def fill_disk_behind(folder: Path) -> None:
    """A disk of our own that is really full, as tests.store.saving.fill_disk makes one."""
    saving.small_disk(folder)
    with Saver(folder, keep_last=2, group=Group("saving"), saved=lambda step, path: None) as ours:
        ours.save(1, saving.tensors_of(1, 0.1), {"step": 1}, None)
        ours.save(2, saving.tensors_of(2, 2.0), {"step": 2}, None)
        try:
            ours.wait()
            raise AssertionError("the save should have failed")
        except CheckpointError as error:
            assert "No space left on device" in str(error) and "\n" not in str(error), error
        assert [path.name for path in folder.iterdir()] == ["step-000001"]
        ours.save(3, saving.tensors_of(3, 0.1), {"step": 3}, None)
    assert checkpoint.find_latest(folder) == folder / "step-000003"


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    (code,) = saving.finish(saving.start(fill_disk_behind, tmp_path))
    if code == saving.SKIPPED:
        pytest.skip("mounting a small disk needs root")
    assert code == 0


LAYOUTS: list[dict[str, Any]] = [{"dp_shard": 2, "zero": 3}, {"dp_replicate": 2}]


def run_both(texts: str, folder: str) -> list[int]:
    """On one of two ranks: each layout with saves waited for and not; the bytes staged of a state that both hold."""
    os.fsync = lambda number: None  # type: ignore[assignment]
    staged: list[int] = []
    real = Staging.copy

    def counting(self: Staging, tensors: Any) -> Any:
        staged.append(sum(t.numel() * t.element_size() for n, t in tensors.items() if not n.startswith("rng.")))
        return real(self, tensors)

    Staging.copy = counting  # type: ignore[method-assign]
    job.make_mesh = partial(make_mesh, process_groups={})  # several runs of one process
    for number, options in enumerate(LAYOUTS):
        for way in ("async", "sync"):
            recipe = {**OPTIONS, "steps": 4, "eval_every": 2}
            plan = running.plan(Path(texts), Path(folder, f"{number} {way}"), **recipe)
            loop.run(replace(plan, layout=replace(Layout(**options), micro_batch=1, saving=way)))
    return staged


@pytest.mark.long
def test_two_ranks_write_the_same_files(texts: Path, tmp_path: Path) -> None:
    """And of what both hold, each copies only what it is to write."""
    staged = on_ranks(2, run_both, str(texts), str(tmp_path))
    for number in range(len(LAYOUTS)):
        entry, other = (tmp_path / f"{number} {way}" / "checkpoints" for way in ("async", "sync"))
        assert sorted(path.name for path in entry.iterdir()) == [f"step-{step:06d}" for step in (2, 4)]
        for step in (2, 4):
            mine, theirs = (files(folder / f"step-{step:06d}") for folder in (entry, other))
            assert mine.keys() == theirs.keys()
            assert all(mine[name] == theirs[name] for name in mine if name.endswith(".safetensors"))
    together = sum(rank[1] for rank in staged)  # the last save is not copied
    saved = tmp_path / "1 async" / "checkpoints" / "step-000002"
    sizes = {n: k for n, k in checkpoint.names(saved).items() if not n.startswith("rng.")}
    assert together == sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes.values())


def run_and_fail(texts: str, folder: str) -> tuple[str, bool, int]:
    """On one of two ranks: the disk of the second is full at the second save."""
    real, calls = checkpoint_files.write_safetensors, []

    def full(*inputs: Any) -> Any:
        calls.append(inputs)
        if torch.distributed.get_rank() == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*inputs)

    checkpoint_files.write_safetensors = full
    plan = running.plan(Path(texts), Path(folder, "run"), **{**OPTIONS, "steps": 500, "checkpoint_every": 10})
    try:
        loop.run(behind(plan, dp_shard=2, zero=1), watchers=[Patient()])
    except CheckpointError as error:
        return str(error), error.reported_elsewhere, len(running.metrics(Path(folder, "run")))
    raise AssertionError("the save should have failed")


def test_ranks_hear_of_it_at_the_same_step(texts: Path, tmp_path: Path) -> None:
    first, second = on_ranks(2, run_and_fail, str(texts), str(tmp_path))
    message = [re.sub(r"[0-9.]+ GiB are free", "", entry[0]) for entry in (first, second)]
    assert "No space left on device" in message[0] and message[0] == message[1]
    assert (first[1], second[1]) == (False, True)
    assert 20 < max(running.steps_of(running.metrics(tmp_path / "run"))) < 40
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000010"]


@pytest.mark.gpu
def test_a_state_on_a_gpu_comes_through_pinned_memory() -> None:
    tensors = {name: tensor.detach().cuda() for name, tensor in state().items()}
    actual = Staging()
    copies = actual.copy(tensors)
    assert all(slab.is_pinned() for slab in actual.slabs)
    for name, tensor in tensors.items():
        assert not copies[name].is_cuda and torch.equal(copies[name].view(-1).view(torch.uint8), _bits(tensor.cpu()))


def test_the_place_for_it_is_the_layout(texts: Path, tmp_path: Path) -> None:
    """`auto` waits on a CPU and does not on a GPU."""
    plan = running.plan(texts, tmp_path / "run", **OPTIONS)
    assert plan.layout.saving == "auto" and not plan.layout.saves_behind("cpu")
    assert plan.layout.saves_behind("cuda") and behind(plan).layout.saves_behind("cpu")
