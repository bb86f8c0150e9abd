"""First weights from a Hugging Face directory: taken, kept in the plan, the same under any layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import planfile
from meshwright.data import Tokenizer
from meshwright.formats.hub import export_folder
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.spec import ModelShape, MoEShape, Plan
from meshwright.spec.errors import DataError, HubError, PlanError
from meshwright.store import checkpoint
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.training.running import Crashed, Notes, PowerCut
from tests.verbs.launched import launch

SIZES: dict[str, Any] = {"name": "dot", "vocab": 2048, "layers": 2, "hidden": 16, "heads": 2, "ffn": 24}
SIZES |= {"max_positions": 64}
EXPERTS = MoEShape(experts=4, top_k=2, ffn=8, shared_experts=1, first_dense=1, scoring="sigmoid", correction_bias=True)
SHAPES = {
    "llama": ModelShape(**SIZES),
    "gpt2": ModelShape(
        **SIZES, family="gpt2", norm="layernorm", positions="learned", mlp="gelu_tanh", tied=True, qkv_bias=True,
        out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
WORDS = [
    "recipe.steps=1",
    "recipe.sequence=16",
    "recipe.global_batch=2",
    "recipe.warmup_steps=0",
    "layout.micro_batch=1",
]
UNCHANGED = "recipe.learning_rate=0"


def directory(folder: Path, shape: ModelShape, tokenizer: Tokenizer | None = None) -> dict[str, Tensor]:
    """Random weights, and what a directory has beside them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in tensor_sizes(shape).items()}
    export_folder(
        folder,
        model_tensors=tensors.items(),
        shape=shape,
        tokenizer=tokenizer or Tokenizer.shipped(),
        dtype=torch.float32,
        chat_template="{{ messages }}",
    )
    return tensors


def plan(tmp_path: Path, *words: str, model: str = "hf") -> Plan:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 400)
    words_of_plan = [f"model={tmp_path / model}", f"data={text}", f"run={tmp_path / 'run'}", *WORDS, *words]
    return planfile.read(None, words_of_plan, read_folder=read_folder)


def saved(run: Path, kind: str = "model.") -> dict[str, Tensor]:
    """The weights (or other tensors of a kind) of a run's last checkpoint by name."""
    latest = checkpoint.find_latest(run / "checkpoints")
    assert latest is not None
    names = [name for name in checkpoint.names(latest) if name.startswith(kind)]
    return {name.removeprefix(kind): tensor for name, tensor in checkpoint.stream(latest, names)}


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_of_a_folder_are_taken_and_it_is_said(name: str, tmp_path: Path) -> None:
    before, watcher = directory(tmp_path / "hf", SHAPES[name]), Notes()
    loop.run(plan(tmp_path, UNCHANGED), watchers=[watcher])
    weights = saved(tmp_path / "run")
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[key], before[key]) for key in before)
    assert watcher.info is not None
    [sentence] = [text for label, text in watcher.info.foreseen if label == "init"]
    assert sentence == f"weights of {tmp_path / 'hf'}, and its tokenizer; model.init=random draws new ones"
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_random_says_otherwise(tmp_path: Path) -> None:
    before = directory(tmp_path / "hf", SHAPES["llama"])
    drawn = plan(tmp_path, UNCHANGED, "model.init=random")
    loop.run(drawn)
    loop.run(replace(drawn, run=str(tmp_path / "shape"), model=SHAPES["llama"], init="random"))
    with_init, drawn_again = saved(tmp_path / "run"), saved(tmp_path / "shape")
    assert all(torch.equal(with_init[key], drawn_again[key]) for key in before)
    assert not torch.equal(with_init["embed.weight"], before["embed.weight"])


def test_killed_before_its_first_checkpoint_it_begins_with_the_same_weights(tmp_path: Path) -> None:
    """From the plan that the run folder keeps, which names the directory."""
    directory(tmp_path / "hf", SHAPES["llama"])
    right = plan(tmp_path, "recipe.steps=3")
    loop.run(replace(right, run=str(tmp_path / "right")))
    with pytest.raises(PowerCut):
        loop.run(right, watchers=[Crashed(2)])
    stored_plan = planfile.read(tmp_path / "run" / "plan.yaml")
    assert stored_plan == right
    loop.run(stored_plan, resume="auto")
    restarted, other = saved(tmp_path / "run"), saved(tmp_path / "right")
    assert all(torch.equal(restarted[key], other[key]) for key in restarted)
    (tmp_path / "hf" / "model.safetensors").unlink()  # a run that has a checkpoint needs it no more
    assert loop.run(replace(stored_plan, recipe=replace(stored_plan.recipe, steps=4)), resume="auto").step == 4


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (["layout.tp=2", "layout.sp=true"], 2),
        (["layout.pp=2"], 2),
        (["layout.dp_shard=2", "layout.zero=3", "recipe.precision=bf16"], 2),
    ],
    ids=["tp", "pp", "zero3-bf16"],
)
@pytest.mark.long
def test_every_rank_takes_its_part(layout: list[str], world: int, tmp_path: Path) -> None:
    before = directory(tmp_path / "hf", SHAPES["llama"])
    asked = plan(tmp_path)
    words = ["train", "--no-dry-run", f"model={tmp_path / 'hf'}", f"data={asked.data.path}", *WORDS, UNCHANGED, *layout]
    ended = launch(world, [*words, f"run={tmp_path / 'run'}"], tmp_path / "errors")
    assert ended.codes == [0] * world, ended.errors
    after = saved(tmp_path / "run")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key].to(after[key].dtype)) for key in before)
    masters = saved(tmp_path / "run", "optimizer.master.")
    assert masters.keys() == (before.keys() if "recipe.precision=bf16" in layout else set())
    assert all(torch.equal(masters[key], before[key]) for key in masters), "not rounded to 16 bits"


def test_a_saved_plan_keeps_where_its_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path / "hf", SHAPES["llama"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    assert main(["plan", "./hf", "--cluster", "h100x1", "--recipe", "global_batch=2", "--save", "plans/a.yaml"]) == 0
    stored_plan = planfile.read("plans/a.yaml")
    assert (stored_plan.init, stored_plan.data.tokenizer) == (
        str(tmp_path / "hf"),
        str(tmp_path / "hf" / "tokenizer.json"),
    )


def test_router_biases_are_weights_too(tmp_path: Path) -> None:
    shape = ModelShape(**SIZES, family="deepseek_v3", moe=EXPERTS, mla=_latent())
    before = directory(tmp_path / "hf", shape)
    loop.run(plan(tmp_path, UNCHANGED))
    after = saved(tmp_path / "run")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def _latent() -> Any:
    from meshwright.spec import MLAShape

    return MLAShape(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["model.layers=3"], r"another shape: norm.weight \[16\] there, layers.2.attention_norm.weight \[16\] in the"),
        (["data.tokenizer=bytes"], "data.tokenizer=bytes differs from the tokenizer of model.init="),
        (["data.tokenizer=bpe:300"], "data.tokenizer=bpe:300 differs from the tokenizer"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused_before_a_folder_is_made(
    words: list[str], complaint: str, tmp_path: Path
) -> None:
    directory(tmp_path / "hf", SHAPES["llama"])
    with pytest.raises(PlanError, match=complaint):
        loop.run(plan(tmp_path, *words))
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_tokenizer_or_that_is_gone(tmp_path: Path) -> None:
    directory(tmp_path / "hf", SHAPES["llama"])
    tokenizer_file = tmp_path / "hf" / "tokenizer.json"
    tokenizer_file.rename(tmp_path / "tokenizer.json")
    with pytest.raises(PlanError, match=r"has no tokenizer.json, and its weights know no other tokens: give data.tok"):
        loop.run(plan(tmp_path))
    loop.run(plan(tmp_path, f"data.tokenizer={tmp_path / 'tokenizer.json'}", UNCHANGED))
    asked = plan(tmp_path, "run=x")
    (tmp_path / "hf").rename(tmp_path / "away")
    with pytest.raises(PlanError, match=r"does not exist: give the folder with the weights, or model.init=random"):
        loop.run(asked)
    with pytest.raises((DataError, HubError, PlanError), match=r"no such folder|does not exist"):
        plan(tmp_path)


def test_a_longer_context_keeps_the_weights(tmp_path: Path) -> None:
    """Whatever leaves every tensor as it is may be changed."""
    before = directory(tmp_path / "hf", SHAPES["llama"])
    loop.run(plan(tmp_path, "model.rope_theta=1e6", "model.max_positions=128", UNCHANGED))
    assert torch.equal(saved(tmp_path / "run")["embed.weight"], before["embed.weight"])
