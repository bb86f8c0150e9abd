"""NeMo 1: the YAML of megatron_gpt_pretraining.py, and what its options mean in Megatron-LM's arguments."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.config_reading import read
from tests.stacks.test_reading import write

GPT = """
name: megatron_gpt
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  normalization: rmsnorm
  layernorm_epsilon: 1e-5
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  megatron_amp_O2: true
  activations_checkpoint_granularity: selective
  tokenizer:
    library: sentencepiece
    type: Llama2Tokenizer
  optim:
    name: distributed_fused_adam
"""
"""In the manner of NVIDIA/NeMo examples/nlp/language_modeling/conf/megatron_llama_config.yaml (r1.23)."""
ARGUMENTS = """torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --swiglu \\
    --bf16 \\
    --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --position-embedding-type rope \\
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --cross-entropy-loss-fusion \\
    --tokenizer-type Llama2Tokenizer --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 \\
    --global-batch-size 128 --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity selective
"""


def test_a_yaml_of_nemo_1_means_what_megatrons_arguments_mean(tmp_path: Path) -> None:
    answer = mw.plan_from(write(tmp_path, "a.yaml", GPT), cluster="h100x8")
    same = mw.plan_from(write(tmp_path, "a.sh", ARGUMENTS), cluster="h100x8")
    assert answer.software.word == "nemo" and answer.plan.layout == same.plan.layout
    assert answer.plan.cluster.nodes == 2 and answer.plan.recipe.sequence == same.plan.recipe.sequence
    assert answer.plan.model == same.plan.model == presets.model("llama-2-7b")
    assert answer.given.peak_bytes == same.given.peak_bytes


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("bias: false", "bias: false\n  peft:\n    peft_scheme: lora", "peft_scheme=lora trains adapters"),
        ("name: distributed_fused_adam", "name: muadamw", "optim.name=muadamw is not counted"),
        ("activation: fast-swiglu", "activation: squared-relu", "activation=squared-relu is not counted"),
        ("normalization: rmsnorm", "normalization: scale", "normalization=scale is not counted"),
        ("precision: bf16", "precision: fp8", "precision=fp8 is not counted"),
        ("bias: false", "bias: false\n  mcore_customization_config:\n    parallel_attention: true", "side by side"),
        ("bias: false", "bias: false\n  enc_num_layers: 2", "of another model than GPT"),
    ],
)  # fmt: skip
def test_what_nemo_1_has_beside_gpt_is_refused_by_its_key(old: str, new: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=why):
        read(str(write(tmp_path, "a.yaml", GPT.replace(old, new))))


def test_layers_before_megatron_core_write_the_weights_of_attention(tmp_path: Path) -> None:
    """CoreAttention of nemo/collections/nlp/modules/common/megatron/attention.py, without use_flash_attention."""
    old = GPT.replace("  mcore_gpt: true\n", "").replace("granularity: selective", "granularity: null")
    flash = old.replace("  micro_batch_size: 1", "  use_flash_attention: true\n  micro_batch_size: 1")
    written, read_twice = (
        mw.plan_from(write(tmp_path, name, text), cluster="h100x8").given.peak_bytes
        for name, text in (("a.yaml", old), ("b.yaml", flash))
    )
    assert written > read_twice


def test_a_key_that_is_in_no_list_is_named(tmp_path: Path) -> None:
    text = GPT.replace("  bias: false", "  bias: false\n  number_of_wheels: 4")
    assert read(str(write(tmp_path, "a.yaml", text))).unknown == ("model.number_of_wheels (line 23)",)


def test_weights_in_fp32_under_autocast_are_told(tmp_path: Path) -> None:
    text = GPT.replace("megatron_amp_O2: true", "megatron_amp_O2: false")
    assert "megatron_amp_O2=false holds weights in fp32" in "".join(
        read(str(write(tmp_path, "a.yaml", text))).uncounted
    )
