"""`tune`: its defaults, and errors at the start."""

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.interface.planning.plan_reading import TUNING_DEFAULTS
from meshwright.spec.errors import ArgumentError, MeshwrightError, PlanError
from meshwright.verbs.main import main
from meshwright.verbs.tune.plan import tuning_plan
from tests.training import pairs
from tests.training.test_tuning import files as files  # a folder with a model and conversations


def words(files: Path, *more: str) -> list[str]:
    return [f"model={files / 'hf'}", f"data={files / 'chat.jsonl'}", f"run={files / 'run'}", *more]


def test_defaults_are_said_and_give_way(files: Path) -> None:
    notes: list[str] = []
    plan, _ = tuning_plan(words(files, "recipe.learning_rate=1e-3"), notes=notes)
    assert plan.data.form == "samples" and plan.recipe.epochs == 3 and plan.recipe.learning_rate == 1e-3
    assert plan.recipe.sequence == plan.model.max_positions == 64, "a model of 64 positions is given no 1024"
    [defaults] = [note for note in notes if note.startswith("tuning defaults: ")]
    assert "recipe.sequence=64" in defaults and "learning_rate" not in defaults
    assert set(TUNING_DEFAULTS) - {"recipe.learning_rate"} <= {word.partition("=")[0] for word in defaults.split()}


def test_steps_stand_in_place_of_epochs(files: Path) -> None:
    plan, _ = tuning_plan(words(files, "recipe.steps=7"))
    assert (plan.recipe.steps, plan.recipe.epochs) == (7, 0)


def test_a_plan_file_says_all_but_that_samples_are_read(files: Path) -> None:
    path = files / "plan.yaml"
    path.write_text(f"model: {files / 'hf'}\ndata: {files / 'chat.jsonl'}\nrecipe: {{steps: 9, sequence: 32}}\n")
    plan, _ = tuning_plan([str(path)])
    assert plan.data.form == "samples" and (plan.recipe.steps, plan.recipe.epochs, plan.recipe.sequence) == (9, 0, 32)


def test_a_form_that_tune_does_not_read_is_refused(files: Path) -> None:
    with pytest.raises(PlanError, match=r"data\.form=text has no answers to tune on"):
        tuning_plan(words(files, "data.form=text"))


def test_pairs_are_compared_by_themselves_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files, notes = pairs.write(tmp_path), list[str]()
    words = [f"model={files / 'hf'}", f"data={files / 'pairs.jsonl'}", f"run={files / 'run'}"]
    plan, _ = tuning_plan(words, notes=notes)
    plan.check()
    assert (plan.recipe.objective, plan.recipe.learning_rate, plan.recipe.epochs) == ("dpo", 1e-6, 1)
    assert plan.recipe.sequence == plan.model.max_positions
    [defaults] = [note for note in notes if note.startswith("tuning defaults: ")]
    assert "recipe.objective=dpo" in defaults and "recipe.learning_rate=1e-6" in defaults
    odds, _ = tuning_plan([*words, "recipe.objective=orpo"])
    assert (odds.recipe.objective, odds.recipe.learning_rate) == ("orpo", 8e-6)
    mine, _ = tuning_plan([*words, "recipe.learning_rate=1e-5", "recipe.steps=9"])
    assert (mine.recipe.learning_rate, mine.recipe.steps, mine.recipe.epochs) == (1e-5, 9, 0)


def test_a_run_over_pairs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = pairs.write(tmp_path)
    words = [f"model={files / 'hf'}", f"data={files / 'pairs.jsonl'}"]
    assert main(["data", "show", *words, "data.form=samples", "recipe.sequence=64"]) == 0
    shown = capsys.readouterr().out
    assert "--- pair 0, chosen ---" in shown and "--- pair 0, rejected ---" in shown
    run = f"run={files / 'run'}"
    assert main(["train", *words, run, "data.form=samples", "--no-dry-run"]) == 2
    assert "take recipe.objective=dpo" in capsys.readouterr().err
    assert main(["tune", *words, run, "recipe.steps=2", "recipe.global_batch=2", "--no-dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "reward margin" in printed and "held out: loss" in printed and "perplexity" not in printed
    assert main(["eval", str(files / "run")]) == 2
    assert "a file of preferences cannot be scored without the run's first weights" in capsys.readouterr().err


def test_a_model_without_weights_is_refused(files: Path) -> None:
    with pytest.raises(PlanError, match=r"tune needs a model: give its Hugging Face folder"):
        tuning_plan(["model=llama-tiny"])
    drawn = [word for word in words(files) if not word.startswith("model=")]
    tuning_plan([*drawn, "model=llama-tiny", "model.init=random"])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data=stdlib", "tune needs conversations: give data=FILE"),
        ("data=none.jsonl", "data.path=none.jsonl does not exist"),
        ("data.template=chat-ml", "data.template=chat-ml cannot be read: .* or a format: chatml, llama-3, llama-2"),
        ("recipe.objective=dpo", "has no columns chosen and rejected: take recipe.objective=cross-entropy"),
        ("recipe.epochs=0", "recipe.epochs=0 reads nothing"),
    ],
)
def test_what_is_wrong_with_the_data_is_said_before_anything_begins(files: Path, word: str, sentence: str) -> None:
    with pytest.raises(MeshwrightError, match=sentence):
        tuning_plan(words(files, word))


def test_a_plan_of_adapters_is_saved_as_one_of_fine_tuning(files: Path) -> None:
    answer = mw.plan(str(files / "hf"), cluster="h100x1", tune="lora:8").plan
    assert answer.data.form == "samples" and answer.model.lora and answer.model.lora.rank == 8
    assert (answer.recipe.epochs, answer.recipe.learning_rate, answer.recipe.weight_decay) == (3, 2e-4, 0)
    mw.plan("llama-tiny", cluster="h100x1", tune="lora").save(files / "saved.yaml")
    with pytest.raises(PlanError, match="tune needs a model"):
        tuning_plan([str(files / "saved.yaml"), f"data={files / 'chat.jsonl'}"])


def test_a_plan_of_codes_takes_less_and_says_how_it_is_held(files: Path) -> None:
    """An 8B model fits one card of 24 GB. Errors name the known formats."""
    dense, coded = (mw.plan("llama-3.1-8b", cluster="rtx4090x1", tune=how) for how in ("lora", "qlora:16"))
    lora = coded.plan.model.lora
    assert lora is not None and (lora.rank, lora.base) == (16, "nf4-double")
    smallest = "micro_batch=1,recompute=none"
    plans = [mw.plan("llama-3.1-8b", cluster="rtx4090x1", tune=how, layout=smallest) for how in ("lora", "qlora")]
    wide, narrow = (plan.ranking.best[0].peak_bytes for plan in plans)
    # 7.0e9 matrix elements of 2 bytes, at 4.13 bits each instead. Beside them an fp32 norm of a layer is compiled into
    # less where matrices are plain.
    assert 8.5e9 < wide - narrow < 11e9
    assert coded.plan.layout.micro_batch > dense.plan.layout.micro_batch
    with pytest.raises(ArgumentError, match="take full, lora, qlora, or with a rank as lora:64"):
        mw.plan("llama-3.1-8b", cluster="rtx4090x1", tune="qlora:many")


def test_a_base_is_scored_on_a_chat_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its columns make it samples, scored as by the run that started from the base."""
    chat = str(files / "chat.jsonl")
    assert main(["tune", *words(files, "recipe.steps=1", "recipe.learning_rate=0", "--no-dry-run")]) == 0
    capsys.readouterr()
    losses = []
    for model in ("hf", "run"):
        assert main(["eval", str(files / model), "--data", chat, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_held_out_part_that_no_row_has_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "long.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "p", "completion": " a" * (90 if number == 1 else 3)}) for number in range(3))
    )
    more = ["recipe.steps=1", "data.overlong=drop", "data.validation=0.3", "--no-dry-run"]
    assert main(["tune", *words(files, f"data={files / 'long.jsonl'}", *more)]) == 0
    assert "none of 1 held-out sample fits in a row of 64 tokens: nothing is evaluated" in capsys.readouterr().out


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

    document = json.loads(capsys.readouterr().out)
    trained = "".join(token["text"] for token in document["tokens"] if token["mark"] == "trained")
    assert trained.count("<|endoftext|>") == sum("say" in part for part in text_of(document).split("<user>"))
    assert "say" not in trained and document["samples"]["overlong"] == 0


def text_of(document: dict[str, list[dict[str, str]]]) -> str:
    return "".join(token["text"] for token in document["tokens"] if token["mark"] != "padding")


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
