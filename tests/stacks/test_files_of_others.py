"""Files as other trainers' repositories carry them, shortened: adapters, files that name files, shell, registries."""

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.weights.inventory import parameters
from meshwright.stacks.config_reading import read
from tests.stacks.test_reading import write

QLORA = """
base_model: NousResearch/Llama-2-7b-hf
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: paged_adamw_32bit
bf16: auto
gradient_checkpointing: true
"""
"""axolotl-ai-cloud/axolotl examples/llama-2/qlora.yml (067b021c)."""


def test_adapters_of_axolotl_are_counted_as_the_planner_counts_them(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.yaml", QLORA), cluster="h100x8")
    lora = answer.plan.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets, lora.base, lora.dropout) == (32, 16.0, "all", "nf4-double", 0.05)
    trained = sum(parameter.numel for parameter in parameters(answer.plan.model) if parameter.trained)
    hidden, ffn, layers = 4096, 11008, 32
    assert trained == layers * 32 * (4 * 2 * hidden + 3 * (hidden + ffn))  # A and B beside each of seven matrices
    wide = QLORA.replace("load_in_4bit: true", "load_in_4bit: false").replace("adapter: qlora", "adapter: lora")
    assert answer.given.peak_bytes < mw.plan_from(write(tmp_path, "b.yaml", wide), cluster="h100x8").given.peak_bytes
    assert answer.fits and answer.config.bounds[0].startswith("optimizer paged_adamw_32bit keeps smaller states")


def test_matrices_of_8_bits_are_counted_beside_adapters_alone(tmp_path: Path) -> None:
    eight = QLORA.replace("load_in_8bit: false", "load_in_8bit: true").replace("load_in_4bit: true", "")
    lora = mw.plan_from(write(tmp_path, "a.yaml", eight), cluster="h100x8").plan.model.lora
    assert lora is not None and lora.base == "llm-int8"
    with pytest.raises(PlanError, match="matrices of 4 or 8 bits are not trained: name an adapter"):
        read(str(write(tmp_path, "b.yaml", QLORA.replace("adapter: qlora", "adapter:"))))


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    text = QLORA.replace("adapter: qlora", "adapter: ia3\nrl: grpo\ntensor_parallel_size: 2\nbase: x")
    text = text.replace("sequence_len: 4096", "sequence_len: many").replace("Llama-2-7b-hf", "Storyteller")
    with pytest.raises(PlanError) as raised:
        read(str(write(tmp_path, "a.yaml", text)), "axolotl")
    for reason in (
        "6 reasons",
        "rl=grpo",
        "tensor_parallel_size=2 without fsdp_config",
        "sequence_len=many",
        "Storyteller",
        "adapter=ia3",
    ):
        assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: full
deepspeed: configs/ds_z2.json
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
"""hiyouga/LLaMA-Factory examples/train_full/qwen3_full_sft.yaml (ff6d4d12)."""
STAGE_2 = {
    "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}  # fmt: skip


def test_the_file_that_a_file_names_is_read_where_it_lies(tmp_path: Path) -> None:
    for folder in ("configs", "train"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "configs", "ds_z2.json", json.dumps(STAGE_2))
    answer = mw.plan_from(write(tmp_path / "train", "a.yaml", FACTORY), cluster="h100x8")
    assert (answer.plan.layout.zero, answer.plan.layout.dp_shard, answer.plan.recipe.global_batch) == (2, 8, 16)
    assert answer.config.bounds[0].startswith("zero_optimization.offload_optimizer.device=cpu keeps optimizer states")
    assert answer.plan.layout.recompute == "full"  # unless disable_gradient_checkpointing says otherwise


def test_a_named_file_that_is_not_there_says_its_stage_by_its_name_or_is_a_bound(tmp_path: Path) -> None:
    actual = read(str(write(tmp_path, "a.yaml", FACTORY.replace("ds_z2", "ds_z3_config"))))
    assert actual.facts["zero"] == 3 and any(
        "taken as stage 3 of ZeRO by its name" in entry for entry in actual.uncounted
    )
    other = mw.plan_from(write(tmp_path, "b.yaml", FACTORY.replace("ds_z2", "mine")), cluster="h100x8")
    assert other.config.bounds[0].startswith("configs/mine.json is not beside the file, and may shard the run")
    sharded = mw.plan_from(write(tmp_path, "c.yaml", FACTORY.replace("ds_z2", "zero_3")), cluster="h100x8")
    assert other.given.peak_bytes > sharded.given.peak_bytes


def test_a_launcher_file_that_is_not_there_is_a_bound(tmp_path: Path) -> None:
    """GL3MON/ChessLM scripts/train_sft_deepspeed.sh; accelerate's file beside a script of its own."""
    text = (
        "accelerate launch --config_file launcher.yaml finetune.py --model_name meta-llama/Llama-3.2-1B --bf16 "
        "--max_seq_length 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --packing\n"
    )
    answer = mw.plan_from(write(tmp_path, "a.sh", text), cluster="h100x8")
    assert answer.plan.model.name == "llama-3.2-1b"
    assert answer.config.bounds[0].startswith("launcher.yaml is not beside the file, and may shard the run")
    staged = read(str(write(tmp_path, "b.sh", text.replace("launcher.yaml", "configs/stage3_no_offloading.conf"))))
    assert staged.facts["zero"] == 3 and not staged.bounds


def test_training_of_some_layers_is_a_bound_and_no_training_is_refused(tmp_path: Path) -> None:
    frozen = FACTORY.replace("finetuning_type: full", "finetuning_type: freeze\nfreeze_trainable_layers: 2")
    bounds = read(str(write(tmp_path, "a.yaml", frozen.replace("configs/ds_z2", "ds_z3")))).bounds
    assert bounds == ("finetuning_type=freeze trains some layers only, which needs less memory: not counted.",)
    for word in ("", "do_train: false\n", "do_predict: true\n"):
        with pytest.raises(PlanError, match="do_train is off, or left out, so that nothing is trained"):
            read(str(write(tmp_path, "b.yaml", FACTORY.replace("do_train: true\n", word))), "accelerate")


@pytest.mark.parametrize(
    ("kind", "why"),
    [("kto", "rates answers"), ("ppo", "samples answers"), ("rm", "trains a model")],
)
def test_other_losses_of_llama_factory_are_refused(kind: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"stage={kind} {why}.*not counted: take sft, pt or dpo"):
        read(str(write(tmp_path, "a.yaml", FACTORY.replace("stage: sft", f"stage: {kind}"))))


def as_arguments(text: str, command: str) -> str:
    words = (line.partition(": ") for line in text.strip().splitlines())
    return f"{command} \\\n" + " \\\n".join(f"    --{key} {value}" for key, _, value in words) + "\n"


def test_arguments_in_a_shell_mean_what_the_yaml_means(tmp_path: Path) -> None:
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nlora_rank: 16").replace("configs/", "")
    file = read(str(write(tmp_path, "a.yaml", text.replace("ds_z2.json", "ds_z3.json"))))
    script = as_arguments(text.replace("ds_z2.json", "ds_z3.json"), "llamafactory-cli train")
    shell = read(str(write(tmp_path, "a.sh", script)))
    assert shell.software.word == file.software.word and shell.facts == file.facts
    assert shell.facts["lora"]["rank"] == 16 and shell.facts["lora"]["targets"] == "all"


TRL = """
accelerate launch --config_file=examples/accelerate_configs/deepspeed_zero3.yaml --num_processes 8 trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --max_length 2048 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing --eos_token '<|im_end|>' \\
    --use_peft --lora_r 32 --lora_alpha 16 --load_in_4bit --packing --output_dir Qwen2-0.5B-SFT
"""
"""huggingface/trl trl/scripts/sft.py (f2cd5771): the commands of its head, together."""


def test_flags_of_trl_in_a_shell(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.sh", TRL), cluster="h100x8")
    lora = answer.plan.model.lora
    assert answer.software.word == "trl" and answer.plan.model.name == "qwen2-0.5b" and lora is not None
    assert (lora.rank, lora.targets, lora.base, lora.dropout) == (32, "q,v", "nf4", 0.05)  # PEFT's default of Qwen2
    assert (answer.plan.layout.zero, answer.plan.recipe.global_batch) == (3, 128)
    assert "unknown" not in answer.config.unknown and answer.config.unknown == ()


CHAT = """
ZERO_STAGE=$2
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
deepspeed main.py --data_path Dahoas/rm-static --model_name_or_path meta-llama/Llama-2-7b-hf \\
   --per_device_train_batch_size 4 --max_seq_len 512 --gradient_accumulation_steps 1 --gradient_checkpointing \\
   --zero_stage $ZERO_STAGE --deepspeed --output_dir out
"""
"""DeepSpeedExamples, DeepSpeed-Chat training_scripts/llama2/run_llama2_7b.sh (45b4b715)."""


def test_deepspeed_chat_trains_in_fp16_unless_told(tmp_path: Path) -> None:
    plan = mw.plan_from(write(tmp_path, "a.sh", CHAT), cluster="a100x8").plan
    assert (plan.model.name, plan.layout.zero, plan.recipe.precision, plan.recipe.sequence) == (
        "llama-2-7b", 3, "fp16", 512
    )  # fmt: skip
    with pytest.raises(PlanError, match="lora_dim=128 trains adapters, and embeddings and norms whole as well"):
        read(str(write(tmp_path, "b.sh", CHAT.replace("--deepspeed", "--deepspeed --lora_dim 128"))))


REGISTRY = """
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer
from . import model_registry


def llama3_debugmodel() -> Trainer.Config:
    model_spec = model_registry("debugmodel")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8 * 2048, max_context_length=2048, steps=10),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_405b() -> Trainer.Config:
    compile_config = CompileConfig(enable=True, components=["model", "loss"])
    config = Trainer.Config(
        model_spec=model_registry("405B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
        compile=compile_config,
        activation_checkpoint=FullAC.Config(),
    )
    return config


def llama3_405b_wide() -> Trainer.Config:
    config = llama3_405b()
    config.parallelism.tensor_parallel_degree = 16
    return config
"""
"""pytorch/torchtitan torchtitan/models/llama3/config_registry.py (b5bcd76c)."""


def test_functions_of_torchtitans_registry(tmp_path: Path) -> None:
    path = write(tmp_path, "config_registry.py", REGISTRY)
    small = mw.plan_from(f"{path}:llama3_debugmodel", cluster="h100x8").plan
    assert (small.model.vocab, small.model.layers, small.model.ffn) == (2048, 6, 768)
    assert (small.layout.micro_batch, small.recipe.sequence, small.layout.recompute) == (8, 2048, "selective")
    large = mw.plan_from(f"{path}:llama3_405b", cluster="h100x8", nodes=64)
    assert large.plan.model == presets.model("llama-3.1-405b") and large.config.facts["compiled"] is True
    assert (large.plan.layout.tp, large.plan.layout.micro_batch, large.plan.recipe.global_batch) == (8, 2, 128)
    wide = read(f"{path}:llama3_405b_wide")
    assert wide.facts["tp"] == 16 and wide.facts["sequence"] == 8192


NEMO_2 = """
import nemo_run as run
from nemo.collections.llm.gpt.model.llama import Llama31Config8B, LlamaModel


def trainer(
    tensor_parallelism: int = 1, pipeline_parallelism: int = 1, virtual_pipeline_parallelism=None,
    context_parallelism: int = 2, sequence_parallelism: bool = False, num_nodes: int = 1,
):
    return run.Config(nl.Trainer, num_nodes=num_nodes)


def pretrain_recipe(num_nodes: int = 1):
    recipe = run.Partial(
        fn,
        model=model(),
        trainer=trainer(num_nodes=num_nodes),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
    )
    return recipe
"""
"""NVIDIA/NeMo nemo/collections/llm/recipes/llama31_8b.py (8cfedd72)."""


def test_a_recipe_of_nemo_2(tmp_path: Path) -> None:
    plan = mw.plan_from(f"{write(tmp_path, 'r.py', NEMO_2)}:pretrain_recipe", cluster="h100x8", nodes=2).plan
    assert plan.model == presets.model("llama-3.1-8b") and (plan.layout.cp, plan.layout.zero) == (2, 1)
    assert (plan.recipe.sequence, plan.recipe.global_batch, plan.layout.micro_batch) == (8192, 512, 1)


@pytest.mark.parametrize(("name", "model"), [("qwen2_1p5b", "qwen2-1.5b"), ("qwen25_500m", "qwen2.5-0.5b")])
def test_a_recipe_of_nemo_2_says_its_size_in_letters(name: str, model: str, tmp_path: Path) -> None:
    """NVIDIA/NeMo nemo/collections/llm/recipes/qwen2_1p5b.py (8cfedd72)."""
    text = f'NAME = "{name}"\n{NEMO_2}'.replace("Llama31Config8B, LlamaModel", "x")
    actual = read(f"{write(tmp_path, 'r.py', text)}:pretrain_recipe")
    assert actual.shape is not None and actual.shape.name == model


def test_arguments_of_a_recipe_are_its_users(tmp_path: Path) -> None:
    """In the manner of chuanli11/NeMo nemo/collections/llm/recipes/mixtral_8x22b.py: no default for num_nodes."""
    text = NEMO_2.replace("pretrain_recipe(num_nodes: int = 1)", "pretrain_recipe(num_nodes: int)")
    plan = mw.plan_from(f"{write(tmp_path, 'r.py', text)}:pretrain_recipe", cluster="h100x8", nodes=2).plan
    assert plan.cluster.nodes == 2


def test_flavors_that_no_registry_here_has_are_looked_up_by_their_names(tmp_path: Path) -> None:
    """Flasew/torchtitan train_configs/llama2-13b.toml: torchtitan 0.1 had Llama 2."""
    text = '[model]\nname = "llama2"\nflavor = "13B"\n[training]\nbatch_size = 4\nseq_len = 4096\n'
    assert read(str(write(tmp_path, "a.toml", text))).shape == presets.model("llama-2-13b")
    with pytest.raises(PlanError, match=r"model 'llama4-17bx16e' is not known.*`meshwright plan llama-3.1-8b --from a"):
        read(str(write(tmp_path, "a.toml", text.replace("llama2", "llama4").replace("13B", "17bx16e"))))


def test_options_in_quotes_are_words_of_their_own(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh (d98e8a64)."""
    text = (
        "ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --micro-batch-size 1)\n"
        'ARGS+=(\n    "--fp8-format hybrid"\n    "--vocab-size 128256"\n)\ntorchrun pretrain_gpt.py ${ARGS[@]}\n'
    )
    facts = read(str(write(tmp_path, "a.sh", text)), "megatron-lm").facts
    assert (facts["narrow"], facts["vocab"]) == ("hybrid", 128256)


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
  offload_optimizer_device: none
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def test_a_file_that_deepspeed_shards_is_advised_of_deepspeed_alone(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"recipe": {"sequence": 4096, "global_batch": 64}, "layout": {"micro_batch": 4}}
    path = write(tmp_path, "accelerate.yaml", ACCELERATE)
    answer = mw.plan_from(path, model="llama-2-13b", cluster="h100x8", **asked)
    assert not answer.fits and answer.best is not None
    told = [answer.options(fix.prediction.plan) for fix in answer.fixes] + [answer.options(answer.best.plan)]
    assert any("zero_stage=3" in words for words in told) and not any("fsdp" in words for words in told)


@pytest.mark.parametrize(
    "option", ['"expert_parallel": {"enabled": true, "autoep_size": 8}', '"moe": {"ep_size": 8}',
               '"sequence_parallel_size": 2', '"mesh": {"tensor_parallel_degree": 4}'],
)  # fmt: skip
def test_an_option_that_says_how_ranks_share_the_work_decides(option: str, tmp_path: Path) -> None:
    text = f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3}}, {option}}}'
    with pytest.raises(PlanError, match=r"_(size|degree)=\d"):
        read(str(write(tmp_path, "d.json", text)), "deepspeed")
    alone = text.replace("8}", "1}").replace('size": 2', 'size": 1').replace("4}", "1}")
    assert read(str(write(tmp_path, "e.json", alone)), "deepspeed").facts["zero"] == 3
