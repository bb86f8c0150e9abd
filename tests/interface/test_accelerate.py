"""`accelerate launch`: its processes become ranks as those of torchrun, and ignored settings are named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.interface.process.environment import ACCELERATE_MARK, number_mpi_ranks, unread_accelerate_settings
from tests.training.test_tuning import write

ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    "tune", "model=./hf", "data=chat.jsonl", "recipe.sequence=64", "recipe.global_batch=4", "recipe.steps=3",
    "recipe.learning_rate=1e-2", "data.validation=0", "--no-dry-run",
)  # fmt: skip


@pytest.mark.slow
def test_two_processes_of_accelerate_train_as_one(tmp_path: Path) -> None:
    """Loss and norm of every step equal those of one process; each process reads its own rows."""
    pytest.importorskip("accelerate")
    write(tmp_path)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    errors = ""
    for run, how in (("alone", []), ("two", launcher)):
        words = [sys.executable, *how, "-m", "meshwright", *WORDS, f"run={run}"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        errors = done.stderr
    assert "note: tuning defaults: recipe.weight_decay=0 layout.dp_shard=auto layout.zero=1" in errors
    layout_of_two = planfile.read(tmp_path / "two" / "plan.yaml").layout
    assert (layout_of_two.dp_shard, layout_of_two.zero) == (2, 1)
    alone, two = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("alone", "two")
    )
    assert len(alone) == len(two) == 3
    for left, other in zip(alone, two, strict=True):
        assert other["loss"] == pytest.approx(left["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-4)


def test_ranks_that_mpirun_numbered_are_those_of_torchrun() -> None:
    """accelerate's launcher for CPUs numbers ranks by OpenMPI or Intel MPI. Without accelerate, nothing is read."""
    openmpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    intel = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for variables in (openmpi, intel):
        environ = {**variables, ACCELERATE_MARK: "no"}
        number_mpi_ranks(environ)
        assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("1", "2", "1")
        before = dict(variables)
        number_mpi_ranks(variables)
        assert variables == before
    launched = {**openmpi, ACCELERATE_MARK: "no", "RANK": "0", "WORLD_SIZE": "4"}
    number_mpi_ranks(launched)
    assert launched["RANK"] == "0" and launched["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {ACCELERATE_MARK: "bf16"},
            "--mixed_precision bf16 of accelerate is not read: the plan has recipe.precision=fp32",
        ),
        (
            {ACCELERATE_MARK: "no", "ACCELERATE_USE_FSDP": "true"},
            "FSDP settings of accelerate are not read: the keys of layout say how ranks share the model",
        ),
        (
            {ACCELERATE_MARK: "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            "--dynamo_backend inductor of accelerate is not read: layout.compile says what is compiled",
        ),
    ],
)
def test_what_is_not_read_is_said(environ: dict[str, str], sentence: str) -> None:
    plan = planfile.read(None, ["recipe.precision=fp32"])
    assert list(unread_accelerate_settings({"WORLD_SIZE": "2", **environ}, plan)) == [sentence]
    environ.pop(ACCELERATE_MARK)
    assert not list(unread_accelerate_settings({"WORLD_SIZE": "2", **environ}, plan))


def test_one_process_in_place_of_several_is_said() -> None:
    """`accelerate launch --cpu --num_processes 2` starts one, and sets an address that nobody needs."""
    plan = planfile.read(None, [])
    [note] = unread_accelerate_settings(
        {ACCELERATE_MARK: "no", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"}, plan
    )
    assert note.startswith("accelerate launch started one process, whatever --num_processes says")
    assert not list(unread_accelerate_settings({ACCELERATE_MARK: "no", "ACCELERATE_USE_CPU": "True"}, plan))
    assert not list(unread_accelerate_settings({"MASTER_ADDR": "127.0.0.1"}, plan))
