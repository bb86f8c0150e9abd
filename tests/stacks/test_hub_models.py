"""Models by their names on the hub: published shapes, tuned copies, guesses that are told, names of other models."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec.errors import PlanError
from meshwright.spec.weights.inventory import parameters
from meshwright.stacks.config_reading import read
from meshwright.stacks.declaration.plan_facts import likely_preset, preset_of_hub, published_models, published_shape
from tests.stacks.test_reading import write


@pytest.mark.parametrize("name", published_models())
def test_a_published_shape_has_as_many_parameters_as_its_repository_says(name: str) -> None:
    """`safetensors.total` of https://huggingface.co/api/models/REPOSITORY."""
    entry = published_models()[name]
    assert sum(parameter.numel for parameter in parameters(published_shape(name))) == entry["parameters"]
    assert str(entry["source"]).startswith("https://huggingface.co/")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"), ("codellama/CodeLlama-7b-hf", "codellama-7b"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b"), ("HuggingFaceTB/SmolLM3-3B", "smollm3-3b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3.5-mini"), ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b-v0.1"),
        ("deepcogito/cogito-v1-preview-llama-3B", "llama-3.2-3b"), ("lmsys/vicuna-7b-v1.5", "llama-2-7b"),
        ("Qwen/Qwen3Guard-Gen-0.6B", "qwen3-0.6b"), ("openlm-research/open_llama_3b_v2", "open-llama-3b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"), ("google/gemma-2b-it", "gemma-2b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
    ],
)  # fmt: skip
def test_a_name_means_its_published_shape(name: str, shape: str) -> None:
    actual = preset_of_hub(name)
    assert actual is not None and actual.name == shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("NousResearch/Nous-Hermes-Llama2-13b", "llama-2-13b"), ("runs/Meta-Llama-3.1-8B/1e-5", "llama-3.1-8b"),
        ("scb10x/llama-3-typhoon-v1.5x-8b-instruct", "llama-3-8b"), ("a/Qwen2.5-7B-mine-v1", "qwen2.5-7b"),
        ("a/llama-3-1-8b-math-orca", "llama-3.1-8b"), ("a/qwen2-5-7b-x", "qwen2.5-7b"),
        ("a/llama-3-8b-1e-5", "llama-3-8b"), ("./gpt-oss-120b-w4a16-experts", "gpt-oss-120b"),
        ("teknium/OpenHermes-2.5-Mistral-7B", "mistral-7b-v0.1"), ("a/vigogne-2-7b-instruct", "llama-2-7b"),
    ],
)  # fmt: skip
def test_a_copy_is_taken_by_family_and_size_and_that_is_said(name: str, shape: str, tmp_path: Path) -> None:
    text = f"base_model: {name}\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: lora\nlora_r: 8\n"
    answer = mw.plan_from(write(tmp_path, "a.yaml", text), cluster="h100x8")
    assert answer.plan.model.name == shape
    assert f"The model {name} is taken as {shape}, by its name: give MODEL for another." in answer.config.uncounted


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2-VL-7B-Instruct", "meta-llama/Llama-3.2-11B-Vision", "meta-llama/Llama-Guard-3-8B", "a/llama-3-2x8b",
        "nvidia/Llama-3_1-Nemotron-51B", "microsoft/Phi-3.5-MoE-instruct", "google/medgemma-4b-it", "a/Storyteller-7B",
        "Qwen/Qwen2-57B-A14B", "openai/whisper-large-v3",
    ],
)  # fmt: skip
def test_a_model_with_other_parts_is_none_of_its_family(name: str) -> None:
    assert preset_of_hub(name) is None and likely_preset(name) is None


def test_a_model_that_is_not_known_may_be_given(tmp_path: Path) -> None:
    text = "base_model: a/Storyteller-7B\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: lora\nlora_r: 8\n"
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(PlanError, match=r"give MODEL, a preset or a folder with its config\.json.*hf download a/Story"):
        read(str(path))
    assert mw.plan_from(path, model="llama-2-7b", cluster="h100x8").plan.model.name == "llama-2-7b"


def test_what_a_script_takes_from_outside_is_asked_for_or_refused(tmp_path: Path) -> None:
    start = "python sft.py --model_name_or_path $1 --max_length 2048 --packing --gradient_accumulation_steps $2"
    path = write(tmp_path, "a.sh", f"{start} --per_device_train_batch_size 1\n")
    with pytest.raises(PlanError, match=r"model \$1 is set outside the file: give MODEL"):
        mw.plan_from(path, cluster="h100x8")
    with pytest.raises(PlanError, match="the batch is missing"):
        mw.plan_from(path, model="llama-3.2-1b", cluster="h100x8")
    answer = mw.plan_from(path, model="llama-3.2-1b", cluster="h100x8", recipe={"global_batch": 64})
    assert (answer.plan.recipe.global_batch, answer.plan.layout.micro_batch) == (64, 1)
    cut = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    with pytest.raises(PlanError, match=r"tensor-model-parallel-size=\$TP is set outside the file, and decides"):
        read(str(write(tmp_path, "b.sh", f"{cut} --vocab-size 64 --tensor-model-parallel-size $TP\n")))
