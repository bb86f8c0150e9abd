"""launch.sh and launch.sbatch, run by bash with launchers that only say how they were called."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.stacks.config_files import file_texts
from meshwright.stacks.config_reading import read
from meshwright.stacks.trainer_table import SOFTWARE

LAUNCHERS = ("torchrun", "accelerate", "trl", "axolotl", "python3")
SAYS = '#!/bin/bash\necho "$(basename "$0") $*"\n'
SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nSLURM_NODEID=1 exec "$@"\n'
OPTIONS = {
    "torchtitan": "--config planned", "megatron-lm": "--num-layers 32", "accelerate": "accelerate.yaml",
    "deepspeed": "run_clm.json", "trl": "sft.yaml", "axolotl": "axolotl.yaml", "nanotron": "nanotron.yaml",
    "nemo": "nemo_plan.py", "maxtext": "maxtext.yml",
}  # fmt: skip
"""What the launcher has to be told."""


def written(word: str, folder: Path) -> Path:
    """The files of two nodes, in a folder with a blank in its name, and the launchers beside it."""
    zero: Any = max(SOFTWARE[word].offered["zero"])
    layout = Layout(dp_shard=16, zero=zero, micro_batch=1)
    plan = Plan(
        model=presets.model("llama-3.1-8b"), recipe=Recipe(precision="bf16", sequence=4096, global_batch=64),
        layout=layout, cluster=presets.cluster("h100x8", 2),
    )  # fmt: skip
    files, programs = folder / "a plan", folder / "bin"
    files.mkdir()
    programs.mkdir()
    for name, text in file_texts(SOFTWARE[word], plan).items():
        (files / name).write_text(text, encoding="utf-8")
    message = {**dict.fromkeys(LAUNCHERS, SAYS), "srun": SRUN, "scontrol": "#!/bin/bash\necho first\necho second\n"}
    for name, text in message.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    return files


def run(files: Path, script: str, **names: str) -> subprocess.CompletedProcess[str]:
    """With no other variables than these: no PYTHONPATH, no HOME. An empty one is as if it were not set."""
    path = f"{files.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(files / script)], env={"PATH": path, "MEGATRON": "/source", **names}, cwd=files.parent,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("word", SOFTWARE)
def test_launch_sh_runs_in_a_bare_environment(word: str, tmp_path: Path) -> None:
    outcome = run(written(word, tmp_path), "launch.sh", NODE_RANK="1", HEAD="first")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert OPTIONS[word] in outcome.stdout
    if word != "maxtext":
        assert "first" in outcome.stdout and "29500" in outcome.stdout


@pytest.mark.parametrize("word", SOFTWARE)
def test_the_folder_says_how_many_nodes_it_is_for(word: str, tmp_path: Path) -> None:
    """Own files of most trainers do not; the launch script does."""
    assert read(str(written(word, tmp_path)), word).nodes(8) == 2


def test_launch_sh_asks_for_the_number_of_its_node(tmp_path: Path) -> None:
    outcome = run(written("megatron-lm", tmp_path), "launch.sh", HEAD="first")
    assert outcome.returncode != 0 and "NODE_RANK: number of this node" in outcome.stderr


def test_launch_sbatch_starts_launch_sh_of_the_folder_it_was_submitted_in(tmp_path: Path) -> None:
    files = written("megatron-lm", tmp_path)
    outcome = run(files, "launch.sbatch", SLURM_SUBMIT_DIR=str(files), SLURM_JOB_NODELIST="first,second")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert "--node_rank 1 --master_addr first" in outcome.stdout and "--num-layers 32" in outcome.stdout
    elsewhere = run(files, "launch.sbatch", SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_NODELIST="first,second")
    assert elsewhere.returncode == 1 and "cd to its folder, then sbatch" in elsewhere.stderr


def test_the_program_of_megatron_is_taken_from_its_own_folder(tmp_path: Path) -> None:
    """It imports modules beside it, and a job of SLURM starts in the folder of the files."""
    files = written("megatron-lm", tmp_path)
    assert " /source/pretrain_gpt.py " in run(files, "launch.sh", NODE_RANK="0", HEAD="first").stdout
    none = run(files, "launch.sh", NODE_RANK="0", HEAD="first", MEGATRON="")
    assert none.returncode != 0 and "MEGATRON: folder of pretrain_gpt.py" in none.stderr
