"""`eval --against`: a run and its initial model on held-out text, with the noise of the difference."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.data import Tokenizer
from meshwright.parallel import on_one_device
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from meshwright.training import loop
from meshwright.training.step.evaluate import row_losses
from meshwright.verbs.main import main
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan
from tests.training.test_weights import SHAPES, directory

WORDS = ["data.validation=0.4", "data.train_on=assistant,user", "recipe.eval_sequences=0"]


def test_a_run_is_held_against_what_it_began_with(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=25"))
    assert main(["eval", str(files / "run"), "--against", str(files / "hf"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {figure["metric"]: figure for figure in document["figures"]}
    assert list(rows) == ["loss", "loss of user", "loss of assistant"]
    assert {figure["task"] for figure in document["figures"]} == {"held-out"} and rows["loss"]["items"] == 10
    assert rows["loss"]["verdict"] == "better" and rows["loss"]["difference"]["value"] < 0
    alone = mw.load(files / "run").evaluate()
    assert rows["loss"]["value"]["value"] == pytest.approx(alone.loss, rel=1e-6)
    assert rows["loss of user"]["value"]["value"] == pytest.approx((alone.roles or {})["user"].loss, rel=1e-6)
    assert main(["eval", str(files / "run"), "--against", str(files / "hf")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("BETTER  3 of 3 figures better") and "loss of assistant" in told


def test_nothing_changed_is_within_noise(files: Path) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=1", "recipe.learning_rate=0"))
    answer = mw.evaluate(files / "run", against=files / "hf")
    assert [figure.verdict for figure in answer.figures] == ["within noise"] * 3
    assert answer.headline == "0 of 3 figures better, 3 within noise"
    assert [row["difference"] for row in answer.rows()] == [0, 0, 0] and "within noise" in answer._repr_html_()
    assert mw.evaluate(files / "run").headline == "" and repr(mw.evaluate(files / "run")).endswith("3 figures")


def test_losses_of_other_tokens_are_not_compared(files: Path) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=1"))
    directory(files / "other", SHAPES["llama"], Tokenizer.bytes())
    with pytest.raises(ArgumentError, match="another tokenizer than"):
        mw.evaluate(files / "run", against=files / "other")
    with pytest.raises(RunError, match=r"against=.*none' does not exist"):
        mw.evaluate(files / "run", against=files / "none")


def test_a_gguf_file_is_held_against_what_it_was_made_of(files: Path) -> None:
    mw.quantize(files / "hf", "q8_0", files / "small.gguf", quality=False)
    answer = mw.evaluate(files / "small.gguf", against=files / "hf", data=files / "chat.jsonl")
    assert [figure.metric for figure in answer.figures] and abs(answer.rows()[0]["difference"]) < 0.05
    directory(files / "other", SHAPES["llama"], Tokenizer.bytes())
    with pytest.raises(ArgumentError, match="another tokenizer than"):
        mw.evaluate(files / "small.gguf", against=files / "other", data=files / "chat.jsonl")


def test_a_folder_is_held_against_a_run_on_what_that_held_out(files: Path) -> None:
    loop.run(plan(files, *WORDS, "recipe.steps=25"))
    right = mw.evaluate(files / "run", against=files / "hf")
    answer = mw.evaluate(files / "hf", against=files / "run")
    for row, other in zip(answer.rows(), right.rows(), strict=True):
        assert (row["metric"], row["items"]) == (other["metric"], other["items"])
        assert row["value"] == pytest.approx(other["before"], rel=1e-6)
        assert row["difference"] == pytest.approx(-other["difference"], rel=1e-5)
    with pytest.raises(ArgumentError, match="does not say which text"):
        mw.evaluate(files / "hf", against=files / "hf")


def test_tasks_need_their_extra(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.spec.extras.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'meshwright\[eval\]'"):
        mw.evaluate(files / "hf", tasks=str(files))


def test_samples_of_one_conversation_are_one_item(files: Path) -> None:
    """A template that rewrites earlier answers makes a sample of each. These are not independent."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    template += "{{ eos_token if m.role == 'assistant' and loop.last }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (files / "hf" / "chat_template.jinja").write_text(template, encoding="utf-8")
    loop.run(plan(files, "data.validation=0.4", "recipe.steps=3"))
    (answer,) = mw.evaluate(files / "run", against=files / "hf").figures
    rows = mw.load(files / "run").held_out_rows(None, 0, apart=True)
    talks = [json.loads(line)["messages"] for line in (files / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [sum(message["role"] == "assistant" for message in talk) for talk in talks]
    assert rows.items is not None and max(answers[row] for row in rows.items) > 1
    assert all(rows.items.count(row) == answers[row] for row in rows.items), "a sample of each answer"
    assert answer.items == len(set(rows.items)) == 10
    device = torch.device("cpu")
    nats, counts = (
        sums.sum(2) for sums in row_losses(on_one_device(mw.load(files / "run").model), rows.batches(device)).split(1)
    )
    sums = np.zeros((2, 24))
    np.add.at(sums, (slice(None), np.array(rows.items)), np.stack((nats[0], counts[0])))
    mine, tokens = sums[:, np.unique(rows.items)]
    rest = mine - mine.sum() / tokens.sum() * tokens
    error = (10 / 9 * (rest**2).sum()) ** 0.5 / tokens.sum()
    assert answer.value.error == pytest.approx(error, rel=1e-6)


def test_a_mixture_is_held_against_by_weight(files: Path) -> None:
    """The weighted mean, as the run scores itself, then each source."""
    rows = [{"prompt": f"q{number}", "completion": " answer" * (3 + number % 3)} for number in range(30)]
    (files / "more.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sources = f"data={files / 'chat.jsonl'}:0.9,{files / 'more.jsonl'}:0.1"
    loop.run(plan(files, sources, "data.validation=0.4", "recipe.steps=25"))
    answer = mw.evaluate(files / "run", against=files / "hf").figures
    assert [figure.task for figure in answer] == [
        "held-out",
        *(f"held-out {files / name}.jsonl" for name in ("chat", "more")),
    ]
    whole, chat, more = answer
    alone = mw.load(files / "run").evaluate()
    assert whole.value.value == pytest.approx(alone.loss, rel=1e-6)
    assert whole.value.value == pytest.approx(0.9 * chat.value.value + 0.1 * more.value.value, rel=1e-9)
    assert whole.items == chat.items + more.items and whole.verdict == "better"
    assert chat.difference and more.difference and whole.difference
    assert chat.difference.error and more.difference.error and whole.difference.error
    by_weight = ((0.9 * chat.difference.error) ** 2 + (0.1 * more.difference.error) ** 2) ** 0.5
    assert whole.difference.error == pytest.approx(by_weight, rel=1e-9)
