"""A rank that dies, hangs or fails ends all ranks within the bound, with one line from one of them."""

import re
import signal
from pathlib import Path

import pytest

from meshwright.train import checkpoint
from tests.cli import toy
from tests.cli.faults import In
from tests.cli.launched import Ended, launch

HANG_S = 4
"""Far above a step, also on a machine that does other things."""
CALL = r"last collective \w+ over \w+"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


def words(texts: Path, run: Path, *changes: str) -> list[str]:
    changes = ("recipe.checkpoint_every=3", "recipe.eval_every=0", "layout.zero=1", *changes)
    return [*toy.train(texts, run, *changes), f"--hang-after={HANG_S}"]


def disturbed(texts: Path, tmp_path: Path, act: str, bad: int = 1, world: int = 2) -> Ended:
    """A run whose rank `bad` is disturbed in step 5; the checkpoint of step 3 must come out of it whole."""
    run = tmp_path / "run"
    ended = launch(
        world, words(texts, run, f"layout.dp_shard={world}", "recipe.global_batch=6"), tmp_path, fault=In(5, act, bad)
    )
    assert ended.seconds < 10
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None and saved.name == "step-000003"
    checkpoint.values(saved)
    return ended


def test_a_rank_that_is_killed(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "die", world=3)
    assert ended.codes == [1, -signal.SIGKILL, 1]
    died = (
        r"rank 1 died without a word \(killed\?\) in step 5, \w+, " + CALL + r" of rank [02]; its own last beat was at"
    )
    assert re.search(died, ended.line)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_is_stopped(texts: Path, tmp_path: Path, bad: int) -> None:
    """Also the one that reads the others' beats, and one that hears no SIGTERM: its neighbours kill it."""
    ended = disturbed(texts, tmp_path, "stop", bad)
    assert ended.codes[bad] == -signal.SIGKILL and ended.codes[1 - bad] == 1
    assert f"rank {bad} has been silent for {HANG_S} s in step 5" in ended.line


def test_a_rank_that_stands_still(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "sleep")
    assert ended.codes == [1, 1]
    still = rf"rank 1 has stood still for {HANG_S} s at step 5, forward, {CALL} \(cli/faults.py:\d+ in sleep\)"
    assert re.search(still, ended.line)


def test_an_error_that_nobody_foresaw(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "break_down")
    assert ended.codes == [1, 1]
    failed = rf"rank 1 failed at step 5, forward, {CALL}: ZeroDivisionError: a fault of this machine \(run with --debug"
    assert re.search(failed, ended.line)


def test_a_loss_that_is_no_number(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "lose_number")
    assert ended.codes == [2, 2]
    assert re.search(rf"step 5 \(rank 1, forward, {CALL}\): the loss is nan; the last good checkpoint is", ended.line)
