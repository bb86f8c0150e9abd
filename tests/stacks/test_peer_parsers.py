"""The files of `--for`, parsed by the software they are for: ten models each. A peer that is not here skips."""

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.stacks.config_files import entries_of, file_texts
from meshwright.stacks.declaration.plan_facts import hub_name, preset_of_hub
from meshwright.stacks.trainer_table import SOFTWARE
from meshwright.stacks.trainers.maxtext import MODELS as MAXTEXT
from meshwright.stacks.trainers.nemo import RECIPES as NEMO
from meshwright.stacks.trainers.torchtitan import MODELS as TITAN

TEN = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "qwen2.5-72b",
    "qwen3-14b", "mistral-7b-v0.3", "mixtral-8x7b",
)  # fmt: skip


def written(word: str, model: str, folder: Path, cluster: str = "h100x8", **layout: Any) -> Plan:
    software = SOFTWARE[word]
    degrees = {"dp_shard": 8, "zero": 3, "micro_batch": 2, "recompute": "full", **layout}
    plan = Plan(
        model=presets.model(model), recipe=Recipe(precision="bf16", sequence=4096, global_batch=64),
        layout=Layout(**degrees), cluster=presets.cluster(cluster, 1),
    )  # fmt: skip
    for name, text in file_texts(software, plan).items():
        (folder / name).write_text(text, encoding="utf-8")
    return plan


@pytest.mark.parametrize("word", ["accelerate", "trl"])
@pytest.mark.parametrize("model", TEN)
def test_accelerate_loads_its_file(model: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    written(word, model, tmp_path)
    parsed = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (parsed.num_processes, parsed.mixed_precision, str(parsed.distributed_type.value)) == (8, "bf16", "FSDP")
    assert parsed.fsdp_config["fsdp_reshard_after_forward"] is True
    assert parsed.fsdp_config["fsdp_activation_checkpointing"] is True


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # of transformers 5.24
@pytest.mark.parametrize("model", TEN)
def test_trl_parses_its_yaml(model: str, tmp_path: Path) -> None:
    """The parser of `trl sft`: an argument that it does not know is an error."""
    pytest.importorskip("trl")
    from trl.scripts.sft import make_parser

    written("trl", model, tmp_path)
    words = ["--config", str(tmp_path / "sft.yaml"), "--use_cpu", "true"]
    script, training, chosen, _ = make_parser().parse_args_and_config(words, fail_with_unknown_args=True)
    assert (script.dataset_name, training.max_length, training.packing) == ("DATASET", 4096, True)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.bf16, training.gradient_checkpointing, training.optim) == (True, False, "adamw_torch_fused")
    assert presets.model(model) == preset_of_hub(chosen.model_name_or_path)


@pytest.mark.parametrize("word", ["accelerate", "deepspeed"])
def test_transformers_knows_the_arguments_of_its_trainer(word: str, tmp_path: Path) -> None:
    """But for those of run_clm.py itself."""
    from dataclasses import fields

    transformers = pytest.importorskip("transformers")
    written(word, "llama-3.1-8b", tmp_path)
    document = json.loads((tmp_path / "run_clm.json").read_text(encoding="utf-8"))
    known = {field.name for field in fields(transformers.TrainingArguments)}
    assert set(document) - known == {"model_name_or_path", "block_size", "dataset_name"}


@pytest.mark.parametrize("model", TEN)
def test_deepspeed_takes_its_json(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)  # of a run that is not started

    class Groups:
        def get_data_parallel_world_size(self) -> int:
            return 8

    written("deepspeed", model, tmp_path)
    parsed = DeepSpeedConfig(json.loads((tmp_path / "deepspeed.json").read_text(encoding="utf-8")), mpu=Groups())
    assert parsed.zero_optimization_stage == 3
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu) == (64, 2)
    assert parsed.gradient_accumulation_steps == 4
    assert parsed.bfloat16_config.enabled


@pytest.mark.parametrize("model", list(TITAN)[:10])
def test_torchtitan_has_every_attribute_that_is_set(model: str, tmp_path: Path) -> None:
    """Its own classes take each assignment of the Python configuration: they are slotted, and refuse other names."""
    pytest.importorskip("torchtitan")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    from meshwright.stacks.declaration.option import Called

    written("torchtitan", model, tmp_path, tp=2, sp=True, dp_shard=4)
    parts = {"training": TrainingConfig(), "parallelism": ParallelismConfig(), "compile": CompileConfig()}
    for entry in entries_of(tmp_path / "torchtitan_plan.py"):
        section, dot, name = entry.key.partition(".")
        if dot:
            assert hasattr(parts[section], name)
            setattr(parts[section], name, entry.value)
        elif section == "activation_checkpoint":
            assert entry.value == Called(name="FullAC.Config")
    assert parts["parallelism"].tensor_parallel_degree == 2
    assert (parts["training"].local_batch_size, parts["training"].seq_len) == (2, 4096)


@pytest.mark.parametrize("model", TEN)
def test_megatron_parses_its_arguments(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of Megatron-LM itself, from its source beside the installed megatron-core."""
    arguments = pytest.importorskip("megatron.training.arguments")

    written("megatron-lm", model, tmp_path, zero=1, tp=2, sp=True, dp_shard=4)
    words = ["pretrain_gpt.py"]
    for entry in entries_of(tmp_path / "arguments.sh"):
        words += [entry.key] if entry.value is True else [entry.key, str(entry.value)]
    monkeypatch.setattr(sys, "argv", words)
    parsed = arguments.parse_args()
    shape = presets.model(model)
    assert (parsed.num_layers, parsed.hidden_size, parsed.ffn_hidden_size) == (shape.layers, shape.hidden, shape.ffn)
    assert (parsed.tensor_model_parallel_size, parsed.sequence_parallel, parsed.use_distributed_optimizer) == (
        2,
        True,
        True,
    )
    assert (parsed.micro_batch_size, parsed.global_batch_size, parsed.seq_length) == (2, 64, 4096)
    assert parsed.recompute_granularity == "full"
    assert parsed.bf16


def test_megatron_parses_experts_latent_attention_and_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    piped: dict[str, Any] = {"dp_shard": 1, "pp": 6, "vp": 2, "schedule": "interleaved", "micro_batch": 4}
    parsed = {}
    for model, layout in (("deepseek-v3", {"ep": 8}), ("llama-3.1-8b", piped)):
        written("megatron-lm", model, tmp_path, zero=1, **layout)
        entries = entries_of(tmp_path / "arguments.sh")
        words = [
            word
            for entry in entries
            for word in ([entry.key] if entry.value is True else [entry.key, str(entry.value)])
        ]
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        parsed[model] = arguments.parse_args()
    experts = parsed["deepseek-v3"]
    assert (experts.moe_token_dispatcher_type, experts.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert (experts.moe_grouped_gemm, experts.moe_router_score_function, experts.moe_router_num_groups) == (
        True, "sigmoid", 8,
    )  # fmt: skip
    assert (experts.moe_layer_freq, experts.rotary_scaling_factor) == ([0] * 3 + [1] * 58, 40.0)
    assert parsed["llama-3.1-8b"].microbatch_group_size_per_vp_stage == 8  # of 16; rounds of 6 leave 4
    assert parsed["llama-3.1-8b"].use_rope_scaling


@pytest.mark.parametrize("model", TEN)
def test_axolotl_takes_its_yaml(model: str, tmp_path: Path) -> None:
    """Its own schema takes the values and has a field of each name: it drops others without a word."""
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlInputConfig
    import yaml

    written("axolotl", model, tmp_path)
    document = yaml.safe_load((tmp_path / "axolotl.yaml").read_text(encoding="utf-8"))
    assert set(document) <= set(schema.model_fields)
    parsed = schema(**document)
    assert (parsed.sequence_len, parsed.micro_batch_size, parsed.gradient_accumulation_steps) == (4096, 2, 4)
    assert set(document["fsdp_config"]) <= set(type(parsed.fsdp_config).model_fields)
    assert parsed.fsdp_config.reshard_after_forward is True
    assert (parsed.dp_shard_size, parsed.gradient_checkpointing, parsed.optimizer) == (8, True, "adamw_torch_fused")


@pytest.mark.parametrize("model", [name for name in TEN if not name.startswith(("qwen", "mixtral"))])
def test_nanotron_parses_its_yaml(model: str, tmp_path: Path) -> None:
    """Its own loader, which refuses keys and types that it does not know."""
    config = pytest.importorskip("nanotron.config", exc_type=ImportError)
    written("nanotron", model, tmp_path, zero=1, tp=2, sp=True, dp_shard=4)
    parsed, shape = config.get_config_from_file(str(tmp_path / "nanotron.yaml")), presets.model(model)
    llama = parsed.model.model_config
    assert isinstance(llama, config.LlamaConfig)
    assert (llama.num_hidden_layers, llama.hidden_size, llama.num_key_value_heads, llama.vocab_size) == (
        shape.layers, shape.hidden, shape.kv_heads, shape.vocab,
    )  # fmt: skip
    assert (parsed.parallelism.dp, parsed.parallelism.tp, parsed.parallelism.tp_mode.name) == (4, 2, "REDUCE_SCATTER")
    assert (parsed.tokens.micro_batch_size, parsed.tokens.batch_accumulation_per_replica) == (2, 8)
    assert (parsed.optimizer.zero_stage, parsed.parallelism.recompute_layer) == (1, True)


def bridge_source() -> Path:
    """The installed source of Megatron-Bridge: importing it takes Transformer Engine and a GPU."""
    spec = find_spec("megatron")
    folders = [Path(name) / "bridge" for name in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        if (folder / "recipes").is_dir():
            return folder
    pytest.skip("Megatron-Bridge's source is not here")


def names_of(folder: Path) -> set[str]:
    """`section.name` of all that its recipes set, and the fields of its own classes of configuration."""
    names = set()
    for path in (folder / "recipes").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(ast.unparse(node).partition(".")[2])
    for section in ("comm_overlap", "mixed_precision"):
        for node in ast.walk(ast.parse((folder / "training" / f"{section}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(f"{section}.{node.target.id}")
    return names


@pytest.mark.parametrize("model", list(NEMO)[:10])
def test_megatron_bridge_has_every_option_and_recipe(model: str, tmp_path: Path) -> None:
    folder = bridge_source()
    plan = written("nemo", model, tmp_path, zero=1, tp=2, sp=True, dp_shard=4)
    module, start = NEMO[model]
    recipes = (folder / "recipes" / module / "__init__.py").read_text(encoding="utf-8")
    assert f"{start}_pretrain_config," in recipes
    set_here = {entry.key for entry in entries_of(tmp_path / "nemo_plan.py") if "." in entry.key}
    assert {"model.tensor_model_parallel_size", "train.micro_batch_size", "ddp.overlap_grad_reduce"} <= set_here
    assert set_here <= names_of(folder)
    sources = "".join(path.read_text(encoding="utf-8") for path in (folder / "recipes" / module).rglob("*.py"))
    hub = str(hub_name(plan.model)).rpartition("/")[2].replace("Llama-3", "").replace("Llama-2-7b-hf", "Llama-2-7b")
    assert hub in sources


@pytest.mark.filterwarnings("ignore")  # of JAX and what it loads
@pytest.mark.parametrize("model", list(MAXTEXT))
def test_maxtext_parses_its_yaml(model: str, tmp_path: Path) -> None:
    """Its own loader over its base.yml: other names are an error, and it counts the batch from its mesh."""
    pyconfig = pytest.importorskip("maxtext.configs.pyconfig")
    plan = written("maxtext", model, tmp_path, tp=2, sp=True, dp_shard=2, dp_replicate=2)
    alone = ["internal_compile=true", "internal_compile_num_devices=8", "skip_jax_distributed_system=true"]
    parsed = pyconfig.initialize_pydantic(["", str(tmp_path / "maxtext.yml"), *alone])
    assert (parsed.ici_tensor_parallelism, parsed.ici_fsdp_parallelism, parsed.ici_data_parallelism) == (2, 2, 2)
    assert parsed.micro_batch_size_to_train_on == 2 * 4
    assert parsed.global_batch_size_to_train_on == plan.recipe.global_batch
    assert (parsed.max_target_length, parsed.remat_policy, parsed.hardware) == (4096, "full", "gpu")
    shape = plan.model
    assert (parsed.num_decoder_layers, parsed.emb_dim) == (shape.layers, shape.hidden)
    assert (parsed.num_query_heads, parsed.num_kv_heads, parsed.head_dim) == (
        shape.heads, shape.kv_heads, shape.head_dim,
    )  # fmt: skip
    assert (parsed.mlp_dim, parsed.vocab_size, parsed.logits_via_embedding) == (shape.ffn, shape.vocab, shape.tied)


@pytest.mark.filterwarnings("ignore")  # the same
def test_maxtext_takes_every_axis_and_policy(tmp_path: Path) -> None:
    pyconfig = pytest.importorskip("maxtext.configs.pyconfig")
    alone = ["internal_compile=true", "internal_compile_num_devices=8", "skip_jax_distributed_system=true"]
    on = {"none": "h100x8", "selective": "tpu-v6ex8", "full": "tpu-v5px8"}
    for recompute, cluster in on.items():
        written("maxtext", "llama-3.1-8b", tmp_path, cluster, tp=2, sp=True, cp=2, dp_shard=2, recompute=recompute)
        parsed = pyconfig.initialize_pydantic(["", str(tmp_path / "maxtext.yml"), *alone])
        assert (parsed.ici_context_parallelism, parsed.per_device_batch_size) == (2, 0.5)
        assert parsed.hardware == ("gpu" if cluster == "h100x8" else "tpu")
        assert parsed.remat_policy == {"none": None, "selective": "minimal", "full": "full"}[recompute]
