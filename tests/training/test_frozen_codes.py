"""Adapters beside frozen matrices that are codes (QLoRA): what they learn, hold, save and refuse."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.formats.hub import export_folder, import_folder
from meshwright.formats.hub.directory import stored_weights
from meshwright.interface.trained.opening import load
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import frozen_codes, frozen_schemes
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh
from meshwright.spec import Layout, ModelShape, Plan
from meshwright.spec.errors import CheckpointError, IllegalLayout, PlanError
from meshwright.spec.memory.held import memory
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.store import checkpoint
from meshwright.training import job, loop
from meshwright.training.optimizer.optimizer import held_bytes
from meshwright.training.step.state import take_weights
from meshwright.verbs.main import main
from tests.model.shrunk import tokens
from tests.training.running import Crashed, Notes, PowerCut
from tests.training.test_adapters import peft_run
from tests.training.test_tuning import CHATML, conversations, directory, json, plan
from tests.training.test_weights import EXPERTS, SIZES, _latent, saved

WIDE: dict[str, Any] = {**SIZES, "hidden": 64, "heads": 4, "ffn": 128}
"""Rows of whole blocks of 64, as bitsandbytes cuts them."""
LORA = ["model.lora=4", "model.lora.alpha=8"]
BASES = [name for name, scheme in SCHEMES.items() if scheme.trains_beside]
FORMS = ["model.lora.dora=true", "model.lora.targets=q,down"]
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 2},
    {"dp_shard": 2, "zero": 3},
    {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"},
    {"cp": 2},
    {"tp": 2},
    {"tp": 2, "sp": True, "recompute": "selective"},
]


def written(folder: Path, shape: ModelShape) -> None:
    directory(folder / "hf", shape)
    (folder / "hf" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    rows = map(json.dumps, conversations(24))
    (folder / "chat.jsonl").write_text("\n".join(rows), encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written(tmp_path, ModelShape(**WIDE))
    return tmp_path


def losses(asked: Plan) -> list[tuple[float, float]]:
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [(step.loss, step.grad_norm) for step in watcher.steps]


def restored_folder(asked: Plan, folder: Path) -> str:
    """The slow twin's base: every matrix quantized and restored, in fp32."""
    imported = import_folder(Path(asked.init))
    schemes = frozen_schemes(asked.model)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_weights(imported.path, imported.shape):
            yield name, quantize_matrix(name, tensor, schemes[name]).dequantized() if name in schemes else tensor

    tokenizer = job.prepare_data(asked.data).tokenizer
    export_folder(
        folder, model_tensors=weights(), shape=imported.shape, tokenizer=tokenizer, dtype=torch.float32,
        chat_template=CHATML,
    )  # fmt: skip
    return str(folder)


@pytest.mark.parametrize(("base", "form"), [
    *((base, "") for base in BASES),
    *((base, form) for base in ("nf4-double", "int4-hqq") for form in FORMS),
])  # fmt: skip
@pytest.mark.long
def test_losses_are_those_of_restored_weights(files: Path, base: str, form: str) -> None:
    words = [*LORA, *([form] if form else []), "recipe.steps=5"]
    asked = plan(files, *words, f"model.lora.base={base}")
    twin = restored_folder(asked, files / "twin")
    dense = plan(files, f"model={twin}", f"run={files / 'dense'}", *words)
    right = losses(dense)
    assert losses(asked) == [pytest.approx(pair, abs=1e-5, rel=1e-4) for pair in right]
    assert right[-1][0] < right[0][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT's, bitsandbytes' and transformers' own
@pytest.mark.parametrize("base", ["nf4", "nf4-double"])
def test_twenty_steps_are_those_of_peft_and_bitsandbytes(files: Path, base: str) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    asked = plan(files, *LORA, f"model.lora.base={base}", "recipe.steps=20", "recipe.epsilon=1e-6")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=base == "nf4-double",
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    right = peft_run(asked, files / "peft", 20, quantization_config=config, device_map="cpu")
    for (loss, norm), (their_loss, their_norm) in zip(losses(asked), right, strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-4)
        assert norm == pytest.approx(their_norm, rel=1e-3)
    assert right[-1][0] < right[0][0] - 0.03


@pytest.mark.slow
def test_layouts_train_the_same_adapter(files: Path) -> None:
    """Data parallelism under every stage of ZeRO, a split backward pass of a pipeline, shared sequences."""
    asked = plan(files, *LORA, "model.lora.base=nf4-double", "recipe.steps=10")
    right = losses(asked)
    for number, each in enumerate(LAYOUTS):
        other = replace(asked, run=str(files / f"layout{number}"), layout=Layout(compile="off", **each))
        [first, _] = on_ranks(2, losses, other)
        assert first == [pytest.approx(pair, rel=1e-4) for pair in right], each


@pytest.mark.slow
def test_lengths_of_rows_are_sharded(files: Path) -> None:
    """DoRA under ZeRO, and beside rows that tp cuts."""
    asked = plan(files, *LORA, "model.lora.base=nf4-double", "model.lora.dora=true", "recipe.steps=4")
    right = losses(asked)
    layouts: list[dict[str, Any]] = [{"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}, {"tp": 2}]
    for number, each in enumerate(layouts):
        other = replace(asked, run=str(files / f"dora{number}"), layout=Layout(compile="off", **each))
        [first, _] = on_ranks(2, losses, other)
        assert first == [pytest.approx(pair, rel=1e-4) for pair in right], each


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "norms", "all-but-attention", "full"])
def test_what_is_made_again_is_the_same(files: Path, recompute: str) -> None:
    asked = plan(files, *LORA, "model.lora.base=nf4", "recipe.steps=3")
    again = replace(asked, run=str(files / "again"), layout=replace(asked.layout, recompute=recompute))
    assert losses(again) == losses(asked)


def state_of(asked: Plan) -> Any:
    state = loop.new_state(asked, make_mesh(asked.layout), torch.device("cpu"), initialize=False, adapters=True)
    take_weights(state, asked)
    return state


@pytest.mark.parametrize("base", BASES)
def test_a_rank_holds_codes_and_no_matrix(files: Path, base: str) -> None:
    """Bytes as counted, and products leave nothing behind."""
    asked = plan(files, *LORA, f"model.lora.base={base}", "recipe.precision=bf16")
    state = state_of(asked)
    held = held_bytes(state.engine, state.optimizer)
    assert held == {k: v for k, v in memory(asked.model, asked.layout, "bf16")["step"].items() if k != "gradients"}
    model = state.engine.model
    ids = tokens(1, 12)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert model.loss(ids, ids).cross_entropy.isfinite()
    matrices = [tensor.matrix for tensor in frozen_codes([model], asked.model).values()]
    assert len(matrices) == len(frozen_schemes(asked.model)) == 14
    assert not any(matrix.prepared for matrix in matrices)
    assert all(tensor.numel() <= 512 for matrix in matrices for tensor in matrix.tables.values())


def test_experts_and_short_rows_have_codes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks, rows of fewer inputs than a block, and what a router keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written(tmp_path, ModelShape(**SIZES, family="deepseek_v3", moe=EXPERTS, mla=_latent()))
    asked = plan(tmp_path, *LORA, "model.lora.base=nf4-double", "recipe.steps=6")
    assert any(name.endswith("experts.up") for name in frozen_schemes(asked.model))
    curve = losses(asked)
    assert curve[-1][0] < curve[0][0]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0


def test_an_export_is_what_was_trained(files: Path) -> None:
    """The adapter is added to restored weights, as the run and every evaluation read them; PEFT's format names the
    folder of the base."""
    asked = plan(files, *LORA, "model.lora.base=nf4", "recipe.steps=6")
    loop.run(asked)
    prompt = tokens(2, 11)
    state = state_of(asked)
    latest = checkpoint.find_latest(files / "run" / "checkpoints")
    assert latest is not None
    checkpoint.load(latest, state.tensors())
    right = state.engine.model.eval()(prompt)
    torch.testing.assert_close(load(files / "run").model(prompt), right, rtol=1e-5, atol=1e-5)
    assert main(["export", str(files / "run"), str(files / "merged")]) == 0
    torch.testing.assert_close(load(files / "merged").model(prompt), right, rtol=1e-5, atol=1e-5)
    assert main(["export", str(files / "run"), str(files / "adapter"), "--adapter"]) == 0
    beside_full = load(files / "adapter").model(prompt)
    assert 1e-5 < float((beside_full - right).abs().max()) < 1.0


def test_checkpoints_hold_the_adapter_and_know_their_base(files: Path) -> None:
    asked = plan(files, *LORA, "model.lora.base=nf4-double", "recipe.steps=6", "recipe.checkpoint_every=3")
    loop.run(asked)
    latest = checkpoint.find_latest(files / "run" / "checkpoints")
    assert latest is not None
    names = [name for name in checkpoint.names(latest) if name.startswith(("model.", "optimizer."))]
    assert names and all(".lora." in name for name in names)
    other = replace(asked, run=str(files / "crashed"))
    with pytest.raises(PowerCut):
        loop.run(other, watchers=[Crashed(4)])
    loop.run(other, resume="auto")
    for name, tensor in saved(files / "run").items():
        assert torch.equal(tensor, saved(files / "crashed")[name]), name
    changed = plan(files, *LORA, "model.lora.base=nf4", "recipe.steps=8")
    with pytest.raises(CheckpointError, match=r"adapter for other weights"):
        loop.run(changed, resume="auto")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["layout.compile=on"], r"take layout.compile=off"),
        (["recipe.products=fp8", "recipe.precision=bf16"], r"take recipe.products=same"),
    ],
)
def test_what_cuts_or_rounds_codes_is_refused(files: Path, words: list[str], match: str) -> None:
    asked = plan(files, *LORA, "model.lora.base=nf4", *words)
    with pytest.raises(IllegalLayout, match=match):
        asked.check()


@pytest.mark.parametrize("base", ["int8", "nf5"])
def test_other_bases_are_refused(files: Path, base: str) -> None:
    with pytest.raises(PlanError, match=rf"model.lora.base={base} is no format .*: take same, llm-int8, int4-rtn"):
        plan(files, *LORA, f"model.lora.base={base}")
