"""`eval --against`: a run and the model it began with, on what was held out, with the noise of the difference."""

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.data import Tokenizer
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from meshwright.training import loop
from tests.train.test_tuning import files as files  # a folder with a model and conversations
from tests.train.test_tuning import plan
from tests.train.test_weights import SHAPES, directory

WORDS = ["data.validation=0.4", "data.train_on=assistant,user", "recipe.eval_sequences=0"]


def test_a_run_is_held_against_what_it_began_with(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=25"))
    assert main(["eval", str(files / "run"), "--against", str(files / "hf"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {one["metric"]: one for one in found["figures"]}
    assert list(rows) == ["loss", "loss of user", "loss of assistant"]
    assert {one["task"] for one in found["figures"]} == {"held-out"} and rows["loss"]["items"] == 10
    assert rows["loss"]["verdict"] == "better" and rows["loss"]["difference"]["value"] < 0
    alone = mw.load(files / "run").evaluate()
    assert rows["loss"]["value"]["value"] == pytest.approx(alone.loss, rel=1e-6)
    assert rows["loss of user"]["value"]["value"] == pytest.approx((alone.roles or {})["user"].loss, rel=1e-6)
    assert main(["eval", str(files / "run"), "--against", str(files / "hf")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("BETTER  3 of 3 figures better") and "loss of assistant" in told


def test_nothing_changed_is_within_noise(files: Path) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=1", "recipe.learning_rate=0"))
    found = mw.evaluate(files / "run", against=files / "hf")
    assert [one.verdict for one in found.figures] == ["within noise"] * 3
    assert found.headline == "0 of 3 figures better, 3 within noise"
    assert [row["difference"] for row in found.rows()] == [0, 0, 0] and "within noise" in found._repr_html_()
    assert mw.evaluate(files / "run").headline == "" and repr(mw.evaluate(files / "run")).endswith("3 figures")


def test_losses_of_other_tokens_are_not_compared(files: Path) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=1"))
    directory(files / "other", SHAPES["llama"], Tokenizer.bytes())
    with pytest.raises(ArgumentError, match="another tokenizer than"):
        mw.evaluate(files / "run", against=files / "other")
    with pytest.raises(RunError, match=r"against=.*none does not exist"):
        mw.evaluate(files / "run", against=files / "none")


def test_tasks_need_their_extra(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.api.evaluation.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'meshwright\[eval\]'"):
        mw.evaluate(files / "hf", tasks=str(files))
