"""Errors on several processes: one line from one rank, and exit code 2 of all."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from meshwright.interface.process import launch as launching
from meshwright.interface.process.environment import TASK_COUNTS
from meshwright.spec.errors import RunError
from meshwright.verbs.main import main
from tests.verbs import toy
from tests.verbs.launched import launch


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


def refused(words: Sequence[str] | Sequence[Sequence[str]], folder: Path, world: int = 2, **changes: str) -> str:
    ended = launch(world, words, folder, **changes)
    assert ended.codes == [2] * world, ended.errors
    return ended.line


def test_a_world_that_is_no_product_of_the_layout(texts: Path, tmp_path: Path) -> None:
    line = refused(toy.train(texts, tmp_path / "run", "layout.dp_shard=2"), tmp_path, world=3)
    assert "dp_shard=2 x cp=1 x tp=1 x pp=1 = 2 ranks and 3 were started: start 2 processes" in line
    assert "no layout of 3 processes is legal for this plan, one of 2 or 4 is" in line
    assert not (tmp_path / "run").exists()


def test_a_degree_that_does_not_divide(texts: Path, tmp_path: Path) -> None:
    line = refused(toy.train(texts, tmp_path / "run", "model.heads=3", "model.hidden=48", "layout.tp=2"), tmp_path)
    assert "layout.tp=2 does not divide the 3 attention heads: take layout.tp=1; " in line
    assert "; legal with 2 processes: layout.dp_shard=2 layout.tp=1, or layout." in line


def test_ranks_with_different_plans(texts: Path, tmp_path: Path) -> None:
    each = [toy.train(texts, tmp_path / "run", "layout.dp_shard=2", f"recipe.learning_rate={r}e-3") for r in (1, 2)]
    line = refused(each, tmp_path)
    assert "rank 0 and rank 1 disagree about plans or versions" in line
    assert "'recipe.learning_rate=0.001' and 'recipe.learning_rate=0.002'. Start every rank with the same" in line


def test_a_mistake_on_the_command_line_of_one_rank(texts: Path, tmp_path: Path) -> None:
    right = toy.train(texts, tmp_path / "run", "layout.dp_shard=2")
    line = refused([right, [*right, "--frob"]], tmp_path)
    assert "--frob" in line and line.endswith("see meshwright train --help")


def test_a_checkpoint_of_another_model_or_without_a_shard(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(toy.train(texts, run, "recipe.steps=2")) == 0
    other = toy.train(texts, run, "layout.dp_shard=2", "model.ffn=48", "resume=auto")
    assert "is of another model: 'model." in refused(other, tmp_path)
    [shard] = (run / "checkpoints" / "step-000002").glob("*.safetensors")
    shutil.move(shard, tmp_path / "elsewhere")
    line = refused([*other, "model.ffn=64", f"resume={run / 'checkpoints' / 'step-000002'}"], tmp_path)
    assert f"{shard.name} is missing" in line


def test_a_port_in_use(texts: Path, tmp_path: Path) -> None:
    """The first rank hosts the store. A torchrun finds a port itself."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = toy.train(texts, tmp_path / "run", "layout.dp_shard=2")
        ended = launch(2, words, tmp_path, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="")
    assert ended.codes[0] == 2
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in ended.line and "take another MASTER_PORT" in ended.line


def test_a_port_whose_owner_accepts_and_never_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library alone would wait forever, deaf to SIGTERM."""
    monkeypatch.setattr(launching, "REACH_S", 1.0)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = str(mute.getsockname()[1])
        changes = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(launching.Unreachable, match=rf"rank 1 cannot reach 127.0.0.1:{port}: no answer within 1 s"),
            launching.joined(),
        ):
            pass


def test_a_backend_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(RunError, match="built without gloo, which 2 processes need"), launching.joined():
        pass


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    with pytest.raises(RunError, match="has no GPU: it has 2; take --nproc_per_node 2"), launching.joined():
        pass


def test_started_by_hand_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match="start with torchrun"), launching.joined():
        pass


@pytest.mark.parametrize(("name", "launcher"), TASK_COUNTS.items())
def test_processes_without_numbers_are_refused(
    name: str, launcher: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each would train alone, into the same folder."""
    monkeypatch.setenv(name, "2")
    assert main(toy.train(texts, tmp_path / "run")) == 2
    assert f"{launcher} started 2 processes without RANK and WORLD_SIZE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
