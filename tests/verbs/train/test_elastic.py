"""`train --elastic`: nodes that are lost or come back change the layout alone, and the loss curve goes on."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.interface.planning.plan_reading import read_plan
from meshwright.planner.search.ranking import search
from meshwright.planner.step.predict import build_estimator
from meshwright.spec.errors import ArgumentError, IllegalLayout, RunError
from meshwright.store.run_folder import MetricsLog
from meshwright.verbs.main import main
from meshwright.verbs.train.elastic import NodeRange, fit_to_nodes, read_elastic_plan
from tests.verbs import toy
from tests.verbs.launched import launch

ROOT = Path(__file__).resolve().parents[3]
SLOW_STEPS = ["model.hidden=256", "model.heads=4", "model.ffn=1024", "model.layers=4", "recipe.sequence=128"]
SLOW_STEPS += ["recipe.learning_rate=1e-4"]
"""A model whose step takes a tenth of a second and more on a core, and whose roundings do not grow fast."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


def losses(run: Path) -> list[float]:
    """Return the loss of every step, once each."""
    rows = [row for row in MetricsLog.read(run / "metrics.jsonl") if "kind" not in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("text", ["", "4", "0:4", "4:3", "2:", "a:b", "2:4:6", "-1:2"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="MIN:MAX"):
        NodeRange.parse(text)


@pytest.mark.parametrize(
    ("present", "batch", "used", "words"),
    [
        (4, 12, 4, ""),
        (3, 12, 3, "layout.dp_shard=3;"),
        (2, 12, 2, "layout.dp_shard=2;"),
        (3, 8, 2, "layout.dp_shard=2; 1 node beyond that only wait"),
    ],
)
def test_the_nearest_legal_layout_of_the_most_nodes(present: int, batch: int, used: int, words: str) -> None:
    """Without a known device: 8 rows are cut by two ranks, which goes before a pipeline of three."""
    options = {"model": "llama-tiny", "recipe.global_batch": str(batch), "layout.dp_shard": "4", "layout.zero": "1"}
    plan, _ = read_plan([f"{key}={setting}" for key, setting in options.items()], {})
    fitted, number, why = fit_to_nodes(plan, NodeRange(2, 4), present, 1)
    assert (number, fitted.layout.world) == (used, used)
    assert words in why and (not words) == (not why)
    assert replace(fitted, layout=plan.layout) == plan


def test_too_few_nodes_are_named() -> None:
    plan, _ = read_plan(["model=llama-tiny", "layout.dp_shard=4", "layout.zero=1"], {})
    with pytest.raises(RunError, match=r"1 of 4 nodes is there, and --elastic 2:4 needs 2"):
        fit_to_nodes(plan, NodeRange(2, 4), 1, 1)


def test_a_batch_that_nothing_cuts_is_refused() -> None:
    words = ["model=llama-tiny", "model.layers=1", "layout.dp_shard=8", "recipe.global_batch=8", "layout.zero=1"]
    plan, _ = read_plan(words, {})
    with pytest.raises(IllegalLayout, match="no layout of 7 to 7 of them is legal: "):
        fit_to_nodes(plan, NodeRange(7, 8), 7, 1)


def test_on_known_devices_the_planner_chooses_among_all_numbers_of_nodes() -> None:
    """Three nodes of eight: what it takes is as fast as the best of two searches by hand, and fits."""
    words = ["model=llama-3.1-8b", "cluster=h100x8", "cluster.nodes=4", "recipe.global_batch=64", "layout.tp=8"]
    plan, _ = read_plan([*words, "recipe.sequence=4096", "layout.dp_shard=4", "layout.zero=1", "layout.sp=true"], {})
    fitted, used, why = fit_to_nodes(plan, NodeRange(2, 4), 3, 8)
    by_hand = []
    for nodes in (3, 2):
        fewer = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
        by_hand += [prediction.step_s for prediction in search(build_estimator(fewer), fewer, listed=1).best]
    prediction = build_estimator(fitted).predict(fitted)
    assert prediction.fits and fitted.layout.world == 8 * used == fitted.cluster.devices
    assert prediction.step_s <= 1.05 * min(by_hand)
    assert fitted.recipe == plan.recipe and "planned" in why


def test_a_node_beyond_what_can_share_a_batch_stands_by(texts: Path, tmp_path: Path) -> None:
    """Three nodes of one process, four rows: two train, one waits, and all end well with the curve of one device."""
    words = [*toy.train(texts, tmp_path / "run", "layout.dp_shard=auto", "layout.zero=1"), "resume=auto"]
    by_node = {"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ended = launch(3, [*words, "--elastic", "2:4"], tmp_path, **by_node)
    assert ended.codes == [0, 0, 0], ended.errors
    assert "3 of 4 nodes are there: layout.dp_shard=2; 1 node beyond" in ended.errors
    assert planfile.read(tmp_path / "run" / "plan.yaml").layout.dp_shard == 2
    assert main(toy.train(texts, tmp_path / "whole")) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_a_run_that_would_not_resume_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = toy.refused(capsys, *toy.train(texts, tmp_path / "run"), "--elastic", "1:2")
    assert "--elastic 1:2 needs resume=auto" in line


def test_a_run_without_torchrun_is_refused(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing would start the ranks again."""
    line = toy.refused(capsys, *toy.train(texts, tmp_path / "run"), "resume=auto", "--elastic", "1:2")
    assert "--elastic 1:2 needs torchrun --nnodes 1:2" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("elastic", "is_noted"), [("1:1", True), ("1:2", False)])
def test_one_number_of_nodes_is_noted(elastic: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    notes: list[str] = []
    read_elastic_plan(["model=llama-tiny", "resume=auto"], elastic, notes)
    assert any("--elastic 1:1 waits for a lost node and keeps the layout" in note for note in notes) == is_noted


@pytest.mark.slow
def test_four_nodes_three_and_four_again(texts: Path, tmp_path: Path) -> None:
    """torchrun with one agent a node. One is killed with its worker; later another takes its place."""
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = [*SLOW_STEPS, "recipe.steps=60", "recipe.global_batch=12", "recipe.checkpoint_every=5"]
    words = toy.train(texts, run, *changes, "layout.dp_shard=auto", "layout.zero=1", "resume=auto")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    settings = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"

    def start(number: int) -> "subprocess.Popen[bytes]":
        head = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3:4", "--nproc_per_node", "1"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
        host = f"{settings},is_host={'true' if number == 0 else 'false'}"
        program = ["--max-restarts", "3", "--rdzv-conf", host, "-m", "meshwright"]
        log = (tmp_path / f"node{number}.log").open("wb")
        return subprocess.Popen(
            [*head, *meeting, *program, *words, "--elastic", "3:4"], cwd=ROOT, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip

    nodes = [start(number) for number in range(4)]
    try:
        wait_for(run, 12, nodes)
        assert planfile.read(run / "plan.yaml").layout.dp_shard == 4
        lose(nodes[3])
        reached = len(losses(run))
        wait_for(run, reached + 12, nodes[:3])
        assert planfile.read(run / "plan.yaml").layout.dp_shard == 3
        nodes.append(start(4))
        reached = len(losses(run))
        wait_for(run, reached + 12, nodes[:3])
        assert planfile.read(run / "plan.yaml").layout.dp_shard == 4
        codes = [node.wait(240) for node in (*nodes[:3], nodes[4])]
        assert codes == [0, 0, 0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                lose(node)
    assert main(toy.train(texts, tmp_path / "whole", *changes)) == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def lose(node: "subprocess.Popen[bytes]") -> None:
    """Kill an agent and its worker, which has a session of its own, at once."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for process in (node.pid, *map(int, children)):
        os.kill(process, signal.SIGKILL)
    node.wait()


def wait_for(run: Path, steps: int, nodes: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until the run has recorded so many steps."""
    end_s = time.monotonic() + 180
    while time.monotonic() < end_s:
        if (run / "metrics.jsonl").is_file() and len(MetricsLog.read(run / "metrics.jsonl")) >= steps:
            return
        assert all(node.poll() is None for node in nodes), "a node has ended"
        time.sleep(0.2)
    raise AssertionError(f"no {steps} steps within three minutes")
