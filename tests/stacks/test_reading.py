"""Configurations as people write them: what is read, refused with key and line, and advised."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec.errors import PlanError

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
    assert answer.best.peak_bytes < answer.best.usable_bytes


def test_the_sequence_may_come_from_the_caller(tmp_path: Path) -> None:
    batch = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2'
    text = f'{{{batch}, "zero_optimization": {{"stage": 3}}, "bf16": {{"enabled": true}}}}'
    path = write(tmp_path, "d.json", text)
    with pytest.raises(PlanError, match="the length of sequences is not said"):
        mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8")
    found = mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8", recipe={"sequence": 4096})
    assert (found.plan.layout.zero, found.plan.layout.micro_batch) == (3, 2)
