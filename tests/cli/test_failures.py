"""A rank that dies, hangs or fails ends all ranks within the bound, with one line from one of them."""

import signal
from pathlib import Path

import pytest

from meshwright.train import checkpoint
from tests.cli import toy
from tests.cli.faults import In
from tests.cli.launched import Ended, launch

LAYOUT = ["layout.dp_shard=2", "recipe.checkpoint_every=3", "recipe.eval_every=0", "recipe.steps=500"]
HANG_S = 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


def disturbed(texts: Path, tmp_path: Path, act: str, world: int = 2, **options: int) -> Ended:
    words = [*toy.train(texts, tmp_path / "run", *LAYOUT, f"layout.dp_shard={world}"), f"--hang-after={HANG_S}"]
    return launch(world, words, tmp_path / "told", fault=In(options.get("step", 5), act, options.get("bad", 1)))


def last_step(tmp_path: Path) -> int:
    """Of the newest checkpoint, which must be whole."""
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert path is not None
    checkpoint.values(path)
    assert not [saved.problem for saved in checkpoint.listing(path.parent) if saved.problem]
    return int(path.name.removeprefix("step-"))


def test_a_killed_rank_ends_all(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "die")
    assert ended.codes == [1, -signal.SIGKILL] and ended.seconds < 10
    assert (
        "rank 1 died without a word" in ended.line and "step 5, forward, last collective all_reduce over" in ended.line
    )
    assert last_step(tmp_path) == 3
