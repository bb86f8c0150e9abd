"""Whatever kills a save, and whenever: the folder holds a checkpoint that loads and is whole."""

import errno
import json
import os
import platform
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from meshwright.spec.errors import CheckpointError
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.folder_ranks import FolderRanks
from tests.store import saving


def whole(folder: Path, megabytes: float) -> int:
    """The step of the newest checkpoint, every number of which must tell that step."""
    path = checkpoint.find_latest(folder)
    assert path is not None
    tensors = saving.tensors_of(0, megabytes)
    step = int(checkpoint.load(path, tensors)["step"])
    told = saving.tensors_of(step, megabytes)  # in bf16 257 is 256
    assert all(torch.equal(tensor, told[name]) for name, tensor in tensors.items())
    assert path.name == f"step-{step:06d}"
    return step


def newest(folder: Path) -> int:
    """By name alone."""
    return max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_killed_at_random_moments(tmp_path: Path) -> None:
    saving.save_step(tmp_path, 1)
    dice = random.Random(0)
    steps = [1]
    for _ in range(20):
        process = saving.start(saving.save_for_ever, tmp_path, steps[-1] + 1)
        started = time.monotonic()
        while newest(tmp_path) == steps[-1] and time.monotonic() < started + 30:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        saving.finish(process)
        steps.append(whole(tmp_path, 1.0))
    assert all(before < after for before, after in pairwise(steps)), "every child got somewhere"


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_killed_before_every_change_of_the_file_system(tmp_path: Path, again: bool) -> None:
    """keep_last=1: one checkpoint is there before, at least one must be there after, whatever came in between."""
    step = 1 if again else 2
    event, code = 0, 9
    while code == 9:
        folder = tmp_path / str(event)
        saving.save_step(folder, 1, megabytes=0.01, keep_last=1)
        (code,) = saving.finish(saving.start(saving.die_at, folder, step, event))
        checkpoint.sweep(folder)  # what the next run does first
        assert whole(folder, 0.01) in (1, step), event
        assert all(path.name.startswith("step-") for path in folder.iterdir())
        event += 1
    assert code == 0 and event > 12
    assert [saved.step for saved in checkpoint.list_checkpoints(folder)] == [step]


def test_full_disk(tmp_path: Path) -> None:
    (code,) = saving.finish(saving.start(saving.fill_disk, tmp_path))
    if code == saving.SKIPPED:
        pytest.skip("mounting a small disk needs root")
    assert code == 0


@pytest.mark.parametrize("sharing", [None, FolderRanks(index=0, size=1)])
def test_a_failed_save_names_the_machine_where_each_has_its_own_disk(
    sharing: FolderRanks | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_folder, "commit", commit)
    with pytest.raises(CheckpointError, match="could not be saved") as raised:
        checkpoint.save(
            tmp_path, step=1, tensors=saving.tensors_of(1, 0.01), values={}, score=None, keep_last=1, sharing=sharing
        )
    assert (f" on {platform.node()}: No space left" in str(raised.value)) == (sharing is not None)


def test_file_size_limit(tmp_path: Path) -> None:
    assert saving.finish(saving.start(saving.limit_file_size, tmp_path)) == [0]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to see the peak")
def test_saving_copies_nothing(tmp_path: Path) -> None:
    assert saving.finish(saving.start(saving.measure_memory, tmp_path / "saved", tmp_path / "report")) == [0]
    report = json.loads((tmp_path / "report").read_text())
    assert report["extra"] < report["state"] / 10
