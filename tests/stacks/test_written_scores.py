"""Files that ask for transformers' eager attention: what it keeps, beside autograd of transformers."""

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.stacks.config_reading import read
from tests.stacks.test_reading import AXOLOTL, write

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")


@pytest.mark.parametrize("word", ["axolotl", "trl"])
def test_attention_that_writes_its_weights_keeps_what_transformers_keeps(word: str, tmp_path: Path) -> None:
    text = AXOLOTL if word == "axolotl" else "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 4096\n"
    text = text.replace("gradient_checkpointing: true\n", "") + "gradient_checkpointing: false\n"
    stacks = {}
    for kind in ("sdpa", "flash_attention_2", "kernels-community/flash-attn3", "eager"):
        config = read(str(write(tmp_path, "a.yaml", f"{text}attn_implementation: {kind}\n")), word)
        stacks[kind] = config.software.stack(config.facts)
    assert {stacks[kind].attention for kind in stacks if kind != "eager"} == {"flash"}
    assert stacks["eager"].attention == "unfused"
    assert stacks["eager"].score_kept + 2 == _bytes_of_a_kept_score()


def _bytes_of_a_kept_score() -> float:
    """By autograd: what one layer of transformers keeps beside matrices as wide as its scores."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model, length = transformers.LlamaForCausalLM(config).bfloat16().train(), 96
    saved: dict[int, int] = {}

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (length, length) and tensor.numel() == 2 * length**2:
            saved[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = model(torch.zeros(1, length, dtype=torch.long)).logits.sum()
    assert loss.requires_grad
    return sum(saved.values()) / (2 * length**2)


@pytest.mark.parametrize("word", ["axolotl", "accelerate"])
def test_the_file_needs_more_memory_for_it(word: str, tmp_path: Path) -> None:
    """axolotl's older switch, and LLaMA-Factory's word."""
    switch = "eager_attention: true\n" if word == "axolotl" else "flash_attn: disabled\n"
    factory = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 2048\n"
    factory += "disable_gradient_checkpointing: true\n"
    text = AXOLOTL if word == "axolotl" else f"{factory}per_device_train_batch_size: 1\ntemplate: qwen\n"
    plain, written = (
        mw.plan_from(write(tmp_path, name, more), cluster="h100x8", stack=word).given.peak_bytes
        for name, more in (("a.yaml", text), ("b.yaml", text + switch))
    )
    assert written > plain
