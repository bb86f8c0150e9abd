"""Runs that train adapters: what they save, how they go on, and that PEFT trains the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.formats.hub import import_folder
from meshwright.formats.hub.adapter import save_adapter
from meshwright.interface.trained.opening import load
from meshwright.model import build
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Layout, ModelShape, Plan
from meshwright.spec.errors import CheckpointError, PlanError
from meshwright.store import checkpoint
from meshwright.store.model_weights import final_weights
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.model.shrunk import tokens
from tests.training.running import Crashed, Notes, PowerCut
from tests.training.test_tuning import CHATML, SHAPES, directory, files, plan
from tests.training.test_weights import EXPERTS, SIZES, _latent, saved

__all__ = ["files"]
LORA = ["model.lora=4", "model.lora.alpha=8"]
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 3},
    {"tp": 2, "sp": True},
    {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"},
    {"cp": 2},
]


def first_weights(asked: Plan) -> dict[str, Tensor]:
    """Adapters as a run of this plan begins with them."""
    lora = asked.model.lora
    assert lora is not None
    drawn = build(asked.model, seed=asked.recipe.seed)
    weights = {name: parameter.detach() for name, parameter in drawn.named_parameters() if parameter.requires_grad}
    if not lora.dora:
        return weights
    base: dict[str, Tensor] = {}
    import_folder(Path(asked.init)).load(lambda name, tensor: base.__setitem__(name, tensor))
    for name in weights:
        if name.endswith("magnitude"):
            weights[name] = base[name.replace(".lora.magnitude", ".weight")].norm(dim=1)
    return weights


def peft_run(asked: Plan, folder: Path, steps: int, **options: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of PEFT's model on the same documents, one by one. `options`: of how the model
    is loaded."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder.mkdir()
    save_adapter(folder, first_weights(asked), asked.model, base=asked.init, dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(asked.init, dtype=torch.float32, **options)
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recipe = asked.recipe
    optimizer = torch.optim.AdamW(
        trained, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon, weight_decay=0.0
    )
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, recipe, corpus, corpus.train, shuffle=True)
    records = []
    for step in range(steps):
        batch, losses, number = rows.take(recipe.global_batch * step, recipe.global_batch), [], 0
        for ids, documents, targets in zip(batch.tokens, batch.documents, batch.targets, strict=True):
            for document in range(documents[-1] + 1):
                here = documents == document
                labels = torch.as_tensor(targets[here])
                logits = model(input_ids=torch.as_tensor(ids[here])[None]).logits[0]
                losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                number += int((labels >= 0).sum())
        loss = torch.stack(losses).sum() / number
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records.append((loss.item(), norm.item()))
    return records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT's and transformers' own
@pytest.mark.parametrize("form", ["model.lora.dora=false", "model.lora.dora=true", "model.lora.rslora=true"])
def test_twenty_steps_are_those_of_peft(files: Path, form: str) -> None:
    asked = plan(files, *LORA, form, "recipe.steps=20", "recipe.epsilon=1e-6")
    right = peft_run(asked, files / "peft", 20)
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    for seen, (loss, norm) in zip(watcher.steps, right, strict=True):
        assert seen.loss == pytest.approx(loss, abs=1e-4)
        assert seen.grad_norm == pytest.approx(norm, rel=1e-3)
    assert right[-1][0] < right[0][0] - 0.03


def losses(asked: Plan) -> list[tuple[float, float]]:
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [(step.loss, step.grad_norm) for step in watcher.steps]


@pytest.mark.slow
def test_layouts_train_the_same_adapter(files: Path) -> None:
    asked = plan(files, *LORA, "recipe.steps=20")
    right = losses(asked)
    for number, each in enumerate(LAYOUTS):
        other = replace(asked, run=str(files / f"layout{number}"), layout=Layout(compile="off", **each))
        [first, _] = on_ranks(2, losses, other)
        assert first == [pytest.approx(pair, rel=1e-4) for pair in right], each


def test_a_checkpoint_holds_the_adapter_alone(files: Path) -> None:
    asked = plan(files, *LORA)
    loop.run(asked)
    latest = checkpoint.find_latest(files / "run" / "checkpoints")
    assert latest is not None
    names = [name for name in checkpoint.names(latest) if name.startswith(("model.", "optimizer."))]
    assert names and all(".lora." in name for name in names)
    whole = sum(path.stat().st_size for path in (files / "hf").glob("*.safetensors"))
    assert sum(path.stat().st_size for path in latest.iterdir()) < whole


def test_it_goes_on_as_if_it_had_not_stopped(files: Path) -> None:
    asked = plan(files, *LORA, "recipe.steps=6", "recipe.checkpoint_every=3")
    loop.run(asked)
    other = replace(asked, run=str(files / "crashed"))
    with pytest.raises(PowerCut):
        loop.run(other, watchers=[Crashed(4)])
    loop.run(other, resume="auto")
    for name, tensor in saved(files / "run").items():
        assert torch.equal(tensor, saved(files / "crashed")[name]), name


def test_weights_that_changed_are_refused(files: Path) -> None:
    asked = plan(files, *LORA, "recipe.steps=2")
    loop.run(asked)
    weights_file = next((files / "hf").glob("*.safetensors"))
    raw = bytearray(weights_file.read_bytes())
    raw[-1] ^= 1
    weights_file.write_bytes(bytes(raw))
    with pytest.raises(CheckpointError, match=r"adapter for other weights"):
        loop.run(replace(asked, recipe=replace(asked.recipe, steps=3)), resume="auto")
    with pytest.raises(CheckpointError, match=r"adapter for other weights"):
        load(files / "run")


@pytest.mark.parametrize("form", ["model.lora.alpha=80", "model.lora.rslora=true"])
def test_an_adapter_goes_on_with_its_own_scale(files: Path, form: str) -> None:
    """No size differs, and the model would be another one from the next step on."""
    loop.run(plan(files, *LORA, "recipe.steps=2"))
    with pytest.raises(CheckpointError, match=r"was trained with 2, and model\.lora\.alpha="):
        loop.run(plan(files, *LORA, form, "recipe.steps=3"), resume="auto")


def test_a_lost_folder_is_named(files: Path) -> None:
    asked = plan(files, *LORA, "recipe.steps=2")
    loop.run(asked)
    (files / "hf").rename(files / "elsewhere")
    with pytest.raises(PlanError, match=r"does not exist: give the folder with the weights"):
        load(files / "run")


@pytest.mark.parametrize("form", [[], ["model.lora.dora=true"], ["model.init=random"]], ids=["lora", "dora", "random"])
def test_exports_say_what_the_run_says(files: Path, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The merged directory, the adapter in PEFT's format and the run itself."""
    asked = plan(files, *LORA, *form)
    loop.run(asked)
    prompt = tokens(2, 11)
    right = load(files / "run").model(prompt)
    assert main(["export", str(files / "run"), str(files / "merged")]) == 0
    torch.testing.assert_close(load(files / "merged").model(prompt), right, rtol=1e-5, atol=1e-5)
    random = asked.init == "random"
    assert main(["export", str(files / "run"), str(files / "adapter"), "--adapter"]) == 2 * random
    if not random:
        torch.testing.assert_close(load(files / "adapter").model(prompt), right, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(load(files / "hf").model(prompt), right, rtol=1e-3, atol=1e-3)


def test_a_run_of_all_weights_has_no_adapter(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(plan(files, "recipe.steps=1"))
    assert main(["export", str(files / "run"), str(files / "adapter"), "--adapter"]) == 2
    assert "trained all weights and has no adapter" in capsys.readouterr().err


def test_a_base_of_another_shape_is_refused(files: Path) -> None:
    """Before anything is read."""
    directory(files / "other", replace(SHAPES["llama"], ffn=32))
    asked = plan(files, *LORA)
    with pytest.raises(PlanError, match=r"has another shape"):
        loop.run(replace(asked, init=str(files / "other")))


def test_a_lost_reference_is_measured_under_the_first_weights(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters begin as nothing: on resume the frozen weights alone are the reference again."""
    rows = ({"prompt": f"say {number}", "chosen": f" {number} é", "rejected": " no"} for number in range(16))
    (files / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = [f"data={files / 'pairs.jsonl'}", "recipe.objective=dpo", "recipe.steps=2"]
    asked = plan(files, *LORA, *words)
    loop.run(asked)
    reference_file = files / "run" / "reference.safetensors"
    before = load_file(reference_file)
    reference_file.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "another"))
    longer = replace(asked, recipe=replace(asked.recipe, steps=3))
    loop.run(longer, resume="auto")
    after = load_file(reference_file)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_first_weights_that_changed_are_no_reference(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are trained, and no checkpoint has those that the run began with."""
    rows = ({"prompt": f"say {number}", "chosen": f" {number} é", "rejected": " no"} for number in range(16))
    (files / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    asked = plan(files, f"data={files / 'pairs.jsonl'}", "recipe.objective=dpo", "recipe.steps=2")
    loop.run(asked)
    (files / "run" / "reference.safetensors").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "another"))
    weights_file = next((files / "hf").glob("*.safetensors"))
    raw = bytearray(weights_file.read_bytes())
    raw[-1] ^= 1
    weights_file.write_bytes(bytes(raw))
    with pytest.raises(PlanError, match=r"are not those of the start of the run"):
        loop.run(replace(asked, recipe=replace(asked.recipe, steps=3)), resume="auto")


def test_a_merged_model_routes_as_the_trained_one(files: Path) -> None:
    """A router's correction stays in fp32 where all else is narrow: its values are large beside scores."""
    shape = ModelShape(**SIZES, family="deepseek_v3", moe=EXPERTS, mla=_latent())
    folder = directory(files / "moe", shape)
    (files / "moe" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    asked = plan(files, f"model={files / 'moe'}", *LORA, "recipe.steps=1", "recipe.precision=bf16")
    loop.run(asked)
    latest = checkpoint.find_latest(files / "run" / "checkpoints")
    assert latest is not None
    merged = dict(final_weights(asked, latest, torch.bfloat16))
    biases = [name for name in merged if name.endswith("correction_bias")]
    assert biases
    for name in biases:
        assert merged[name].dtype == torch.float32 and torch.equal(merged[name], folder[name])
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in merged.items() if name not in biases)
