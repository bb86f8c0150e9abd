"""`tune`: which defaults stand, and what is refused at the start."""

from pathlib import Path

import pytest

from meshwright.api.tuning import DEFAULTS, tuning_plan
from meshwright.cli.main import main
from meshwright.spec.errors import PlanError
from tests.train import pairs
from tests.train.test_tuning import files as files  # a folder with a model and conversations


def words(files: Path, *more: str) -> list[str]:
    return [f"model={files / 'hf'}", f"data={files / 'chat.jsonl'}", f"run={files / 'run'}", *more]


def test_defaults_are_said_and_give_way(files: Path) -> None:
    notes: list[str] = []
    plan, _ = tuning_plan(words(files, "recipe.learning_rate=1e-3"), notes=notes)
    assert plan.data.form == "samples" and plan.recipe.epochs == 3 and plan.recipe.learning_rate == 1e-3
    assert plan.recipe.sequence == plan.model.max_positions == 64, "a model of 64 positions is given no 1024"
    [said] = [note for note in notes if note.startswith("tuning defaults: ")]
    assert "recipe.sequence=64" in said and "learning_rate" not in said
    assert set(DEFAULTS) - {"recipe.learning_rate"} <= {word.partition("=")[0] for word in said.split()}


def test_steps_stand_in_place_of_epochs(files: Path) -> None:
    plan, _ = tuning_plan(words(files, "recipe.steps=7"))
    assert (plan.recipe.steps, plan.recipe.epochs) == (7, 0)


def test_a_plan_file_says_all_but_that_samples_are_read(files: Path) -> None:
    path = files / "plan.yaml"
    path.write_text(f"model: {files / 'hf'}\ndata: {files / 'chat.jsonl'}\nrecipe: {{steps: 9, sequence: 32}}\n")
    plan, _ = tuning_plan([str(path)])
    assert plan.data.form == "samples" and (plan.recipe.steps, plan.recipe.epochs, plan.recipe.sequence) == (9, 0, 32)


def test_pairs_are_compared_by_themselves_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files, notes = pairs.write(tmp_path), list[str]()
    given = [f"model={files / 'hf'}", f"data={files / 'pairs.jsonl'}", f"run={files / 'run'}"]
    plan, _ = tuning_plan(given, notes=notes)
    plan.check()
    assert (plan.recipe.objective, plan.recipe.learning_rate, plan.recipe.epochs) == ("dpo", 1e-6, 1)
    assert plan.recipe.sequence == plan.model.max_positions
    [said] = [note for note in notes if note.startswith("tuning defaults: ")]
    assert "recipe.objective=dpo" in said and "recipe.learning_rate=1e-6" in said
    odds, _ = tuning_plan([*given, "recipe.objective=orpo"])
    assert (odds.recipe.objective, odds.recipe.learning_rate) == ("orpo", 8e-6)
    mine, _ = tuning_plan([*given, "recipe.learning_rate=1e-5", "recipe.steps=9"])
    assert (mine.recipe.learning_rate, mine.recipe.steps, mine.recipe.epochs) == (1e-5, 9, 0)


def test_a_run_over_pairs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = pairs.write(tmp_path)
    given = [f"model={files / 'hf'}", f"data={files / 'pairs.jsonl'}"]
    assert main(["data", "show", *given, "data.form=samples", "recipe.sequence=64"]) == 0
    shown = capsys.readouterr().out
    assert "--- pair 0, chosen ---" in shown and "--- pair 0, rejected ---" in shown
    run = f"run={files / 'run'}"
    assert main(["train", *given, run, "data.form=samples", "--no-dry-run"]) == 2
    assert "take recipe.objective=dpo" in capsys.readouterr().err
    assert main(["tune", *given, run, "recipe.steps=2", "recipe.global_batch=2", "--no-dry-run"]) == 0
    said = capsys.readouterr().out
    assert "reward margin" in said and "held out: loss" in said and "perplexity" not in said
    assert main(["eval", str(files / "run")]) == 2
    assert "preferences are scored by the run itself" in capsys.readouterr().err


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tune begins with the weights of a model: give its Hugging Face folder"):
        tuning_plan(["model=llama-tiny"])
    tuning_plan(["model=llama-tiny", "model.init=random"])


def test_from_a_folder_to_an_answer(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["recipe.epochs=1", "recipe.global_batch=4", "--no-dry-run", "--json"]
    assert main(["tune", *words(files, *changes)]) == 0
    assert main(["export", str(files / "run"), str(files / "out")]) == 0
    assert (files / "out" / "chat_template.jinja").is_file()
    capsys.readouterr()
    asked = ["--chat", "--prompt", "say 3", "--max-new-tokens", "4", "--greedy"]
    assert main(["generate", str(files / "out"), *asked]) == 0
    assert capsys.readouterr().out.startswith("<user>say 3\n<assistant>")


def test_data_show_says_what_is_trained(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ["data", "show", *words(files, "data.form=samples", "recipe.sequence=64")]
    assert main(shown) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "what is trained is green, what is masked grey" in out and "left out: 0" in out
    assert main([*shown, "--json"]) == 0
    import json

    found = json.loads(capsys.readouterr().out)
    trained = "".join(token["text"] for token in found["tokens"] if token["mark"] == "trained")
    assert trained.count("<|endoftext|>") == sum("say" in part for part in text_of(found).split("<user>"))
    assert "say" not in trained and found["samples"]["overlong"] == 0


def text_of(found: dict[str, list[dict[str, str]]]) -> str:
    return "".join(token["text"] for token in found["tokens"] if token["mark"] != "padding")


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("recipe.lr=1e-3", "learning_rate", 1e-3),
        ("recipe.max-steps=5", "steps", 5),
        ("recipe={steps: 5, sequence: 32}", "sequence", 32),
        ("recipe.num_train_epochs=2", "epochs", 2),
    ],
)
def test_what_is_said_by_another_name_stands(files: Path, word: str, field: str, value: float) -> None:
    notes: list[str] = []
    plan, _ = tuning_plan(words(files, word), notes=notes)
    assert getattr(plan.recipe, field) == value and f"recipe.{field}=" not in notes[-1]
    assert plan.recipe.weight_decay == 0 and plan.data.form == "samples"
    assert plan.recipe.epochs == (0 if "steps" in word else 2 if "epochs" in word else 3)
