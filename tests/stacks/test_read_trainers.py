"""Trainers whose files are read and not written: torchtune, LitGPT, LLM Foundry, Megatron-DeepSpeed, NeMo 2's recipes,
scripts over transformers' Trainer. Sources stand with each text."""

import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec.errors import PlanError
from meshwright.spec.weights.inventory import parameters
from meshwright.stacks.config_reading import read
from tests.stacks.test_reading import write

TORCHTUNE = """
output_dir: /tmp/out
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
dataset:
  packed: True
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
enable_activation_checkpointing: True
dtype: bf16
"""
"""pytorch/torchtune recipes/configs/llama3_1/8B_lora.yaml (bd2a0fc7)."""


def test_torchtune_shards_all_ranks_and_its_recipes_for_one_device_none(tmp_path: Path) -> None:
    """recipes/lora_finetune_distributed.py: FSDP2 over all ranks, reshard_after_forward=True."""
    answer = mw.plan_from(write(tmp_path, "8B_lora.yaml", TORCHTUNE), cluster="h100x8")
    layout, lora = answer.plan.layout, answer.plan.model.lora
    assert lora is not None and answer.software.word == "torchtune" and answer.plan.model.name == "llama-3.1-8b"
    assert (lora.rank, lora.alpha, lora.base) == (8, 16.0, "same")
    assert set(lora.targets.split(",")) == {"q", "v", "o", "gate", "up", "down"}
    assert (layout.zero, layout.dp_shard, layout.micro_batch, answer.plan.recipe.global_batch) == (3, 8, 2, 128)
    assert layout.recompute == "full" and answer.config.unknown == ()
    single = mw.plan_from(write(tmp_path, "8B_lora_single_device.yaml", TORCHTUNE), cluster="h100x8")
    assert (single.plan.cluster.devices, single.plan.layout.zero, single.plan.recipe.global_batch) == (1, 0, 16)
    assert any("The file is for 1 device" in sentence for sentence in single.config.uncounted)


@pytest.mark.parametrize(
    ("builder", "model"),
    [
        ("qwen3.lora_qwen3_1_7b_instruct", "qwen3-1.7b"), ("qwen2_5.qwen2_5_1_5b_base", "qwen2.5-1.5b"),
        ("qwen2.qwen2_0_5b", "qwen2-0.5b"), ("llama2.qlora_llama2_7b", "llama-2-7b"),
        ("phi3.phi3_mini", "phi-3-mini-4k"),
        ("phi4.phi4_14b", "phi-4"), ("gemma.gemma_2b", "gemma-2b"), ("gemma2.gemma2_9b", "gemma-2-9b"),
        ("mistral.mistral_7b", "mistral-7b-v0.1"), ("llama3_3.llama3_3_70b", "llama-3.1-70b"),
        ("code_llama2.code_llama2_7b", "codellama-7b"),
    ],
)  # fmt: skip
def test_builders_of_torchtune_name_their_models(builder: str, model: str, tmp_path: Path) -> None:
    text = TORCHTUNE.replace("llama3_1.lora_llama3_1_8b", builder)
    config = read(str(write(tmp_path, "a.yaml", text)))
    assert config.shape is not None and config.shape.name == model


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("optimizer:\n  _component_: torch.optim.AdamW", "tasks: ['arc']", "evaluates a model, and trains nothing"),
        ("batch_size: 2", "batch_size: 2\nquantizer:\n  _component_: a.Int8DynActInt4WeightQATQuantizer", "rounds"),
        ("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss", "compares answers"),
        ("llama3_1.lora_llama3_1_8b", "llama3_2_vision.lora_llama3_2_vision_11b", "give a model of text"),
    ],
)  # fmt: skip
def test_what_torchtune_trains_in_another_way_is_refused(old: str, new: str, why: str, tmp_path: Path) -> None:
    assert old in TORCHTUNE
    with pytest.raises(PlanError, match=why):
        read(str(write(tmp_path, "a.yaml", TORCHTUNE.replace(old, new))))


LITGPT = """
checkpoint_dir: checkpoints/google/gemma-2b
out_dir: out/finetune
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 16
lora_alpha: 16
lora_dropout: 0.1
lora_query: true
lora_key: true
lora_value: true
lora_projection: true
lora_mlp: true
lora_head: true
data:
  class_path: litgpt.data.Alpaca2k
train:
  global_batch_size: 6
  micro_batch_size: 2
  max_seq_length: 512
optimizer:
  class_path: torch.optim.AdamW
seed: 1337
"""
"""Lightning-AI/litgpt config_hub/finetune/gemma-2b/qlora.yaml (26857050)."""


def test_litgpt_has_the_devices_that_its_file_asks_for(tmp_path: Path) -> None:
    """finetune/lora.py: micro-batches = global_batch_size / (devices x micro_batch_size)."""
    answer = mw.plan_from(write(tmp_path, "a.yaml", LITGPT), cluster="h100x8")
    lora = answer.plan.model.lora
    assert lora is not None and (lora.rank, lora.base, lora.dropout) == (16, "nf4", 0.1)
    assert (answer.plan.model.name, answer.plan.cluster.devices) == ("gemma-2b", 1)
    assert answer.plan.layout.micro_batches(answer.plan.recipe.global_batch) == 3
    assert (answer.plan.recipe.sequence, answer.plan.layout.recompute) == (512, "none")


def test_litgpt_over_several_devices_shards_and_checkpoints_blocks(tmp_path: Path) -> None:
    """finetune/full.py: FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})."""
    dense = "\n".join(line for line in LITGPT.splitlines() if not line.startswith(("lora", "quantize")))
    text = dense.replace("devices: 1", "devices: 4").replace("global_batch_size: 6", "global_batch_size: 16")
    answer = mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")
    layout = answer.plan.layout
    assert (layout.zero, layout.dp_shard, layout.recompute, answer.plan.cluster.devices) == (3, 4, "full", 4)
    assert any(sentence.startswith("precision=bf16-true keeps weights") for sentence in answer.config.bounds)


FOUNDRY = """
variables:
  max_seq_len: 2048
max_seq_len: ${variables.max_seq_len}
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 4096
  n_heads: 32
  n_layers: 32
  expansion_ratio: 4
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 50368
  no_bias: true
  attn_config:
    attn_impl: flash
    alibi: true
tokenizer:
  name: EleutherAI/gpt-neox-20b
train_loader:
  name: text
optimizer:
  name: decoupled_adamw
global_train_batch_size: 1024
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: true
  activation_cpu_offload: false
"""
"""mosaicml/llm-foundry scripts/train/yamls/pretrain/mpt-7b.yaml (8c8dd48f)."""


def test_llm_foundrys_mpt_has_its_published_parameters(tmp_path: Path) -> None:
    """6,649,286,656 of mosaicml/mpt-7b (safetensors.total), whose vocabulary has 50,432 rows: 64 more than here."""
    answer = mw.plan_from(write(tmp_path, "a.yaml", FOUNDRY), cluster="h100x8")
    layout, shape = answer.plan.layout, answer.plan.model
    assert answer.software.word == "llm-foundry"
    weights = sum(parameter.numel for parameter in parameters(shape) if parameter.decays)
    assert weights == 6_649_286_656 - 64 * 4096 - 65 * 4096  # and a weight for each of 65 norms, which decays nothing
    assert (answer.plan.recipe.sequence, answer.plan.recipe.global_batch, layout.micro_batch) == (2048, 1024, 8)
    assert (layout.zero, layout.dp_shard, layout.recompute) == (3, 8, "full")


def test_llm_foundry_reads_models_of_the_hub_and_refuses_attention_that_is_written(tmp_path: Path) -> None:
    sizes = FOUNDRY[FOUNDRY.index("  name: mpt") : FOUNDRY.index("tokenizer:")]
    public = FOUNDRY.replace(sizes, "  name: hf_causal_lm\n  pretrained_model_name_or_path: meta-llama/Llama-2-7b-hf\n")
    assert mw.plan_from(write(tmp_path, "a.yaml", public), cluster="h100x8").plan.model.name == "llama-2-7b"
    with pytest.raises(PlanError, match="attn_impl=torch writes the weights of attention"):
        read(str(write(tmp_path, "b.yaml", FOUNDRY.replace("attn_impl: flash", "attn_impl: torch"))))


def test_a_file_of_another_program_is_not_taken_for_a_known_one(tmp_path: Path) -> None:
    text = "seed: 1\nlearning_rate: 1e-4\nworld:\n" + "".join(f"  part_{n}: {n}\n" for n in range(20))
    with pytest.raises(PlanError, match=r"fits no program: 2 of its 22 keys are known"):
        read(str(write(tmp_path, "a.yaml", text)))


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("reward_funcs: [accuracy]", "rewards them"),
        ("desirable_weight: 1.1", "rates answers"),
        ("lmbda: 0.5", "a second model"),
    ],
)
def test_trl_with_another_loss_is_not_counted_as_fine_tuning(key: str, why: str, tmp_path: Path) -> None:
    """trl/trainer/grpo_config.py, kto_config.py, gkd_config.py."""
    text = f"model_name_or_path: Qwen/Qwen2.5-7B\nmax_length: 1024\nper_device_train_batch_size: 1\n{key}\n"
    with pytest.raises(PlanError, match=why):
        read(str(write(tmp_path, "a.yaml", text)))
    script = "trl kto --model_name_or_path Qwen/Qwen2.5-7B --max_length 1024\n"
    with pytest.raises(PlanError, match="trl kto compares or rewards answers"):
        read(str(write(tmp_path, "a.sh", script)))


SCRIPT = """
torchrun --nproc_per_node=4 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5 --model_max_length 512 \\
    --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --tf32 True
"""
"""tatsu-lab/stanford_alpaca README.md, Fine-tuning."""


def test_the_trainers_own_sharding_is_read(tmp_path: Path) -> None:
    """transformers, TrainingArguments.fsdp: full_shard is ZeRO-3, shard_grad_op ZeRO-2, auto_wrap a unit a block."""
    answer = mw.plan_from(write(tmp_path, "a.sh", SCRIPT), cluster="h100x4")
    layout = answer.plan.layout
    assert (layout.zero, layout.dp_shard, layout.micro_batch, answer.plan.recipe.sequence) == (3, 4, 4, 512)
    assert answer.software.word == "accelerate" and answer.plan.recipe.global_batch == 128
    two = mw.plan_from(write(tmp_path, "b.sh", SCRIPT.replace("full_shard", "shard_grad_op")), cluster="h100x4")
    assert two.plan.layout.zero == 2
    with pytest.raises(PlanError, match="without auto_wrap gathers the whole model at once"):
        read(str(write(tmp_path, "c.sh", SCRIPT.replace(" auto_wrap", ""))))
    with pytest.raises(PlanError, match="trains adapters in a way of its own program"):
        read(str(write(tmp_path, "d.sh", SCRIPT.replace("--tf32", "--lora_r 8 --tf32"))))


MEGATRON_DEEPSPEED = """
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --fp16 \\
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --tensor-model-parallel-size 2 --checkpoint-activations \\
    --deepspeed --zero-stage 1 --deepspeed_config ds.json
"""
"""bigscience-workshop/bigscience train/tr3-1B3-baseline (9e64edef), shortened. pretrain_gpt.py takes GPT-2's words."""


def test_megatron_deepspeed_is_read_with_its_own_switches(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.sh", MEGATRON_DEEPSPEED), cluster="h100x8")
    layout = answer.plan.layout
    assert (layout.zero, layout.tp, layout.dp_shard, layout.recompute) == (1, 2, 4, "full")
    assert answer.plan.model.vocab == 50257 and answer.estimator.stack.attention == "fused-softmax"
    flash = write(tmp_path, "b.sh", MEGATRON_DEEPSPEED.replace("--fp16", "--fp16 --use-flash-attn-v2"))
    assert mw.plan_from(flash, cluster="h100x8").estimator.stack.attention == "flash"
    with pytest.raises(PlanError, match="zero-stage 3 of DeepSpeed is not counted together with Megatron's"):
        read(str(write(tmp_path, "c.sh", MEGATRON_DEEPSPEED.replace("stage 1", "stage 3"))))


def test_what_a_launcher_says_is_read_where_it_is_a_number_and_is_no_mark_of_a_trainer(tmp_path: Path) -> None:
    text = MEGATRON_DEEPSPEED.replace("--num_nodes 1 --num_gpus 8", "--num_nodes 2 --num_gpus `nvidia-smi -L`")
    assert mw.plan_from(write(tmp_path, "a.sh", text), cluster="h100x8").plan.cluster.nodes == 2
    half = MEGATRON_DEEPSPEED.replace("--num_nodes 1 --num_gpus 8", "--num_nodes 4 --num_gpus 4")
    assert mw.plan_from(write(tmp_path, "b.sh", half), cluster="h100x8").plan.cluster.nodes == 2
    other = "torchrun --nproc_per_node 8 -m verl.trainer.main_ppo data.train_batch_size=8\n"
    with pytest.raises(PlanError, match=r"main_ppo is of a program that compares or rewards answers"):
        read(str(write(tmp_path, "c.sh", other)))


def test_what_trains_nothing_or_images_is_refused_whatever_model_is_given(tmp_path: Path) -> None:
    """Megatron-LM tools/run_text_generation_server.py; torchtitan experiments/flux/train_configs (d9cc6b4)."""
    script = write(tmp_path, "a.sh", MEGATRON_DEEPSPEED.replace("pretrain_gpt.py", "run_text_generation_server.py"))
    with pytest.raises(PlanError, match=r"run_text_generation_server\.py trains nothing"):
        read(str(script))
    for named in ("run_clm_prompted.py", "train_generator.py"):
        assert (
            read(str(write(tmp_path, "d.sh", MEGATRON_DEEPSPEED.replace("pretrain_gpt.py", named)))).shape is not None
        )
    both = f"python tools/generate_data.py --out x\n{MEGATRON_DEEPSPEED}"
    assert read(str(write(tmp_path, "b.sh", both))).shape is not None
    flux = '[model]\nname = "flux"\nflavor = "flux-dev"\n[training]\nbatch_size = 1\nseq_len = 512\nimg_size = 256\n'
    with pytest.raises(PlanError, match=r"training\.img_size=256 is of a model of images"):
        mw.plan_from(write(tmp_path, "c.toml", flux), model="llama-3.1-8b", cluster="h100x8")


def test_a_folder_of_codes_is_told_to_be_counted_in_16_bits(tmp_path: Path) -> None:
    text = FACTORY.replace("meta-llama/Llama-3.1-8B", "a/Llama-3.1-8B-Instruct-GPTQ")
    assert any("gptq in a/Llama" in sentence for sentence in read(str(write(tmp_path, "a.yaml", text))).uncounted)


@pytest.mark.parametrize(
    "key",
    ["--window-attn-skip-freq 4", "--softmax-type learnable", "--mask-prob 0.15", "--img-h 448",
     "--moe-expert-capacity-factor 1"],
)  # fmt: skip
def test_arguments_of_megatron_that_decide_are_refused(key: str, tmp_path: Path) -> None:
    """megatron/training/arguments.py (d98e8a64)."""
    with pytest.raises(PlanError, match=key.split()[0].lstrip("-")):
        read(str(write(tmp_path, "a.sh", MEGATRON_DEEPSPEED.replace("--fp16", f"--fp16 {key}"))))


RECIPE = """
import nemo_run as run
NAME = "qwen25_72b"


def pretrain_recipe(dir=None, tensor_parallelism: int = 8, pipeline_parallelism: int = 4, context_parallelism: int = 1,
                    num_nodes: int = 4, global_batch_size=32, micro_batch_size=1, seq_length=4096, fn=None):
    return run.Partial(
        fn,
        model=model(),
        trainer=qwen2_trainer(
            tensor_parallelism=tensor_parallelism, pipeline_parallelism=pipeline_parallelism,
            context_parallelism=context_parallelism, num_nodes=num_nodes,
        ),
        data=run.Config(
            MockDataModule, seq_length=seq_length, global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size
        ),
    )
"""
"""NVIDIA/NeMo nemo/collections/llm/recipes/qwen25_72b.py (8cfedd72)."""


def test_a_recipes_arguments_have_their_defaults(tmp_path: Path) -> None:
    plan = mw.plan_from(f"{write(tmp_path, 'a.py', RECIPE)}:pretrain_recipe", cluster="h100x8").plan
    assert (plan.model.name, plan.cluster.nodes, plan.recipe.sequence) == ("qwen2.5-72b", 4, 4096)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.micro_batch, plan.recipe.global_batch) == (8, 4, 1, 32)


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
dp_shard_size: 4
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 1
"""


def test_tensor_parallelism_of_axolotl_under_fsdp(tmp_path: Path) -> None:
    """axolotl docs/nd_parallelism.qmd: dp_shard_size x tensor_parallel_size devices, under FSDP2."""
    layout = mw.plan_from(write(tmp_path, "a.yaml", AXOLOTL), cluster="h100x8").plan.layout
    assert (layout.tp, layout.dp_shard, layout.zero) == (2, 4, 3)
    deepspeed = AXOLOTL[: AXOLOTL.index("fsdp_version")] + AXOLOTL[AXOLOTL.index("sequence_len") :]
    with pytest.raises(PlanError, match="without fsdp_config is not counted: DeepSpeed cuts the matrices"):
        read(str(write(tmp_path, "b.yaml", f"{deepspeed}deepspeed: zero2.json\n")))
    with pytest.raises(PlanError, match="expert_parallel_size=2 says how many ranks share the work"):
        read(str(write(tmp_path, "c.yaml", f"{AXOLOTL}expert_parallel_size: 2\n")))


def test_sharding_that_a_file_leaves_to_its_launcher_makes_a_bound(tmp_path: Path) -> None:
    """accelerate launch takes it from its own file, which a trainer's file need not name."""
    plain = PAIRS.replace("beta: 0.1\n", "").replace("deepspeed: zero3.json\n", "")
    told = mw.plan_from(write(tmp_path, "a.yaml", plain), cluster="h100x8").config.bounds
    assert any(sentence.startswith("Sharding is not said in the file") for sentence in told)
    sharded = mw.plan_from(write(tmp_path, "b.yaml", f"{plain}deepspeed: zero3.json\n"), cluster="h100x8").config.bounds
    assert not any(sentence.startswith("Sharding") for sentence in sharded)
    alone = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
    assert read(str(write(tmp_path, "c.yaml", alone))).bounds == ()


def test_old_words_of_torchtitan(tmp_path: Path) -> None:
    """torchtitan config_manager.py of September 2024, as YerevaNN/YNNtitan (8c3fea0) has it."""
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\nseq_len = 8192\n'
    wide = mw.plan_from(write(tmp_path, "a.toml", f"{text}data_parallel_degree = -1\n"), cluster="h100x8")
    narrow = mw.plan_from(write(tmp_path, "b.toml", f"{text}enable_float8_linear = true\n"), cluster="h100x8")
    assert (wide.plan.layout.dp_shard, wide.config.unknown) == (8, ())
    assert narrow.given.step_seconds < wide.given.step_seconds


def test_gpt_oss_of_torchtitan_is_known(tmp_path: Path) -> None:
    text = '[model]\nname = "gpt_oss"\nflavor = "20b"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n'
    answer = mw.plan_from(write(tmp_path, "a.toml", text), cluster="h100x8")
    assert answer.plan.model.name == "gpt-oss-20b"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_matrices_that_are_trained_whole_are_counted_as_peft_keeps_them(tmp_path: Path) -> None:
    """PEFT copies a module of modules_to_save, trains the copy and keeps what it was (utils/other.py)."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 320}  # fmt: skip
    theirs = peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    )
    config = tmp_path / "tiny"
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(config)
    text = f"base_model: {config}\nsequence_len: 64\nmicro_batch_size: 1\nadapter: lora\nlora_r: 4\n"
    text += "lora_target_modules: [q_proj, v_proj]\nlora_modules_to_save: [embed_tokens, lm_head]\n"
    shape = mw.plan_from(write(tmp_path, "a.yaml", text), model=str(config), cluster="h100x8").plan.model
    trained = sum(parameter.numel for parameter in parameters(shape) if parameter.trained)
    assert trained == sum(parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad)
    assert sum(parameter.numel for parameter in parameters(shape)) == sum(
        parameter.numel() for parameter in theirs.parameters()
    )
    with pytest.raises(PlanError, match="score are trained whole"):
        read(str(write(tmp_path, "b.yaml", text.replace("[embed_tokens, lm_head]", "[score]"))))


FACTORY = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: dpo\ndo_train: true\nfinetuning_type: lora\ntemplate: llama3\n"
    "cutoff_len: 1024\nper_device_train_batch_size: 2\nbf16: true\n"
)
"""hiyouga/LLaMA-Factory examples/train_lora/qwen3_lora_dpo.yaml (ff6d4d12), shortened."""
PAIRS = """
model_name_or_path: meta-llama/Llama-3.1-8B
beta: 0.1
max_length: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
deepspeed: zero3.json
"""
"""huggingface/alignment-handbook recipes/zephyr-7b-beta/dpo/config_full.yaml (925acdf), shortened."""


def test_a_loss_over_pairs_is_counted_with_two_answers_and_a_frozen_copy(tmp_path: Path) -> None:
    """trl/trainer/dpo_trainer.py (f2cd5771): chosen and rejected go through as one batch, and through `ref_model`,
    whose weights ZeRO-3 shares out (prepare_deepspeed)."""
    plain = PAIRS.replace("beta: 0.1\n", "")
    fine, pairs, asked = (
        mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")
        for text in (plain, PAIRS, f"{PAIRS}precompute_ref_log_probs: true\n")
    )
    assert (pairs.plan.layout.micro_batch, pairs.plan.recipe.global_batch) == (4, 128)
    assert (fine.plan.layout.micro_batch, fine.plan.recipe.global_batch) == (2, 64)
    assert pairs.plan.teacher == pairs.plan.model and asked.plan.teacher is None
    weights = sum(parameter.numel for parameter in parameters(pairs.plan.model))
    held = pairs.given.peak_bytes - asked.given.peak_bytes
    assert held == pytest.approx(2 * weights / 8, rel=0.01)
    assert pairs.given.step_seconds > 1.15 * asked.given.step_seconds
    assert any(sentence.startswith("Answers of a pair are two full sequences") for sentence in pairs.config.bounds)
    assert "gradient_checkpointing" in pairs.options(pairs.best.plan)


@pytest.mark.parametrize(
    ("name", "text", "copy"),
    [
        ("a.yaml", "base_model: meta-llama/Llama-3.1-8B\nrl: dpo\nsequence_len: 1024\nmicro_batch_size: 2\n", True),
        ("a.yaml", "base_model: meta-llama/Llama-3.1-8B\nrl: orpo\nsequence_len: 1024\nmicro_batch_size: 2\n", False),
        ("a.yaml", FACTORY, True), ("a.yaml", f"{FACTORY}pref_loss: orpo\n", False),
        ("a.sh", "python dpo.py --model_name_or_path meta-llama/Llama-3.1-8B --max_length 1024 --packing "
                 "--per_device_train_batch_size 2\n", True),
    ],
)  # fmt: skip
def test_words_of_trainers_for_losses_over_pairs(name: str, text: str, copy: bool, tmp_path: Path) -> None:
    """axolotl docs/rlhf.qmd; LLaMA-Factory src/llamafactory/hparams/finetuning_args.py, pref_loss and use_ref_model."""
    plan = mw.plan_from(write(tmp_path, name, text), cluster="h100x8").plan
    assert (plan.layout.micro_batch, plan.teacher is not None) == (4, copy)


LAUNCHED = """
torchrun --nnodes=1 --nproc_per_node=8 --master_port 29500 finetune.py --model_name_or_path Qwen/Qwen2.5-7B \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 4096 --bf16 True \\
    --gradient_checkpointing True --fsdp "full_shard auto_wrap" --learning_rate 1e-5 --num_train_epochs 3
"""
"""In the manner of tatsu-lab/stanford_alpaca's README: arguments of the Trainer, and no file of accelerate."""


@pytest.mark.parametrize("program", ["finetune.py", "sft.py"])
@pytest.mark.parametrize("words", ["full_shard", "shard_grad_op"])
def test_a_script_that_follows_the_advice_is_as_fast_as_it_says(program: str, words: str, tmp_path: Path) -> None:
    text = LAUNCHED.replace("finetune.py", program).replace("full_shard", words)
    answer = mw.plan_from(write(tmp_path, "a.sh", text), cluster="h100x8")
    assert answer.plan.layout.recompute == "full" and answer.best is not None and answer.config.unknown == ()
    advice = answer.options(answer.best.plan)
    assert "--gradient_checkpointing false" in advice and "layout." not in advice
    for option in re.findall(r'--(\w+) ("[^"]*"|\S+)', advice):
        text = re.sub(rf'--{option[0]} ("[^"]*"|\S+)', f"--{option[0]} {option[1]}", text)
    again = mw.plan_from(write(tmp_path, "b.sh", text), cluster="h100x8")
    assert again.plan.layout == answer.best.plan.layout
    assert again.given.step_seconds == pytest.approx(answer.best.step_seconds)


def test_the_devices_of_torchrun_are_those_of_the_run(tmp_path: Path) -> None:
    asked = mw.plan_from(write(tmp_path, "a.sh", LAUNCHED), cluster="h100x4").plan
    assert asked.cluster.nodes == 2 and asked.recipe.global_batch == 128
    asked = mw.plan_from(write(tmp_path, "b.sh", LAUNCHED.replace("nnodes=1", "nnodes=1:4")), cluster="h100x8").plan
    assert asked.cluster.nodes == 1
