"""Configurations as people write them: what is read, refused with key and line, and advised."""

from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.config_files import file_texts
from meshwright.stacks.config_reading import read
from meshwright.stacks.trainer_table import SOFTWARE
from tests.interface.test_markup import parsed

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
    actual = mw.plan_from(write(tmp_path, "a.toml", EIGHT), cluster="h100x8", nodes=2).plan
    layout = actual.layout
    assert (actual.model.name, actual.recipe.sequence, actual.recipe.global_batch) == ("llama-3.1-8b", 8192, 8)
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


def test_what_saves_memory_and_is_not_counted_leaves_a_bound(tmp_path: Path) -> None:
    """The figures are those without it, and it is named; above the room of a device they say no more than that."""
    zero = '{"stage": 2, "offload_optimizer": {"device": "cpu"}}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {zero}}}'
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "h100x8", "recipe": {"sequence": 4096}}
    off = mw.plan_from(write(tmp_path, "d.json", text.replace("cpu", "none")), **asked)
    answer = mw.plan_from(write(tmp_path, "e.json", text), **asked)
    (message,) = answer.config.bounds
    assert message == (
        "zero_optimization.offload_optimizer.device=cpu keeps optimizer states in host memory, which needs less memory "
        "and more time: not counted."
    )
    assert answer.given.peak_bytes == off.given.peak_bytes and off.config.bounds == ()
    assert message in answer.to_dict()["not_counted"] and answer.to_dict()["bound"] is True


def test_what_does_not_fit_is_mended_in_the_words_of_the_software(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.toml", EIGHT.replace("size = 1", "size = 8")), cluster="h100x8")
    assert not answer.fits
    assert any("training.local_batch_size" in answer.options(fix.prediction.plan) for fix in answer.fixes)
    assert answer.best is not None
    shown = parsed(answer._repr_html_()).text
    assert shown.index("Does not fit") < shown.index("training.local_batch_size")
    assert answer.options(answer.best.plan) in shown
    assert answer.best.peak_bytes < answer.best.usable_bytes


def test_the_sequence_may_come_from_the_caller(tmp_path: Path) -> None:
    batch = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2'
    text = f'{{{batch}, "zero_optimization": {{"stage": 3}}, "bf16": {{"enabled": true}}}}'
    path = write(tmp_path, "d.json", text)
    with pytest.raises(PlanError, match="the sequence length is unknown"):
        mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8")
    planned = mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8", recipe={"sequence": 4096})
    assert (planned.plan.layout.zero, planned.plan.layout.micro_batch) == (3, 2)


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


def test_offloading_of_torchtitan_is_a_bound_where_it_is_on(tmp_path: Path) -> None:
    asked = EIGHT.replace("seq_len = 8192", "seq_len = 8192\nenable_cpu_offload = true")
    asked += "[optimizer]\nearly_step_in_backward = true\n"
    message = mw.plan_from(write(tmp_path, "a.toml", asked), cluster="h100x8").config.bounds
    assert [sentence.partition(" ")[0] for sentence in message] == [
        "training.enable_cpu_offload=true", "optimizer.early_step_in_backward=true"
    ]  # fmt: skip
    off = write(tmp_path, "a.toml", asked.replace("= true", "= false"))
    assert mw.plan_from(off, cluster="h100x8").config.bounds == ()


@pytest.mark.parametrize("message", ["mixed_precision: fp8", "mixed_precision: bf16\nfp8_config:\n  backend: TE"])
def test_8_bit_products_of_accelerate_are_a_bound(message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", f"distributed_type: FSDP\nnum_processes: 8\n{message}\n")
    recipe = {"sequence": 4096, "global_batch": 64}
    answer = mw.plan_from(path, model="llama-3.1-8b", cluster="h100x8", recipe=recipe, layout={"micro_batch": 1})
    assert answer.plan.recipe.precision == "bf16" and "products of 8 bits" in answer.config.bounds[0]


def test_an_optimizer_with_smaller_states_is_a_bound_and_one_with_others_is_refused(tmp_path: Path) -> None:
    text = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 4096\noptim: adamw_bnb_8bit\npacking: true\n"
    answer = mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")
    assert answer.config.bounds[0].startswith("optimizer adamw_bnb_8bit keeps smaller states")
    with pytest.raises(PlanError, match="optimizer shampoo is not counted: take one of adamw_torch_fused"):
        mw.plan_from(write(tmp_path, "a.yaml", text.replace("adamw_bnb_8bit", "shampoo")), cluster="h100x8")


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
    for name, text in file_texts(SOFTWARE[word], plan).items():
        write(tmp_path, name, text)
    again = read(str(tmp_path), word)
    assert again.shape is not None
    assert again.plan(again.shape, plan.cluster, {}).recipe.precision == precision
    alone = read(str(tmp_path / "accelerate.yaml"), word)
    assert alone.facts["precision"] == precision, "its own file alone is enough"


def test_one_layer_more_is_not_off(tmp_path: Path) -> None:
    """DeepSeek-V3 has --mtp-num-layers 1; 1 is off only where ranks or parts are counted."""
    base = "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048"
    with pytest.raises(PlanError, match="mtp-num-layers=1 adds layers that predict more tokens"):
        read(str(write(tmp_path, "a.sh", f"{base} --vocab-size 32000 --mtp-num-layers 1\n")), "megatron-lm")
    off = f"{base} --vocab-size 32000 --mtp-num-layers 0 --num-distributed-optimizer-instances 1\n"
    assert read(str(write(tmp_path, "a.sh", off)), "megatron-lm").unknown == ()
    parts = '"zero_hpz_partition_size": 8, "mics_shard_size": -1'
    hpz = f'{{"train_batch_size": 8, "zero_optimization": {{"stage": 3, {parts}}}}}'
    with pytest.raises(PlanError, match="zero_hpz_partition_size=8"):
        read(str(write(tmp_path, "d.json", hpz)), "deepspeed")
    assert read(str(write(tmp_path, "d.json", hpz.replace(": 8,", ": 1,"))), "deepspeed").facts["zero"] == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context_parallel_size: 1", "context_parallel_size: 4", "context_parallel_size=4 is not counted here: take"),
        ("dtype: bfloat16", "dtype: float32", "model.dtype=float32 is not counted here: take model.dtype=bfloat16"),
        ("name: adamW", "name: sgd", "optimizer_factory.name=sgd is not understood: take one of adamW"),
    ],
)
def test_what_is_always_written_the_same_is_refused_where_it_differs(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    plan = Plan(
        model=presets.model("llama-3.1-8b"), cluster=presets.cluster("h100x8"),
        recipe=Recipe(precision="bf16", sequence=4096, global_batch=64),
        layout=Layout(dp_shard=8, zero=1, micro_batch=1),
    )  # fmt: skip
    text = file_texts(SOFTWARE["nanotron"], plan)["nanotron.yaml"]
    assert read(str(write(tmp_path, "a.yaml", text))).shape == plan.model
    assert text.count(old) == 1
    with pytest.raises(PlanError, match=message):
        read(str(write(tmp_path, "a.yaml", text.replace(old, new))))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["mx"]', "model.converters=mx makes products"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = "float8,quantize.grouped_mm.float8"', "grouped_mm.float8 makes"),
        ("seq_len = 8192", 'seq_len = 8192\nmixed_precision_param = "float32"', "float32 is not understood: take"),
        ("_degree = 2", '_degree = 2\nfsdp_reshard_after_forward = "never"', "never without a pipeline is not counted"),
        (
            "_degree = 2",
            "_degree = 2\npipeline_parallel_degree = 2",
            "several rounds of 4 sequences, each with a pipeline bubble",
        ),
    ],
)
def test_what_torchtitan_does_otherwise_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = EIGHT.replace("local_batch_size = 1", "local_batch_size = 4\nglobal_batch_size = 64")
    asked: dict[str, Any] = {"cluster": "h100x8", "nodes": 1}
    assert mw.plan_from(write(tmp_path, "a.toml", text), **asked).plan.layout.zero == 3
    with pytest.raises(PlanError, match=message):
        mw.plan_from(write(tmp_path, "a.toml", text.replace(old, new)), **asked)


def test_a_name_of_converters_is_read_as_a_list_of_one(tmp_path: Path) -> None:
    entry, several = (
        mw.plan_from(
            write(tmp_path, "a.toml", EIGHT.replace('flavor = "8B"', f'flavor = "8B"\nconverters = {message}')),
            cluster="h100x8",
        ).given.step_seconds
        for message in ('"float8"', '["float8"]')
    )
    assert entry == several


@pytest.mark.parametrize(
    ("option", "recompute", "layers"),
    [('"op"', "selective", 0), ('"2"', "full", 16), ("2", "full", 16), (None, "full", 16), ('"1"', "full", 0)],
)
def test_selective_recomputation_by_layers(option: str | None, recompute: str, layers: int, tmp_path: Path) -> None:
    """torchtitan/distributed/activation_checkpoint.py: `2`, the default, wraps every second layer whole."""
    message = "" if option is None else f"selective_ac_option = {option}"
    text = EIGHT.replace('selective_ac_option = "op"', message)
    actual = mw.plan_from(write(tmp_path, "a.toml", text), cluster="h100x8").plan.layout
    assert (actual.recompute, actual.recompute_layers) == (recompute, layers)


def test_torchtitan_without_sequence_parallelism(tmp_path: Path) -> None:
    text = EIGHT.replace("_degree = 2", "_degree = 2\nenable_sequence_parallel = false")
    assert mw.plan_from(write(tmp_path, "a.toml", text), cluster="h100x8").plan.layout.sp is False


def test_deepspeed_hides_no_reductions_below_stage_3_unless_told(tmp_path: Path) -> None:
    """runtime/zero/config.py, overlap_comm_valid: where it is not said, stage 3 alone overlaps."""

    def step_s(stage: int, more: str) -> float:
        batch = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}'
        path = write(tmp_path, "d.json", f'{{{batch}, "zero_optimization": {{"stage": {stage}{more}}}}}')
        asked: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "h100x8", "nodes": 2}
        return mw.plan_from(path, recipe={"sequence": 2048}, **asked).given.step_seconds

    on, off = ', "overlap_comm": true', ', "overlap_comm": false'
    assert step_s(2, "") == step_s(2, off) > step_s(2, on)
    assert step_s(3, "") == step_s(3, on)


def test_an_optimizer_of_deepspeed_with_other_states_is_refused(tmp_path: Path) -> None:
    text = '{"train_batch_size": 64, "optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}}'
    with pytest.raises(PlanError, match=r"optimizer\.type=muon is not understood: take one of AdamW, Adam"):
        read(str(write(tmp_path, "d.json", text)), "deepspeed")


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
sequence_len: 4096
micro_batch_size: 1
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
"""


def test_axolotl_that_holds_no_logits_is_a_bound(tmp_path: Path) -> None:
    """cut_cross_entropy is true by default where its plugin is named: integrations/cut_cross_entropy/args.py."""
    assert read(str(write(tmp_path, "a.yaml", AXOLOTL)), "axolotl").facts["zero"] == 3
    text = AXOLOTL + "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
    assert "CutCrossEntropyPlugin never holds all logits" in read(str(write(tmp_path, "a.yaml", text))).bounds[0]


@pytest.mark.parametrize("word", ["accelerate", "axolotl"])
def test_units_other_than_blocks_are_refused(word: str, tmp_path: Path) -> None:
    """With NO_WRAP the whole model is one unit, which is gathered at once."""
    section = "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: "
    text = f"distributed_type: FSDP\n{section}" if word == "accelerate" else AXOLOTL + "  auto_wrap_policy: "
    read(str(write(tmp_path, "a.yaml", f"{text}TRANSFORMER_BASED_WRAP\n")), word)
    with pytest.raises(PlanError, match="auto_wrap_policy=NO_WRAP gathers other units than blocks"):
        read(str(write(tmp_path, "a.yaml", f"{text}NO_WRAP\n")), word)


def test_gradients_of_deepspeed_in_other_bits_are_refused(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 2}}'
    with pytest.raises(PlanError, match="grad_accum_dtype=fp32 keeps gradients in other bits"):
        read(str(write(tmp_path, "d.json", text)), "deepspeed")


def test_the_length_of_older_files_of_trl_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_seq_length: 2048\n")
    assert read(str(path), "trl").facts["sequence"] == 2048


def test_values_of_a_function_of_torchtitans_registry_are_not_guessed(tmp_path: Path) -> None:
    """llama3_70b has 8 tensor-parallel ranks and recomputes all: a file that changes its batch alone says neither."""
    text = "def mine():\n    config = llama3_70b()\n    config.training.local_batch_size = 2\n    return config\n"
    with pytest.raises(PlanError, match=r"training\.seq_len is not stated, and what llama3_70b has is not read"):
        read(str(write(tmp_path, "a.py", text)), "torchtitan")
    plan = Plan(
        model=presets.model("qwen3-30b-a3b"), cluster=presets.cluster("h100x8"),
        recipe=Recipe(precision="bf16", sequence=4096, global_batch=64),
        layout=Layout(dp_shard=8, zero=3, micro_batch=1),
    )  # fmt: skip
    written = file_texts(SOFTWARE["torchtitan"], plan)["torchtitan_plan.py"]
    assert "config.parallelism.expert_parallel_degree = 1" in written
    assert read(str(write(tmp_path, "b.py", written))).shape == plan.model


@pytest.mark.parametrize("message", ["inf", "nan", '"x"', "1.5", "[1]", "true"])
@pytest.mark.parametrize(
    "key", ["seq_len = 8192", "local_batch_size = 1", "tensor_parallel_degree = 2", "data_parallel_shard_degree = 8"]
)
def test_a_count_that_is_no_whole_number_has_its_line(key: str, message: str, tmp_path: Path) -> None:
    name = key.partition(" ")[0]
    text = EIGHT.replace("[activation", "data_parallel_shard_degree = 8\n[activation").replace(
        key, f"{name} = {message}"
    )
    with pytest.raises(PlanError, match=rf"a.toml, line \d+: .*{name}=.* must be a whole number"):
        read(str(write(tmp_path, "a.toml", text)))


def test_a_mark_of_the_byte_order_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(EIGHT, encoding="utf-8-sig")
    assert read(str(path)).facts["tp"] == 2


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b"), ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("NousResearch/Llama-2-7b-hf", "llama-2-7b"), ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2-7b"), ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("casperhansen/llama-3-70b-fp16", "llama-3-70b"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama-3.1-405b"), ("google/gemma-2-2b-it", "gemma-2-2b"),
    ],
)  # fmt: skip
def test_a_tuned_or_converted_copy_has_the_matrices_of_its_preset(name: str, preset: str, tmp_path: Path) -> None:
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", name)
    assert read(str(write(tmp_path, "a.yaml", text))).shape == presets.model(preset)


def test_a_name_that_is_not_known_names_the_nearest_preset(tmp_path: Path) -> None:
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", "somebody/Llamba-3.1-8B-Story")
    with pytest.raises(
        PlanError, match=r"give MODEL, a preset or a folder with its config.json, as .*; nearest: .*llama-3\.1-8b"
    ):
        read(str(write(tmp_path, "a.yaml", text)))
    assert read(str(write(tmp_path, "a.yaml", text)), model=presets.model("llama-3.1-8b")).facts["zero"] == 3


def test_trl_without_a_file_of_accelerate_shards_nothing(tmp_path: Path) -> None:
    """accelerate launches plain data parallelism where nothing else is said: commands/launch.py."""
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nmax_length: 4096\nper_device_train_batch_size: 1\npacking: true\n"
    answer = mw.plan_from(write(tmp_path, "sft.yaml", text), cluster="h100x8")
    assert (answer.plan.layout.zero, answer.plan.layout.dp_replicate, answer.fits) == (0, 8, False)


def test_what_matters_and_is_not_counted_is_named(tmp_path: Path) -> None:
    """Each by its default in the software, or as the file has it; nothing of what is written by --for."""
    beside = EIGHT.replace("[activation", "enable_async_tensor_parallel = true\n[activation")
    actual = read(str(write(tmp_path, "a.toml", beside)))
    assert actual.uncounted == (
        "parallelism.enable_async_tensor_parallel=true overlaps exchanges of tensor parallelism with products, which "
        "is faster: not counted.",
    )
    assert read(str(write(tmp_path, "a.toml", EIGHT))).uncounted == ()
    trl = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 4096\nper_device_train_batch_size: 1\n"
    for text, message in ((trl, 1), (trl + "packing: false\n", 1), (trl + "packing: true\n", 0)):
        assert len(read(str(write(tmp_path, "sft.yaml", text)), "trl").uncounted) == message


def test_gradients_of_deepspeed_travel_as_its_file_says(tmp_path: Path) -> None:
    plain = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1%s}'
    widths = {}
    for word in ("", "fp32", "bfp16"):
        message = f', "communication_data_type": "{word}"' if word else ""
        actual = read(str(write(tmp_path, "ds.json", plain % message)), "deepspeed")
        widths[word] = actual.software.stack(actual.facts).gradient_exchange_bytes
        assert actual.ignored.count("communication_data_type") == 0
    assert widths == {"": 0.0, "fp32": 4.0, "bfp16": 2.0}


def test_a_file_whose_rounds_megatron_would_not_take_is_refused(tmp_path: Path) -> None:
    text = (
        "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
        "--swiglu --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 2 --bf16 "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2\n"
    )
    with pytest.raises(PlanError, match=r"rounds of pp=4 micro-batches or more: a rank has 2: the run would end"):
        mw.plan_from(write(tmp_path, "train.sh", text), cluster="h100x4", stack="megatron-lm")
