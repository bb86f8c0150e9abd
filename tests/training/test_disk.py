"""Room for checkpoints is asked for before the first step."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.errors import RunError
from meshwright.spec.units import GIB
from meshwright.store import checkpoint_folder
from meshwright.training import loop
from meshwright.training.fits import OTHER_BYTES, check_space, checkpoint_bytes
from tests.training import running

KIB = 1024


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("texts") / "t")


def has(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, free))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "recipe",
    [{}, {"precision": "bf16"}, {"optimizer_states": "int8"}, {"precision": "bf16", "master_weights": "none"}],
    ids=str,
)
def test_the_size_is_that_of_a_checkpoint(texts: Path, tmp_path: Path, recipe: dict[str, str]) -> None:
    shape = replace(running.SHAPE, vocab=4096, hidden=64)
    plan = running.plan(texts, tmp_path / "run", shape=shape, steps=1, **recipe)
    loop.run(plan)
    [saved] = checkpoint_folder.list_checkpoints(tmp_path / "run" / "checkpoints")
    beside = saved.size_bytes - checkpoint_bytes(shape, plan.recipe)
    assert 0 < beside < 40 * KIB, "names, hashes and random states"
    assert saved.size_bytes > 4 * 40 * KIB


def test_a_full_disk_is_refused_before_anything_is_made(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = running.plan(texts, tmp_path / "run")
    has(monkeypatch, 16 * KIB)
    with pytest.raises(RunError, match=r"the disk is too small. A checkpoint takes .* are free: free some space"):
        loop.run(plan)
    has(
        monkeypatch, checkpoint_bytes(plan.model, plan.recipe) + OTHER_BYTES // 2
    )  # but for plan, tokenizer and ledgers
    with pytest.raises(RunError, match="other files of the run"):
        loop.run(plan)
    assert not (tmp_path / "run").exists()


def test_room_for_one_and_not_for_all_is_said(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, watcher = running.plan(texts, tmp_path / "run", steps=4, checkpoint_every=1), running.Notes()
    size = checkpoint_bytes(plan.model, plan.recipe)
    has(monkeypatch, 3 * size + OTHER_BYTES)
    loop.run(plan, watchers=[watcher])
    assert watcher.info is not None
    [note] = [text for label, text in watcher.info.foreseen if label == "note"]
    assert "up to 4 checkpoints of" in note and "recipe.keep_last=2" in note
    assert note.endswith("the one being written): it may fill up before the end")
    has(monkeypatch, 16)  # nothing is left to be saved
    assert loop.run(plan, resume="auto").step == 4
    has(monkeypatch, GIB)
    assert check_space(replace(plan, run=str(tmp_path / "other"))) is None
