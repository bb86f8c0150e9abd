"""A rank that dies, hangs or fails ends all ranks within the bound, with one line from one of them."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planfile import read
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog
from meshwright.verbs.main import main
from tests.verbs import toy
from tests.verbs.faults import ClosedStdout, Garbage, In, Slow, SlowToEnd
from tests.verbs.launched import Ended, launch, new_store

ROOT = Path(__file__).resolve().parents[2]

HANG_S = 4
"""Far above a step, also on a machine that does other things."""
CALL = r"last collective \w+ on \w+"


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
    assert ended.seconds < 25, "before a launcher would kill (30 s); how long it takes depends on the machine"
    saved = checkpoint.find_latest(run / "checkpoints")
    assert saved is not None and saved.name == "step-000003"
    checkpoint.read_values(saved)
    return ended


@pytest.mark.long
def test_a_rank_that_is_killed(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "die", world=3)
    assert ended.codes == [1, -signal.SIGKILL, 1]
    died = (
        r"rank 1 died without a message \(killed\?\) in step 5, \w+, "
        + CALL
        + r" of rank [02]; its own last beat was at"
    )
    assert re.search(died, ended.line)


@pytest.mark.long
def test_a_rank_that_is_stopped(texts: Path, tmp_path: Path) -> None:
    """Even the first rank, which reads the others' beats, and cannot hear SIGTERM: its neighbours kill it."""
    ended = disturbed(texts, tmp_path, "stop", bad=0)
    assert ended.codes == [-signal.SIGKILL, 1]
    assert re.search(rf"rank 0 has been silent for [{HANG_S}-9] s in step 5, stopped or cut off; its last", ended.line)


@pytest.mark.long
def test_a_rank_that_stands_still(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "hang")
    assert ended.codes == [1, 1]
    still = (
        rf"rank 1 has made no progress for [{HANG_S}-9] s at step 5, forward, {CALL} \(drill/faults.py:\d+ in hang\)"
    )
    assert re.search(still, ended.line)


def test_an_error_that_nobody_foresaw(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "raise_error")
    assert ended.codes == [1, 1]
    failed = rf"rank 1 failed at step 5, forward, {CALL}: ZeroDivisionError: a fault of this machine \(run with --debug"
    assert re.search(failed, ended.line)


def test_a_loss_that_is_no_number(texts: Path, tmp_path: Path) -> None:
    ended = disturbed(texts, tmp_path, "make_loss_nan")
    assert ended.codes == [2, 2]
    assert re.search(rf"step 5 \(rank 1, forward, {CALL}\): the loss is nan; the last good checkpoint is", ended.line)


def test_a_cluster_that_wants_its_machine_back(texts: Path, tmp_path: Path) -> None:
    """SIGTERM to one rank reaches all: they save, and end in good order."""
    run = tmp_path / "run"
    ended = launch(2, words(texts, run, "layout.dp_shard=2"), tmp_path, fault=In(5, "terminate"))
    assert ended.codes == [0, 0] and not ended.errors
    assert str(checkpoint.find_latest(run / "checkpoints")).endswith("step-000005")


def test_an_output_that_nobody_reads(texts: Path, tmp_path: Path) -> None:
    """The others are not told that the first rank is silent: it says why it ends."""
    ended = launch(2, words(texts, tmp_path / "run", "layout.dp_shard=2"), tmp_path, fault=ClosedStdout())
    assert ended.codes == [141, 141]
    assert ended.line == "meshwright: rank 0 ended: nothing reads its stdout any more (a closed pipe)"


@pytest.mark.long
def test_who_keeps_the_store_goes_last(texts: Path, tmp_path: Path) -> None:
    """Without torchrun, the first rank hosts the store: another one that ends slowly has not failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    asked = words(texts, tmp_path / "run", "layout.dp_shard=2", "recipe.steps=2")
    by_hand = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": ""}
    ended = launch(2, asked, tmp_path, fault=SlowToEnd(2.0), **by_hand)
    assert ended.codes == [0, 0] and not ended.errors


@pytest.mark.long
def test_a_restart_with_fewer_ranks_goes_on(texts: Path, tmp_path: Path) -> None:
    """In the same store, as torchrun has it; the loss curve is that of a run on one device which nobody killed."""
    run, store = tmp_path / "run", new_store()
    asked = words(texts, run, "layout.dp_shard=auto", "recipe.steps=8", "resume=auto")
    ended = launch(4, asked, tmp_path, fault=In(6, "die", 3), store=store)
    assert ended.codes == [1, 1, 1, -signal.SIGKILL] and "resume=auto goes on" in ended.line
    assert read(run / "plan.yaml").layout.dp_shard == 4
    again = launch(2, asked, tmp_path, store=store)
    assert again.codes == [0, 0] and not again.errors
    assert read(run / "plan.yaml").layout.dp_shard == 2
    assert main(words(texts, tmp_path / "whole", "recipe.steps=8", "layout.zero=0")) == 0
    resumed, right = (losses(folder) for folder in (run, tmp_path / "whole"))
    assert len(right) == 8 and resumed == pytest.approx(right, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "pp=2"])
def test_a_rank_that_is_slow_is_named_and_the_run_goes_on(texts: Path, tmp_path: Path, layout: str) -> None:
    """50 ms more in each forward pass. A stage of two is not named: they do unequal work.

    That noise names nobody is simulated (tests/parallel/test_slow_ranks.py). Here it is whatever else the machine does.
    """
    run = tmp_path / "run"
    asked = ["recipe.steps=60", f"layout.{layout}", "layout.micro_batch=2"]
    ended = launch(2, words(texts, run, *asked, "layout.zero=0"), tmp_path, fault=Slow(0.05))
    assert ended.codes == [0, 0], ended.errors
    records = [row for row in MetricsLog.read(run / "metrics.jsonl") if row.get("kind") == "slow rank"]
    if layout == "pp=2":
        assert not ended.errors and not records
        return
    assert re.fullmatch(
        r"rank 1 is slow: its steps take \d+\.\d times the median's work \(\d+ ms against \d+ ms\) for \d+ steps; all "
        r"ranks wait for it\n",
        ended.errors,
    )
    [record] = records
    assert record["rank"] == 1 and record["steps"] >= 30
    assert record["work_s"] - record["median_s"] > 0.04


@pytest.mark.long
def test_all_ranks_go_back_before_a_spike_of_the_loss(texts: Path, tmp_path: Path) -> None:
    """With the weights sharded and saves in the background; the curve is that of one device."""
    garbage = Garbage((range(25 * 4, 32 * 4),))
    asked = ["recipe.steps=40", "recipe.checkpoint_every=4", "recipe.keep_last=3", "recipe.rollback_spikes=1"]
    run, alone = tmp_path / "run", tmp_path / "alone"
    # No rank hangs here, and a busy machine may hold one up for some seconds.
    patient = [*words(texts, run, *asked, "layout.dp_shard=2", "layout.zero=3"), "--hang-after=60"]
    ended = launch(2, patient, tmp_path, fault=garbage)
    assert ended.codes == [0, 0], ended.errors
    line = "since step 26: back to step-000024, and 24 rows are skipped (rollback 1 of at most 1)\n"
    assert ended.errors.count("\n") == 1 and ended.errors.endswith(line)
    launch(1, words(texts, alone, *asked, "layout.zero=0"), tmp_path / "one", fault=garbage)
    rolled_back = [
        [row for row in MetricsLog.read(folder / "metrics.jsonl") if row.get("kind") == "rollback"]
        for folder in (run, alone)
    ]
    assert rolled_back[0] == rolled_back[1] and len(rolled_back[0]) == 1
    assert len(losses(alone)) == 40 and losses(run) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_torchrun_restarts_what_was_killed(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    fault = ["-m", "meshwright.verbs.drill.faults", "kill", "5", "1", str(tmp_path / "mark")]
    asked = words(texts, run, "layout.dp_shard=2", "recipe.steps=8", "resume=auto")
    ended = subprocess.run(
        [*torchrun, *fault, *asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("meshwright: rank 1 died without a message") == 1 and "Traceback" not in ended.stderr
    assert len(losses(run)) == 8


def losses(run: Path) -> list[float]:
    """Return the loss of every step, once each."""
    rows = [row for row in MetricsLog.read(run / "metrics.jsonl") if "kind" not in row]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    return [row["loss"] for row in rows]
