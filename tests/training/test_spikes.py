"""Spikes of the loss: what is one, and that the run after a rollback is one from that checkpoint with other data."""

import json
import logging
import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from meshwright.observe.compare.finished_run import goodput_document, open_run
from meshwright.spec import Plan, Recipe
from meshwright.spec.errors import NonFiniteLoss, PlanError
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.training import loop, trainer
from meshwright.training.step import spikes
from meshwright.training.step.batches import PackedRows
from meshwright.training.step.spikes import SpikeWatch
from tests.training import running
from tests.training.running import Crashed, CrashedAgain, PowerCut, tensors
from tests.verbs.faults import Garbage

OPTIONS: dict[str, Any] = {"steps": 40, "checkpoint_every": 4, "keep_last": 3, "eval_every": 9}
GARBAGE = range(25 * 4, 32 * 4)
"""Rows without sense, of steps 26 to 32 where nothing was skipped."""
NOTICED, BACK_AT = 30, 24
"""The fifth of these steps, and the newest checkpoint before the first."""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("spikes") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "take", PackedRows.take)
    for name in ("ENOUGH_STEPS", "HISTORY_STEPS", "DEVIATIONS"):
        monkeypatch.setattr(spikes, name, getattr(spikes, name))


def judged(watch: SpikeWatch, losses: list[float], first: int = 1) -> list[int]:
    """The steps at which a spike is seen."""
    return [step for step, loss in enumerate(losses, first) if watch.judge(step, loss) is not None]


def test_noise_and_falling_losses_are_no_spikes() -> None:
    random = Random(3)
    for noise in (0.0, 0.001, 0.03, 0.3):
        falling = [2 + 8 / math.sqrt(step) + random.gauss(0, noise) for step in range(1, 3000)]
        assert judged(SpikeWatch(), falling) == []
        # As with rare long documents: one step in ten is far above.
        assert judged(SpikeWatch(), [loss + (random.random() < 0.1) * 3 for loss in falling]) == []


def test_five_high_losses_in_a_row_are_a_spike_from_the_first_of_them() -> None:
    random = Random(3)
    before = [2.5 + random.gauss(0, 0.03) for _ in range(200)]
    watch = SpikeWatch()
    assert judged(watch, before + [3.0] * 4 + [2.5] + [math.nan]) == [] and watch.row == 0
    assert len(watch.losses) == spikes.HISTORY_STEPS and watch.limit == pytest.approx(2.5 + 6 * 0.03, abs=0.1)
    stored = SpikeWatch(**json.loads(json.dumps(asdict(watch))))
    assert stored == watch
    spike = [watch.judge(step, 3.0) for step in range(301, 306)][-1]
    assert spike is not None and spike.begun == 301 and spike.words.startswith("the loss is 3.000 and above 2.")
    watch.accept()
    assert judged(watch, [3.0] * 100) == [], "the new level is what later losses are compared with"
    assert judged(SpikeWatch(), [2.5] * 20 + [9.0] * 20) == [], "too early to judge"


def by_hand(plan: Plan, cursor: int) -> None:
    """Train without rollbacks to the checkpoint, set its place in the data, and go on."""
    with pytest.raises(PowerCut):
        loop.run(plan, watchers=[Crashed(BACK_AT + 1)])
    saved = checkpoint.find_latest(Path(plan.run) / "checkpoints")
    assert saved is not None and saved.name == f"step-{BACK_AT:06}"
    state = json.loads((saved / "state.json").read_text())
    assert state["cursor"] == BACK_AT * 4
    (saved / "state.json").write_text(json.dumps({**state, "cursor": cursor}))
    commit = checkpoint_folder.read_commit(saved)
    files = [file for file in commit.files if file.name != "state.json"]
    files.append(checkpoint_folder.record_file(saved / "state.json"))
    checkpoint_folder.write_commit(saved, replace(commit, files=tuple(files)))
    loop.run(plan, resume="auto")


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_a_rollback_it_is_a_run_from_that_checkpoint_with_later_data(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: bool,
    precision: str,
) -> None:  # fmt: skip
    """Every bit of metrics, weights, moments and random states. With late numbers a step more is on its way."""
    monkeypatch.setattr(trainer, "reads_late", lambda device: late)
    Garbage((GARBAGE,))(0)
    options = {**OPTIONS, "precision": precision, "dropout": 0.1}
    plan = running.plan(texts, tmp_path / "run", **options, rollback_spikes=2)
    with caplog.at_level(logging.WARNING, "meshwright"):
        summary = loop.run(plan)
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    ended = NOTICED + late
    assert line.endswith(
        f"since step 26: back to step-000024, and {(ended - BACK_AT) * 4} rows are skipped (rollback 1 of at most 2)"
    )
    rows = running.metrics(tmp_path / "run")
    [rollback] = [row for row in rows if row.get("kind") == "rollback"]
    assert rollback == {
        "step": 25, "kind": "rollback", "begun": 26, "ended": ended, "skipped_rows": (ended - 24) * 4, "rollbacks": 1,
    }  # fmt: skip
    by_hand(running.plan(texts, tmp_path / "hand", **options), cursor=ended * 4)
    rows.remove(rollback)
    assert rows == running.metrics(tmp_path / "hand")
    assert [row["step"] for row in rows if "kind" not in row] == list(range(1, 41))
    mine, theirs = (checkpoint.find_latest(tmp_path / name / "checkpoints") for name in ("run", "hand"))
    assert mine is not None and theirs is not None and mine.name == theirs.name == "step-000040"
    for name, tensor in tensors(theirs).items():
        assert torch.equal(tensor, tensors(mine)[name]), name
    ours, others = (checkpoint.read_values(saved) for saved in (mine, theirs))
    assert ours.pop("spikes")["rollbacks"] == 1 and ours["cursor"] == (40 + ended - BACK_AT) * 4
    assert {**ours, "seconds": 0} == {**others, "seconds": 0}
    # Lost work of one process, which nothing has interrupted.
    account = summary.goodput
    assert account is not None and (account.processes, account.interruptions, account.steps) == (1, 0, 40)
    assert account.lost_seconds > 0 and account.idle_seconds == 0
    document = goodput_document(open_run(tmp_path / "run"))
    assert document is not None and document["words"].endswith("; 1 rollback before spikes (step 26)")


@pytest.mark.long
@pytest.mark.parametrize(
    "crash",
    [Crashed(28), Crashed(30), CrashedAgain(26), CrashedAgain(29), Crashed(35)],
    ids=["in the spike", "as it is noticed", "before the next save", "after it", "later"],
)
def test_killed_around_a_rollback_it_is_as_if_it_never_was(texts: Path, tmp_path: Path, crash: Crashed) -> None:
    Garbage((GARBAGE,))(0)
    whole, broken = (running.plan(texts, tmp_path / name, **OPTIONS, rollback_spikes=2) for name in ("whole", "broken"))
    loop.run(whole)
    with pytest.raises(PowerCut):
        loop.run(broken, watchers=[crash])
    loop.run(broken, resume="auto")
    running.assert_same_end(tmp_path / "broken", tmp_path / "whole")


def test_no_checkpoint_within_the_spike_stays(texts: Path, tmp_path: Path) -> None:
    """What takes the last one, such as an export, should not get it."""
    Garbage((GARBAGE,))(0)
    plan = running.plan(texts, tmp_path / "run", **{**OPTIONS, "eval_every": 0}, rollback_spikes=2)
    with pytest.raises(PowerCut):
        loop.run(plan, watchers=[CrashedAgain(25)])
    saved = checkpoint_folder.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [entry.step for entry in saved] == [20, 24]


@pytest.mark.parametrize(
    ("spans", "options", "line", "aside"),
    [
        (
            (GARBAGE, range(38 * 4, 45 * 4)),
            {},
            "the one rollback is used up, and the run goes on",
            ["step-000032"],
        ),
        ((range(7 * 4, 14 * 4),), {"checkpoint_every": 9}, "no checkpoint is from before it, and the run goes on", []),
    ],
    ids=["used up", "too early"],
)
def test_without_a_rollback_the_run_goes_on(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    spans: tuple[range, ...], options: dict[str, Any], line: str, aside: list[str],
) -> None:  # fmt: skip
    Garbage(spans, steps=4)(0)
    monkeypatch.setattr(spikes, "DEVIATIONS", 3.0)
    with caplog.at_level(logging.WARNING, "meshwright"):
        summary = loop.run(running.plan(texts, tmp_path / "run", **{**OPTIONS, **options}, rollback_spikes=1))
    assert summary.step == 40 and summary.stopped == "done"
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == len(spans) and line in lines[-1]
    steps = [row["step"] for row in running.metrics(tmp_path / "run") if "kind" not in row]
    assert steps == list(range(1, 41))
    before = tmp_path / "run" / "before-spike"
    paths = checkpoint_folder.list_newest_first(before)
    assert [path.name for path in paths] == aside
    for path in paths:
        assert lines[-1].endswith(f" {path} is from before it, and stays")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        assert loop.run(running.plan(texts, tmp_path / "again", **OPTIONS), resume=str(path)).stopped == "done"


def test_what_is_from_before_a_spike_stays_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With links or copies. What is there already goes once the new one is whole; a full disk leaves nothing new."""
    paths = [tmp_path / "checkpoints" / f"step-00000{step}" for step in (1, 2, 3)]
    for path in paths:
        path.mkdir(parents=True)
        (path / "shard").write_text(path.name)
    calls: list[int] = []
    monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            checkpoint_folder.keep_aside(paths[1], lambda: None)
    before = tmp_path / "before-spike"
    assert not list(before.iterdir())
    target = checkpoint_folder.keep_aside(paths[1], lambda: calls.append(1))
    assert target == before / "step-000002" and (target / "shard").read_text() == "step-000002" and len(calls) == 1
    monkeypatch.undo()
    (before / ".saving-step-000009").mkdir()  # of a process that was killed
    for path in (paths[2], paths[2], paths[0]):
        target = checkpoint_folder.keep_aside(path, lambda: None)
        assert [entry.name for entry in before.iterdir()] == [path.name] and (target / "shard").samefile(path / "shard")


def test_a_row_of_bad_steps_goes_back_too_and_ends_the_run_when_nothing_is_left(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is no number, by the place in the data; two in a row are skipped."""
    real, begin, places = trainer.train_step, trainer.Trainer._begin_step, [0]
    bad = (21, 25, 26, 27, 33, 34, 35)

    def begun(self: Any, *arguments: Any) -> None:
        places[0] = self.state.progress.cursor // 4 + 1
        begin(self, *arguments)

    def disturbed(engine: Any, *arguments: Any, **options: Any) -> Any:
        factor = math.nan if places[0] in bad else 1.0
        hook = engine.model.embed.weight.register_hook(lambda gradient: gradient * factor)
        try:
            return real(engine, *arguments, **options)
        finally:
            hook.remove()

    monkeypatch.setattr(trainer, "train_step", disturbed)
    monkeypatch.setattr(trainer.Trainer, "_begin_step", begun)
    with pytest.raises(NonFiniteLoss, match=r"step 32: the gradient norm is nan, as were 2 before it .*step-000028"):
        loop.run(running.plan(texts, tmp_path / "run", **OPTIONS, skip_nonfinite=2, rollback_spikes=1))
    rows = running.metrics(tmp_path / "run")
    [rollback] = [row for row in rows if row.get("kind") == "rollback"]
    assert (rollback["begun"], rollback["ended"], rollback["step"]) == (25, 27, 25)
    summary = loop.run(running.plan(texts, tmp_path / "two", **OPTIONS, skip_nonfinite=2, rollback_spikes=2))
    assert summary.step == 40


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"rollback_spikes": -1}, "recipe.rollback_spikes=-1 must be 0 or more"),
        ({"epochs": 2}, "skips rows, which recipe.epochs=2 counts: give recipe.steps or recipe.tokens"),
        ({"checkpoint_every": 0}, "needs a checkpoint from 5 steps ago.* take recipe.checkpoint_every=5 recipe.keep_l"),
        ({"keep_last": 1}, "needs a checkpoint from 5 steps ago.* take recipe.checkpoint_every=100 recipe.keep_last=2"),
        ({"checkpoint_every": 3, "skip_nonfinite": 7}, "needs a checkpoint from 8 steps ago"),
    ],
)
def test_what_cannot_go_back_is_refused(recipe: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Recipe(**{"rollback_spikes": 2, **recipe})
