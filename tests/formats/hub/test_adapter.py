"""Adapters in PEFT's format: PEFT gives the same logits, and what is written is read again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.formats.hub import export_folder
from meshwright.formats.hub.adapter import export_adapter, load_adapter, misread, save_adapter
from meshwright.model import Transformer, build
from meshwright.model.low_rank import merge_adapter
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.inventory import adapter_parts
from tests.model.shrunk import shrink, tokens

FORMS: dict[str, dict[str, Any]] = {
    "all": {},
    "rslora": {"rslora": True, "targets": "attention"},
    "dora": {"dora": True, "targets": "attention"},
    "some": {"targets": "o,down"},
}


def written(folder: Path, name: str, **form: Any) -> Transformer:
    """A small model with an adapter that says something: its base in folder/base, the adapter in folder/adapter."""
    shape = replace(shrink(name), lora=LoRAShape(rank=4, alpha=8.0, **form))
    adapted_model = build(shape)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in adapted_model.named_parameters():
            if key.endswith("lora.b"):
                parameter.normal_(0.0, 0.3)
            if key.endswith("magnitude"):
                parameter.uniform_(0.5, 1.5)
    base = {key: tensor for key, tensor in adapted_model.state_dict().items() if "lora." not in key}
    options: dict[str, Any] = {"shape": shape, "tokenizer": None, "dtype": torch.float32}
    export_folder(folder / "base", model_tensors=base.items(), **options)
    (folder / "adapter").mkdir()
    save_adapter(folder / "adapter", adapters(adapted_model), shape, base=str(folder / "base"), dtype=torch.float32)
    return adapted_model


def adapters(adapted_model: Transformer) -> dict[str, Tensor]:
    return {key: parameter.detach() for key, parameter in adapted_model.named_parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore")  # of PEFT's and transformers' own
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_peft_gives_the_same_logits(tmp_path: Path, name: str, form: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ours = written(tmp_path, name, **FORMS[form])
    ids = tokens(2, 13)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
    assert (theirs - plain).abs().max() > 1e-2
    torch.testing.assert_close(ours(ids), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v3"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str, form: str) -> None:
    """The products B A are equal. Modules that are several of ours come back with a larger rank."""
    ours = written(tmp_path, name, **FORMS[form])
    shape, loaded = load_adapter(tmp_path / "adapter", ours.shape.base)
    assert shape.lora is not None and ours.shape.lora is not None
    trained = adapters(ours)
    for key in {key.rpartition(".")[0] for key in trained}:
        matrix = key.removesuffix(".lora") + ".weight" if key.endswith(".lora") else key.removesuffix("_lora")
        weight = ours.get_parameter(matrix).detach()
        back = merge_adapter(weight, adapter_parts(matrix, loaded), shape.lora)
        right = merge_adapter(weight, adapter_parts(matrix, trained), ours.shape.lora)
        torch.testing.assert_close(back, right, rtol=1e-5, atol=1e-6)
    assert {key.rpartition(".")[0] for key in loaded} == {key.rpartition(".")[0] for key in trained}


@pytest.mark.parametrize(
    ("name", "targets"), [("mixtral-8x7b", "gate,up"), ("qwen3-30b-a3b", "gate"), ("deepseek-v3", "all")]
)
def test_what_peft_would_read_as_another_adapter_is_not_written(tmp_path: Path, name: str, targets: str) -> None:
    adapted_model = written(tmp_path, name, targets=targets)
    options: dict[str, Any] = {"base": str(tmp_path / "base"), "dtype": torch.float32}
    with pytest.raises(HubError, match=r"PEFT would read other adapters of experts .* export the merged model"):
        export_adapter(tmp_path / "out", adapters(adapted_model), adapted_model.shape, **options)
    assert not (tmp_path / "out").exists()
    for right in ("attention", "down") if name != "deepseek-v3" else ("attention",):
        assert not misread(replace(adapted_model.shape, lora=LoRAShape(rank=4, targets=right)))


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ("model.embed_tokens.lora_embedding_A", "is no tensor of a LoRA or DoRA adapter"),
        ("lm_head.lora_A.weight", "adapts a matrix that has no adapter here"),
        ("model.layers.0.mlp.gate.lora_A.weight", "adapts a matrix that has no adapter here"),
        ("model.layers.0.mlp.experts.lora_A.weight", "adapts a stack of experts, as PEFT 0.21 writes them"),
        ("model.layers.9.mlp.gate.lora_A.weight", "adapts no matrix of"),
    ],
)
def test_what_an_adapter_has_beside_is_named(tmp_path: Path, tensor: str, sentence: str) -> None:
    adapted_model = written(tmp_path, "qwen3-30b-a3b")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    stored[f"base_model.model.{tensor}"] = torch.zeros(4, 4)
    save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(HubError, match=sentence):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "llama-3.1-8b")
    other: ModelShape = replace(shrink("llama-3.1-8b"), layers=1)
    with pytest.raises(HubError, match=r"model.layers.1.self_attn.q_proj.lora_A.weight adapts no matrix of"):
        load_adapter(tmp_path / "adapter", other)
    wider = replace(shrink("llama-3.1-8b"), ffn=200)
    with pytest.raises(HubError, match=r"is for another model"):
        load_adapter(tmp_path / "adapter", wider)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "mixtral-8x7b"])
def test_an_adapter_of_fewer_layers_is_refused(tmp_path: Path, name: str) -> None:
    """PEFT only warns of it; one whose config names the layers is for all the model's."""
    written(tmp_path, name)
    deeper: ModelShape = replace(shrink(name), layers=4)
    with pytest.raises(HubError, match=r"names \S*\.3\.\S+, .* for as many layers as"):
        load_adapter(tmp_path / "adapter", deeper)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers_to_transform": [0, 1, 2]}))
    assert load_adapter(tmp_path / "adapter", deeper)[1]


@pytest.mark.parametrize("form", ["all", "dora"])
def test_a_fused_module_of_another_size_is_refused(tmp_path: Path, form: str) -> None:
    """Its parts are cut by rows only once they are known to be as long as the model's."""
    written(tmp_path, "gpt2", **FORMS[form])
    wider = replace(shrink("gpt2"), hidden=48, head_dim=12)
    with pytest.raises(
        HubError, match=r"h.0.attn.c_attn.weight is \[12, 24\], and gpt2-124m has \[12, 48\]\. Give the"
    ):
        load_adapter(tmp_path / "adapter", wider)


def test_experts_of_several_ranks_are_refused(tmp_path: Path) -> None:
    adapted_model = written(tmp_path, "qwen3-30b-a3b")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expert = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_"
    stored[f"{expert}A.weight"], stored[f"{expert}B.weight"] = torch.zeros(2, 24), torch.zeros(40, 2)
    save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(HubError, match=r"lora_A.weight of .*experts.1.up_proj.weight is \[2, 24\]"):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"r": 0}, "has rank 4, and adapter_config.json 1 to 1"),
        ({"r": float("inf")}, "cannot convert float infinity"),
        ({"lora_alpha": 10**400}, "int too large"),
        ({"rank_pattern": [1]}, "'list' object has no attribute"),
        ({"alpha_pattern": {"q_proj": "x"}}, "could not convert string to float: 'x'"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern must have finite numbers"),
        ({"alpha_pattern": {"(": 1}}, "missing \\)"),
        ({"alpha_pattern": {r"(\w|.)+!": 1}}, "which may take hours to match"),
        ({"alpha_pattern": {".*" * 20 + "!": 1}}, "which may take hours to match"),
        ({"alpha_pattern": {"(a|.)" * 40 + "!": 1}}, "which may take hours to match"),
        ({"alpha_pattern": {"q_proj" * 50: 1}}, "which may take hours to match"),
    ],
)
def test_what_a_config_asks_for_and_is_not_there_is_refused(
    tmp_path: Path, entry: dict[str, Any], sentence: str
) -> None:  # fmt: skip
    adapted_model = written(tmp_path, "llama-3.1-8b")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | entry))
    with pytest.raises(HubError, match=sentence):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    path.write_text(json.dumps(config))
    with pytest.raises(HubError, match=r"has no adapter_model.safetensors"):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)


@pytest.mark.parametrize("text", ["[]", "null", '{"a": ' + "[" * 200_000, ""])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    adapted_model = written(tmp_path, "llama-3.1-8b")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(HubError, match=r"adapter_config\.json (must hold a JSON object|is not JSON)"):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)
    path.unlink()
    with pytest.raises(HubError, match=r"has no adapter_config\.json"):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)


@pytest.mark.parametrize("sizes", [((0, 24), (24, 0)), ((), (24, 4))], ids=str)
def test_a_module_without_a_rank_is_refused(tmp_path: Path, sizes: tuple[tuple[int, ...], ...]) -> None:
    adapted_model = written(tmp_path, "llama-3.1-8b")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for part, size in zip("AB", sizes, strict=True):
        stored[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] = torch.zeros(size)
    save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(HubError, match=r"q_proj\.weight has rank 0, and adapter_config\.json 1 to 4"):
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)


def test_patterns_of_modules_are_matched_as_peft_matches_them(tmp_path: Path) -> None:
    """The first key that fits counts, as the end of a name or as a pattern."""
    adapted_model = written(tmp_path, "llama-3.1-8b")
    path = tmp_path / "adapter" / "adapter_config.json"
    plain = load_adapter(tmp_path / "adapter", adapted_model.shape.base)[1]
    pattern = {r"layers\.(0|7)\..*q_proj": 16.0, "^model.layers.1.self_attn.q_proj": 24.0, "q_proj": 1.0, "k_proj": 32}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": pattern}))
    changed = load_adapter(tmp_path / "adapter", adapted_model.shape.base)[1]
    for name, times in {"layers.0.attention.q": 2, "layers.1.attention.q": 3, "layers.0.attention.k": 4}.items():
        torch.testing.assert_close(changed[f"{name}.lora.b"], times * plain[f"{name}.lora.b"])


def test_part_of_a_fused_module_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"is one matrix in PEFT's format, and only some of"):
        written(tmp_path, "gpt2", targets="q")


def test_an_adapter_that_would_grow_many_times_is_not_taken_from_others(tmp_path: Path) -> None:
    """Its parts have one rank in memory: a config that names another one asks for room that no file holds."""
    adapted_model = written(tmp_path, "llama-3.1-8b")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    for rank, fits in ((16, True), (64, False)):
        path.write_text(json.dumps(config | {"rank_pattern": {"another": rank}}))
        load_adapter(tmp_path / "adapter", adapted_model.shape.base)
        if fits:
            load_adapter(tmp_path / "adapter", adapted_model.shape.base, widest=256)
            continue
        with pytest.raises(HubError, match=rf"with rank {rank} everywhere it has .* numbers, and adapter_model"):
            load_adapter(tmp_path / "adapter", adapted_model.shape.base, widest=256)
