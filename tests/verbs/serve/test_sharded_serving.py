"""An engine over processes of this machine: start, answers, and the end of all when one fails."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.formats.hub import export_folder
from meshwright.observe.ranks import on_ranks
from meshwright.spec.errors import ArgumentError, IllegalLayout, RunError
from tests.model.shrunk import model

PROMPTS = [[3, 14, 15, 9], [2, 6], [5] * 20]
OPTIONS = mw.RequestOptions(max_new_tokens=6)


def export(folder: Path, name: str) -> Path:
    source = model(name)
    tensors = [(key, tensor.detach()) for key, tensor in source.state_dict().items()]
    export_folder(folder, model_tensors=tensors, shape=source.shape, tokenizer=None, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("sharded") / "mixtral", "mixtral-8x7b")


def answers(engine: object) -> list[list[int]]:
    assert engine is not None
    asked = [engine.add(prompt, OPTIONS) for prompt in PROMPTS]  # type: ignore[attr-defined]  # an engine
    engine.run(asked)  # type: ignore[attr-defined]  # an engine
    return [request.answers[0].ids for request in asked]


@pytest.mark.long
def test_processes_are_started_and_one_that_dies_ends_the_engine(folder: Path) -> None:
    right, threads = answers(mw.load(folder).engine()), torch.get_num_threads()
    with mw.sharded_engine(folder, tp=2, ep=2) as engine:
        assert answers(engine) == right
        assert len(active_children()) == 1
    assert not active_children() and not dist.is_initialized() and torch.get_num_threads() == threads
    began = time.monotonic()
    with (
        pytest.raises(RunError, match="another one of the 2 ranks that serve this model has ended"),
        mw.sharded_engine(folder, tp=2) as engine,
    ):
        assert answers(engine) == right
        (other,) = active_children()
        other.kill()
        other.join()
        answers(engine)
    assert time.monotonic() - began < 60
    assert not active_children() and not dist.is_initialized()


def under_a_launcher(folder: Path) -> object:
    with pytest.raises(ArgumentError, match="tp=4: the process group has 2 ranks"), mw.sharded_engine(folder, tp=4):
        pass
    with mw.sharded_engine(folder, tp=2) as engine:
        return None if engine is None else answers(engine)


@pytest.mark.slow
def test_ranks_of_a_launcher_serve_together(folder: Path) -> None:
    assert on_ranks(2, under_a_launcher, folder) == [answers(mw.load(folder).engine()), None]


def test_refusals_come_before_a_process_is_started(folder: Path, tmp_path: Path) -> None:
    for tp, ep, sentence in (
        (3, 1, "tp=3 does not divide the 4 attention heads: take tp="),
        (1, 1, "tp must be at least 2"),
        (4, 3, "ep=3"),
    ):
        with pytest.raises((ArgumentError, IllegalLayout), match=sentence), mw.sharded_engine(folder, tp=tp, ep=ep):
            pass
    mw.quantize(export(tmp_path / "llama", "llama-3.1-8b"), "int8", tmp_path / "int8", quality=False)
    with pytest.raises(ArgumentError, match="take tp=1"), mw.sharded_engine(tmp_path / "int8", tp=2):
        pass
    assert not active_children()


SCRIPT = """
import sys, time
from multiprocessing import active_children
import meshwright as mw
with mw.sharded_engine(sys.argv[1], tp=2) as engine:
    engine.run([engine.add([1, 2], mw.RequestOptions(max_new_tokens=2))])
    print(active_children()[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_others_end_when_the_first_one_dies(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        os.kill(other, 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        end = time.monotonic() + 60
        while Path(f"/proc/{other}").exists():
            assert time.monotonic() < end, "it waits for somebody who is gone"
            time.sleep(0.05)
