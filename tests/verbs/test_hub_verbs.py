"""`import` and `export`: a directory becomes a run, which generates, trains on and is exported again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.formats.hub import HubFolder, export_folder, import_folder
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.interface.trained.opening import load
from meshwright.spec import MLAShape, ModelShape, MoEShape
from meshwright.spec.errors import CheckpointError, HubError, PlanError, RunError
from meshwright.store.model_weights import MASTER
from meshwright.verbs.export.answer import write_directory
from meshwright.verbs.import_.answer import import_hf
from meshwright.verbs.main import main

SIZES: dict[str, Any] = {"vocab": 2048, "layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "max_positions": 64}
LLAMA = ModelShape(**SIZES)
GPT2: dict[str, Any] = {"norm": "layernorm", "positions": "learned", "mlp": "gelu_tanh", "tied": True}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
EXPERTS = MoEShape(experts=4, top_k=2, ffn=8, shared_experts=1, first_dense=1, scoring="sigmoid", correction_bias=True)
LATENT = MLAShape(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)
SHAPES = {
    "llama": LLAMA,
    "gpt2": ModelShape(**SIZES, **GPT2, **BIASES, family="gpt2"),
    "deepseek": ModelShape(**SIZES, family="deepseek_v3", mla=LATENT, moe=EXPERTS),
}
TEMPLATE = "{{ messages }}"


def directory(folder: Path, shape: ModelShape = LLAMA, **options: Any) -> dict[str, Tensor]:
    """Write a random model as a Hugging Face directory. Returns its tensors under Meshwright's names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in tensor_sizes(shape).items()}
    settings: dict[str, Any] = {"tokenizer": Tokenizer.shipped(), "dtype": torch.float32, **options}
    export_folder(folder, model_tensors=tensors.items(), shape=shape, **settings)
    return tensors


def weights(folder: HubFolder) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    folder.load(lambda name, tensor: tensors.update({name: tensor}))
    return tensors


def train_on(run: Path, tmp_path: Path, *changes: str) -> None:
    from meshwright import planfile
    from meshwright.training import loop

    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 400)
    words = [
        f"data.path={text}",
        "recipe.steps=2",
        "recipe.sequence=32",
        "recipe.global_batch=2",
        "recipe.warmup_steps=0",
    ]
    loop.run(planfile.read(run / "plan.yaml", [*words, *changes]), resume="auto")


@pytest.mark.parametrize("name", SHAPES)
def test_a_directory_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "eos_token_id": [0, 5]}
    directory(tmp_path / "hf", SHAPES[name], chat_template=TEMPLATE, generation=generation)
    plan = import_hf(tmp_path / "hf", tmp_path / "run")
    assert plan.recipe.precision == "fp32" and plan.recipe.sequence == 64
    write_directory(tmp_path / "run", tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_the_run_folder_is_named_as_by_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert main(["import", "hf", "run=runs/first"]) == 0 == main(["import", "hf", "runs/second"])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]
    assert main(["generate", "runs/first", "--prompt", "def", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_run_from_a_directory_computes_as_the_directory_does(name: str, tmp_path: Path) -> None:
    directory(tmp_path / "hf", SHAPES[name])
    import_hf(tmp_path / "hf", tmp_path / "run")
    run, hub = load(tmp_path / "run", None), load(tmp_path / "hf", None)
    tokens = torch.tensor([Tokenizer.shipped().encode("def f(x): return x").tolist()])
    assert torch.equal(run.model(tokens), hub.model(tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_imported_weights(dtype: str, tmp_path: Path) -> None:
    before = directory(tmp_path / "hf", dtype=getattr(torch, dtype), tokenizer=Tokenizer.bytes())
    import_hf(tmp_path / "hf", tmp_path / "run")
    train_on(tmp_path / "run", tmp_path, "recipe.learning_rate=1e-6")
    checkpoint = write_directory(tmp_path / "run", tmp_path / "out")
    assert checkpoint.name == "step-000002"
    after = weights(import_folder(tmp_path / "out"))
    for name, tensor in before.items():
        assert torch.allclose(after[name].float(), tensor, atol=1e-5, rtol=0.01), name


def test_fp32_of_a_bf16_run_is_its_master_weights(tmp_path: Path) -> None:
    from meshwright.store import checkpoint

    directory(tmp_path / "hf", dtype=torch.bfloat16)
    import_hf(tmp_path / "hf", tmp_path / "run")
    train_on(tmp_path / "run", tmp_path)
    taken = write_directory(tmp_path / "run", tmp_path / "wide", "fp32")
    kinds = {name: kind for name, kind in checkpoint.names(taken).items() if name.startswith(MASTER)}
    masters = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in kinds.items()}
    checkpoint.load(taken, masters, subset=True)
    folder = import_folder(tmp_path / "wide")
    assert folder.dtype == torch.float32
    wide = weights(folder)
    assert masters.keys() == {MASTER + name for name in wide}
    assert all(torch.equal(wide[name], masters[MASTER + name]) for name in wide)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in wide.values())


def test_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    directory(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    train_on(tmp_path / "run", tmp_path, "recipe.keep_last=5")
    first = tmp_path / "run" / "checkpoints" / "step-000000"
    assert write_directory(first, tmp_path / "out") == first
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    directory(tmp_path / "hf")
    directory(tmp_path / "mute", tokenizer=None)
    directory(tmp_path / "small", ModelShape(**{**SIZES, "vocab": 100}))
    directory(tmp_path / "torn")
    torn = tmp_path / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    for folder, run, kind, words in (
        ("mute", "run", HubError, "has no tokenizer.json"),
        ("small", "run", HubError, "has 2048 tokens, config.json only 100"),
        ("torn", "run", HubError, "truncated"),
        ("hf", "taken", PlanError, "taken' is not empty: take another folder"),
    ):
        with pytest.raises(kind, match=words):
            import_hf(tmp_path / folder, tmp_path / run)
    import_hf(tmp_path / "hf", tmp_path / "run")
    for source, out, dtype, kind, words in (
        (tmp_path / "run", "taken", None, HubError, "taken.? is not empty"),
        (tmp_path / "run", "out", "fp8", PlanError, "dtype='fp8'"),
        (tmp_path / "hf", "out", None, RunError, "has no plan.yaml: give a run folder"),
    ):
        with pytest.raises(kind, match=words):
            write_directory(source, tmp_path / out, dtype)
    next((tmp_path / "run" / "checkpoints" / "step-000000").glob("*.safetensors")).write_bytes(b"short")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of .* can be used; the last one: .* has 5 bytes instead of 283,296"
    ):
        write_directory(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "run"])
