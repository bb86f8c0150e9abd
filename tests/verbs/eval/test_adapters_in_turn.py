"""`eval BASE --adapter NAME=DIR`: each adapter against the base, which is loaded once, with the noise."""

import json
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.interface.trained.opening import load
from meshwright.spec.errors import ArgumentError
from meshwright.training import loop
from meshwright.verbs.eval import answer as evaluation
from meshwright.verbs.eval.answer import AdaptersInTurn
from meshwright.verbs.main import main
from tests.training.test_adapters import LORA
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan


@pytest.fixture
def trained(files: Path) -> Path:
    """Train two runs, of LoRA and of DoRA, and export the first one's adapter for PEFT."""
    for name, more in (("first", ()), ("second", ("model.lora.dora=true", "recipe.learning_rate=3e-2"))):
        loop.run(plan(files, *LORA, *more, "recipe.steps=8", f"run={files / name}"))
    assert main(["export", str(files / "first"), str(files / "peft"), "--adapter"]) == 0
    return files


def test_each_adapter_is_held_against_the_base(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures equal those of each run alone and of the base alone. The base is read once."""
    opened: list[object] = []
    monkeypatch.setattr(evaluation, "load", lambda *args, **named: opened.append(args) or load(*args, **named))
    data = str(trained / "chat.jsonl")
    adapters = {name: trained / name for name in ("first", "second", "peft")}
    answer = mw.evaluate(trained / "hf", adapters=adapters, data=data)
    assert len(opened) == 1
    figures = {figure.adapter: figure for figure in answer.figures}
    assert list(figures) == list(adapters) and answer.head[0] == "adapter"
    base = load(trained / "hf").evaluate(data).loss
    for name, score in figures.items():
        alone = load(trained / name).evaluate(data)
        assert score.before is not None and score.difference is not None and score.difference.error is not None
        assert score.before.value == pytest.approx(base, rel=1e-6)
        assert score.value.value == pytest.approx(alone.loss, rel=1e-6) and score.verdict == "better"
        assert score.difference.value == pytest.approx(alone.loss - base, rel=1e-3)
    assert figures["first"].value == figures["peft"].value != figures["second"].value
    capsys.readouterr()
    words = ["--adapter", f"first={trained / 'first'}", "--adapter", f"second={trained / 'second'}", "--data", data]
    assert main(["eval", str(trained / "hf"), *words]) == 0
    told = capsys.readouterr().out
    assert told.startswith("BETTER  2 of 2 figures better") and "after with each adapter" in told
    assert main(["eval", str(trained / "hf"), *words, "--json"]) == 0
    assert [figure["adapter"] for figure in json.loads(capsys.readouterr().out)["figures"]] == ["first", "second"]


def test_the_base_comes_back_to_the_bit(trained: Path) -> None:
    turns = AdaptersInTurn(load(trained / "hf"), {"a": trained / "first", "b": trained / "second"})
    before = {name: tensor.clone() for name, tensor in turns.base.model.state_dict().items()}
    for name in ("a", "b", "a"):
        changed = turns.with_adapter(name).model.state_dict()
        assert any(not torch.equal(changed[key], before[key]) for key in before)
    after = turns.plain().model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_what_cannot_be_held_against_it_is_refused(trained: Path) -> None:
    data = trained / "chat.jsonl"
    with pytest.raises(ArgumentError, match=r"cannot be combined with adapters"):
        mw.evaluate(trained / "hf", adapters={"a": trained / "first"}, against=trained / "hf", data=data)
    with pytest.raises(ArgumentError, match=r"adapter='a': .* has neither adapter_config.json nor plan.yaml"):
        mw.evaluate(trained / "hf", adapters={"a": trained / "hf"}, data=data)


@pytest.mark.parametrize("more", [(), ("--keep", "*.down.weight")], ids=["all", "some kept"])
def test_matrices_that_are_codes_are_not_passed_over(trained: Path, more: tuple[str, ...]) -> None:
    small = trained / "small"
    assert main(["quantize", str(trained / "hf"), "--scheme", "int8", "-o", str(small), *more]) == 0
    turns = AdaptersInTurn(load(small), {"a": trained / "peft"})
    with pytest.raises(
        ArgumentError, match=r"adapter='a' cannot be merged: .*small holds the adapted matrices as codes"
    ):
        turns.with_adapter("a")
