"""Configurations as people write them: what is read, refused with key and line, and advised."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.config_reading import read
from meshwright.stacks.config_writing import texts
from meshwright.stacks.trainer_table import SOFTWARE
from tests.api.test_markup import parsed

EIGHT = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
"""The facts of torchtitan's own 8B file (v0.2.2), with tensor parallelism."""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_those_of_the_software(tmp_path: Path) -> None:
    found = mw.plan_from(write(tmp_path, "a.toml", EIGHT), cluster="h100x8", nodes=2).plan
    layout = found.layout
    assert (found.model.name, found.recipe.sequence, found.recipe.global_batch) == ("llama-3.1-8b", 8192, 8)
    assert (layout.dp_shard, layout.tp, layout.sp, layout.zero, layout.recompute) == (8, 2, True, 3, "selective")


def test_8_bit_products_are_counted(tmp_path: Path) -> None:
    narrow = EIGHT.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
    wide_s, narrow_s = (
        mw.plan_from(write(tmp_path, "a.toml", text), cluster="h100x8").given.step_seconds for text in (EIGHT, narrow)
    )
    assert narrow_s < wide_s


def test_a_value_that_is_not_understood_has_its_line(tmp_path: Path) -> None:
    text = EIGHT.replace("[activation", 'pipeline_parallel_schedule = "Zigzag"\n[activation')
    with pytest.raises(
        PlanError, match=r"a.toml, line 10: .*pipeline_parallel_schedule=zigzag is not understood: take"
    ):
        mw.plan_from(write(tmp_path, "a.toml", text), cluster="h100x8")


def test_what_matters_and_is_not_counted_is_refused(tmp_path: Path) -> None:
    zero = '{"stage": 2, "offload_optimizer": {"device": "cpu"}}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {zero}}}'
    with pytest.raises(PlanError, match="keeps optimizer states in host memory"):
        mw.plan_from(write(tmp_path, "d.json", text), model="llama-3.1-8b", cluster="h100x8")


def test_what_does_not_fit_is_mended_in_the_words_of_the_software(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.toml", EIGHT.replace("size = 1", "size = 8")), cluster="h100x8")
    assert not answer.fits
    assert any("training.local_batch_size" in answer.options(one.prediction.plan) for one in answer.fixes)
    assert answer.best is not None
    shown = parsed(answer._repr_html_()).text
    assert shown.index("Does not fit") < shown.index("training.local_batch_size")
    assert answer.options(answer.best.plan) in shown
    assert answer.best.peak_bytes < answer.best.usable_bytes


def test_the_sequence_may_come_from_the_caller(tmp_path: Path) -> None:
    batch = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2'
    text = f'{{{batch}, "zero_optimization": {{"stage": 3}}, "bf16": {{"enabled": true}}}}'
    path = write(tmp_path, "d.json", text)
    with pytest.raises(PlanError, match="the length of sequences is not said"):
        mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8")
    found = mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8", recipe={"sequence": 4096})
    assert (found.plan.layout.zero, found.plan.layout.micro_batch) == (3, 2)


FLOAT8 = """
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.llama3 import model_registry


def llama3_8b():
    config = Trainer.Config()
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config()])
    config.training.local_batch_size = 1
    config.training.seq_len = 8192
    return config
"""


def test_8_bit_products_of_a_python_configuration_are_counted(tmp_path: Path) -> None:
    wide = FLOAT8.replace(", converters=[Float8LinearConverter.Config()]", "")
    wide_s, narrow_s = (
        mw.plan_from(write(tmp_path, "a.py", text), cluster="h100x8").given.step_seconds for text in (wide, FLOAT8)
    )
    assert narrow_s < wide_s
    with pytest.raises(PlanError, match="MXFP8"):
        mw.plan_from(write(tmp_path, "a.py", FLOAT8.replace("Float8Linear", "MXFP8Linear")), cluster="h100x8")


def test_offloading_of_torchtitan_is_refused_where_it_is_on(tmp_path: Path) -> None:
    asked = EIGHT.replace("seq_len = 8192", "seq_len = 8192\nenable_cpu_offload = true")
    with pytest.raises(PlanError, match="keeps parameters and optimizer in host memory"):
        mw.plan_from(write(tmp_path, "a.toml", asked), cluster="h100x8")
    off = write(tmp_path, "a.toml", asked.replace("offload = true", "offload = false"))
    assert mw.plan_from(off, cluster="h100x8").given.step_seconds > 0


@pytest.mark.parametrize("said", ["mixed_precision: fp8", "mixed_precision: bf16\nfp8_config:\n  backend: TE"])
def test_8_bit_products_of_accelerate_are_refused(said: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", f"distributed_type: FSDP\nnum_processes: 8\n{said}\n")
    recipe = {"sequence": 4096, "global_batch": 64}
    with pytest.raises(PlanError, match="8 bits"):
        mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8", recipe=recipe)


def test_axolotl_that_trains_adapters_is_refused(tmp_path: Path) -> None:
    text = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 1\nadapter: lora\n"
    with pytest.raises(PlanError, match="line 4: adapter=lora trains adapters instead of all weights"):
        mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")


def test_an_optimizer_with_other_states_is_refused(tmp_path: Path) -> None:
    text = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 4096\noptim: adamw_bnb_8bit\npacking: true\n"
    with pytest.raises(PlanError, match="adamw_bnb_8bit is not counted: take one of adamw_torch_fused"):
        mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")


@pytest.mark.parametrize(
    ("file", "arguments", "precision"),
    [
        ("mixed_precision: 'no'", None, "fp32"), ("mixed_precision: no", None, "fp32"), ("", None, "fp32"),
        ("mixed_precision: bf16", None, "bf16"), ("mixed_precision: fp16", None, "fp16"),
        ("mixed_precision: bf16", "{}", "bf16"), ("mixed_precision: 'no'", '{"bf16": true}', "bf16"),
        ("mixed_precision: bf16", '{"fp16": true}', "fp16"), ("mixed_precision: fp16", '{"bf16": false}', "fp16"),
        ("", '{"bf16": false}', "fp32"),
    ],
)  # fmt: skip
def test_accelerate_decides_the_precision_and_the_trainers_switches_come_first(
    file: str, arguments: str | None, precision: str, tmp_path: Path
) -> None:
    """TrainingArguments put their own word over that of accelerate's file, where a switch is on."""
    write(tmp_path, "accelerate.yaml", f"distributed_type: FSDP\nnum_processes: 8\n{file}\n")
    if arguments is not None:
        write(tmp_path, "run_clm.json", arguments)
    assert read(str(tmp_path), "accelerate").facts["precision"] == precision


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("word", ["accelerate", "trl"])
def test_what_is_written_for_accelerate_says_the_precision(word: str, precision: str, tmp_path: Path) -> None:
    plan = Plan(
        model=presets.model("llama-3.1-8b"), cluster=presets.cluster("h100x8"),
        recipe=Recipe(precision=precision, sequence=4096, global_batch=64),  # type: ignore[arg-type]  # one of its words
        layout=Layout(dp_shard=8, zero=3, micro_batch=1),
    )  # fmt: skip
    for name, text in texts(SOFTWARE[word], plan).items():
        write(tmp_path, name, text)
    again = read(str(tmp_path), word)
    assert again.shape is not None
    assert again.plan(again.shape, plan.cluster, {}).recipe.precision == precision
    alone = read(str(tmp_path / "accelerate.yaml"), word)
    assert alone.facts["precision"] == precision, "its own file alone is enough"
