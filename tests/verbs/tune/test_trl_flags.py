"""`tune --from-trl`: flags of TRL's scripts as keys, by hand and by transformers' own names and reader."""

import dataclasses
from pathlib import Path

import pytest

from meshwright.spec.errors import PlanError
from meshwright.store.run_folder import RunFolder
from meshwright.verbs.main import main
from meshwright.verbs.tune.plan import tuning_plan
from meshwright.verbs.tune.trl_flags import BY_NAME, plan_words
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.verbs.tune.test_tuning import words

LECTURE = (
    "--learning_rate 2e-5 --num_train_epochs 3 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 "
    "--gradient_checkpointing --eval_steps 100"
)
OF_TRL = {
    "model_name_or_path", "dataset_name", "max_length", "max_seq_length", "assistant_only_loss", "use_peft", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora", "load_in_4bit",
    "use_bnb_nested_quant", "load_in_8bit", "beta", "loss_type", "label_smoothing", "packing", "packing_strategy",
    "padding_free", "eval_packing", "dataset_num_proc", "dataset_train_split", "dataset_test_split",
    "attn_implementation", "torch_dtype", "dtype", "lora_task_type", "bnb_4bit_quant_type", "overwrite_output_dir",
}  # fmt: skip
"""Flags of TRL's own SFTConfig, DPOConfig, ModelConfig and ScriptArguments, and one that transformers had before 5."""


def test_the_lectures_flags_are_this_plan(files: Path) -> None:
    read = plan_words(f"trl sft {LECTURE}", processes=4)
    plan, _ = tuning_plan([*words(files), *read], processes=4)
    assert (plan.recipe.learning_rate, plan.recipe.epochs, plan.recipe.eval_every) == (2e-5, 3, 100)
    assert plan.recipe.global_batch == 2 * 8 * 4 and plan.layout.micro_batch == 2
    assert plan.layout.recompute == "full"
    # Neither of these layout keys splits ranks, so that they share the batch by themselves.
    assert plan.layout.dp_shard == 4 and plan.layout.zero == 1


def test_flags_are_those_of_transformers() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = {field.name for field in dataclasses.fields(arguments)}
    assert BY_NAME.keys() - OF_TRL <= theirs


def test_values_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    parsed = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args(
        [*LECTURE.split(), "--output_dir", str(tmp_path), "--bf16", "false"]
    )
    read = dict(word.split("=", 1) for word in plan_words(f"{LECTURE} --bf16=false", 1))
    assert float(read["recipe.learning_rate"]) == parsed.learning_rate
    assert float(read["recipe.epochs"]) == parsed.num_train_epochs
    assert int(read["layout.micro_batch"]) == parsed.per_device_train_batch_size
    assert (read["layout.recompute"] == "full") == parsed.gradient_checkpointing
    assert ("recipe.precision" in read) == parsed.bf16


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--use_peft --lora_r 8 --lora_target_modules q_proj v_proj",
         {"model.lora.rank=8", "model.lora.alpha=32", "model.lora.targets=q,v", "model.lora.dropout=0.05"}),
        ("--lora_r 8 --use_peft true --lora_target_modules all-linear",
         {"model.lora.rank=8", "model.lora.alpha=32", "model.lora.targets=all", "model.lora.dropout=0.05"}),
        ("--use_peft --load_in_4bit --use_bnb_nested_quant",
         {"model.lora.rank=16", "model.lora.alpha=32", "model.lora.targets=q,v", "model.lora.dropout=0.05",
          "model.lora.base=nf4-double"}),
        ("--gradient_checkpointing False --max_steps -1 --packing", {"layout.recompute=none"}),
        ("--max_steps 5 --num_train_epochs 3", {"recipe.steps=5"}),  # as in TRL, in whichever order
        ("--num_train_epochs 3 --max_steps 5", {"recipe.steps=5"}),
        ("--num_train_epochs 3 --max_steps -1", {"recipe.epochs=3"}),
        ("--gradient_accumulation_steps=4", {"layout.micro_batch=8", "recipe.global_batch=64"}),
        ("--dataset_name org/set --eval_strategy no --max-length 64",
         {"data=hub:org/set", "recipe.eval_every=0", "recipe.sequence=64"}),
    ],
    ids=lambda parameter: parameter if isinstance(parameter, str) else "",
)  # fmt: skip
def test_flags_become_keys(flags: str, keys: set[str]) -> None:
    assert set(plan_words(flags, processes=2)) == keys


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--learning_rat 1 --zzz", r"--learning_rat \(nearest: --learning_rate\), --zzz: leave them out"),
        ("--max_steps many", "has --max_steps many, which is no number"),
        ("--lora_r 8", "ignores without --use_peft"),
        ("--use_peft --lora_target_modules wq", "wq: take names of q_proj"),
        ("trl sft", "has no flags"),
        ("--seed '1", "cannot be split into words"),
    ],
)
def test_what_is_not_known_is_named(flags: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan_words(flags, processes=1)


def test_the_keys_are_printed_and_words_beside_them_win(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LECTURE} --max_steps 1 --max_length 32"
    line = ["tune", "--from-trl", flags, *words(files, "recipe.global_batch=2", "recipe.eval_every=0"), "--no-dry-run"]
    assert main([*line, "layout.micro_batch=1", "recipe.epochs=0"]) == 0
    told = capsys.readouterr().err
    assert "read from TRL's flags: recipe.learning_rate=2e-5 layout.micro_batch=2" in told
    recipe = RunFolder.open(files / "run").plan.recipe
    assert (recipe.global_batch, recipe.steps, recipe.learning_rate) == (2, 1, 2e-5)
