"""Scripts of options as people write them: strings over several lines, variables, arithmetic, commands in strings."""

import pytest

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.script_text import SCRIPT, read_shell

LINES = r"""
#!/bin/bash
# don't take --num-layers 1 from here
TP=${TP:-2}; export PP=4
GPUS=8
NODES=2
GBS=$(( 4 * GPUS * $NODES / (TP * PP) ))
options=" \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size ${PP} \
    --bf16 --lr 3.0e-4"
options+=" --global-batch-size $GBS --no-mmap"
UNUSED="--num-layers 96"
run_cmd="python -u pretrain_gpt.py ${options} --num-layers 32"  # it's the command
srun -l \
    --output=log.txt sh -c "${run_cmd}" && echo 'done'
"""
"""In the manner of NVIDIA's examples for SLURM."""


def options(text: str) -> dict[str, object]:
    return {entry.key: entry.value for entry in read_shell(text) if entry.key != SCRIPT}


def test_a_string_over_several_lines_is_followed_to_the_command() -> None:
    assert options(LINES) == {
        "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 4, "--bf16": True, "--lr": 3e-4,
        "--global-batch-size": 8, "--no-mmap": True, "--num-layers": 32, "--output": "log.txt",
    }  # fmt: skip


def test_an_option_in_a_string_has_the_line_where_it_stands() -> None:
    lines = LINES.splitlines()
    for entry in read_shell(LINES):
        assert entry.key == SCRIPT or entry.key in lines[entry.line - 1]
    assert [entry.value for entry in read_shell(LINES) if entry.key == SCRIPT] == ["pretrain_gpt.py"]
    assert {entry.line for entry in read_shell(LINES) if entry.key == "--num-layers"} == {14}


@pytest.mark.parametrize("text", ["x='\n--a 1\n", 'echo "a\n--a 1\n', "echo it's\n--a 1\n"])
def test_an_open_quote_does_not_hide_the_rest(text: str) -> None:
    assert options(text) == {"--a": 1}


PARSED = r"""
while (( "$#" )); do
  case "$1" in
    --gradient_accumulation_steps)
      steps="$2"; shift 2 ;;
    -b|--bsz) bsz="$2"; shift 2 ;;
  esac
done
bsz=${bsz:-4}
export LOAD=${LOAD:-"--load checkpoints/first"}
llamafactory-cli train --per_device_train_batch_size ${bsz} --gradient_accumulation_steps ${steps:-16} ${LOAD}
"""
"""In the manner of DtYXs/Pre-DPO scripts/train_simpo.sh."""


def test_a_script_that_takes_options_has_the_values_that_it_takes_without_any() -> None:
    assert options(PARSED) == {
        "--per_device_train_batch_size": 4, "--gradient_accumulation_steps": 16, "--load": "checkpoints/first",
    }  # fmt: skip


def test_a_line_of_dashes_is_read_at_once() -> None:
    """An expression that can split dashes in two ways takes 2 ** 60 steps to see that no branch begins here."""
    assert options("-" * 60 + "\ntrl sft --learning_rate 1e-4\n")["--learning_rate"] == 1e-4


def test_options_that_a_script_leaves_to_one_that_sources_it() -> None:
    """NVIDIA/Megatron-LM examples/post_training/modelopt/conf/qwen/Qwen3-8B.sh."""
    text = 'NAME=x\nMODEL_ARGS=" \\\n    --num-layers 36 \\\n    --swiglu \\\n    --hidden-size 4096 \\\n"\n'
    assert options(text) == {"--num-layers": 36, "--swiglu": True, "--hidden-size": 4096}
    assert {entry.line for entry in read_shell(text) if entry.key == "--hidden-size"} == {5}
    assert options(f"{text}torchrun pretrain_gpt.py --num-layers 2\n") == {"--num-layers": 2}


def test_what_is_no_number_stays_text() -> None:
    assert options("--a $((1/0)) --b $((x*2)) --c 1\n")["--c"] == 1


def test_variables_that_hold_variables_end() -> None:
    text = "A=xxxxxxxxxx\n" + 40 * 'A="$A$A"\n' + "--a $A\n"
    with pytest.raises(PlanError, match="once its variables are known"):
        read_shell(text)
