"""Fine-tuning as a run: the loss that transformers finds for the same conversations, steps from epochs, samples held
out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright import planfile
from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.spec import BatchStage, Plan, Recipe
from meshwright.spec.errors import CheckpointError, IllegalLayout, PlanError
from meshwright.training import loop
from tests.training.running import Notes
from tests.training.test_weights import SHAPES, directory

CHATML = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def conversations(number: int) -> list[dict[str, object]]:
    """Of one or two questions, so that their lengths differ."""
    rows: list[dict[str, object]] = []
    for index in range(number):
        turns = [("user", f"say {index}"), ("assistant", f"{index} é")] * (1 + index % 2)
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path)


def write(folder: Path) -> Path:
    """A Hugging Face folder `hf` and a file `chat.jsonl`; returns the folder."""
    directory(folder / "hf", SHAPES["llama"])
    (folder / "hf" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    rows = map(json.dumps, conversations(24))
    (folder / "chat.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def plan(files: Path, *words: str) -> Plan:
    words_of_plan = [
        f"model={files / 'hf'}",
        f"data={files / 'chat.jsonl'}",
        "data.form=samples",
        f"run={files / 'run'}",
    ]
    words_of_plan += ["recipe.sequence=64", "recipe.global_batch=4", "recipe.steps=4", "recipe.warmup_steps=0"]
    words_of_plan += ["recipe.learning_rate=1e-2", "recipe.learning_rate_schedule=constant", "recipe.weight_decay=0"]
    return planfile.read(None, [*words_of_plan, *words], read_folder=read_folder)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best-fit", "off"])
def test_losses_are_those_of_transformers(files: Path, packing: str) -> None:
    """Each conversation by itself, its text, ids and mask by transformers' own template code."""
    transformers = pytest.importorskip("transformers")
    asked, watcher = plan(files, f"data.packing={packing}", "recipe.epsilon=1e-8", "recipe.clip=1.0"), Notes()
    loop.run(asked, watchers=[watcher])

    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(files / "hf", dtype=torch.float32).train()
    recipe = asked.recipe
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon, weight_decay=0.0
    )
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, SampleRows)
    messages_of_text = {text(tokenizer, row): row["messages"] for row in conversations(24)}
    for step, seen in enumerate(watcher.steps):
        batch = rows.take(4 * step, 4)
        losses, tokens = [], 0
        for ids, documents, targets in zip(batch.tokens, batch.documents, batch.targets, strict=True):
            for document in range(documents[-1] + 1):
                here = documents == document
                if not (targets[here] >= 0).any():
                    continue  # padding
                encoded = tokenizer.apply_chat_template(
                    messages_of_text[tokenizer.decode(ids[here])],
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    return_tensors="pt",
                )
                labels = torch.where(encoded["assistant_masks"].bool(), encoded["input_ids"], -100)
                logits = model(input_ids=encoded["input_ids"]).logits[0, :-1]
                losses.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
                tokens += int((labels[0, 1:] >= 0).sum())
        loss = torch.stack(losses).sum() / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert seen.loss == pytest.approx(loss.item(), abs=1e-4)
        assert seen.grad_norm == pytest.approx(norm.item(), rel=1e-3)


def text(tokenizer: object, row: dict[str, object]) -> str:
    rendered: str = tokenizer.apply_chat_template(row["messages"], tokenize=False)  # type: ignore[attr-defined]  # transformers'
    return rendered


def test_epochs_are_steps_over_the_rows_there_are(files: Path) -> None:
    asked, watcher = plan(files, "recipe.epochs=3", "recipe.learning_rate=0"), Notes()
    corpus = prepare(asked.data)
    rows = len(numbered_rows(asked.data, asked.recipe, corpus, corpus.train, shuffle=True))
    loop.run(asked, watchers=[watcher])
    assert watcher.info is not None and watcher.summary is not None
    assert watcher.info.steps == watcher.summary.steps == -(-3 * rows // 4)
    stored_plan = planfile.read(files / "run" / "plan.yaml")
    assert stored_plan.recipe.steps == watcher.info.steps and stored_plan.recipe.epochs == 3
    assert loop.run(stored_plan, resume="auto").step == watcher.info.steps


def test_what_is_held_out_is_scored_by_its_answers_alone(files: Path) -> None:
    asked, watcher = plan(files, "recipe.learning_rate=0", "data.validation=0.25"), Notes()
    loop.run(asked, watchers=[watcher])
    corpus = prepare(asked.data)
    [evaluation] = watcher.evaluations
    assert corpus.validation.num_documents == 6
    assert evaluation.tokens == corpus.validation.num_tokens < len(corpus.validation.tokens)


def test_samples_that_see_one_another_are_refused(files: Path) -> None:
    with pytest.raises(IllegalLayout, match=r"samples of a row see one another: take recipe.document_mask=true"):
        plan(files, "recipe.document_mask=false").check()
    plan(files, "recipe.document_mask=false", "data.packing=off").check()


def test_the_template_that_was_trained_by_goes_with_the_run(files: Path) -> None:
    other = files / "other.jinja"
    other.write_text(CHATML.replace("<assistant>", "<bot>"), encoding="utf-8")
    asked = plan(files, "recipe.steps=1", f"data.template={other}")
    loop.run(replace(asked, run=str(files / "second")))
    assert (files / "second" / "chat_template.jinja").read_text(encoding="utf-8") == other.read_text(encoding="utf-8")


def test_a_limit_of_text_is_refused(files: Path) -> None:
    with pytest.raises(PlanError, match=r"data.limit_bytes=9 cuts text, and data.form=samples reads whole rows"):
        plan(files, "data.limit_bytes=9")


def test_steps_that_are_said_last_end_the_counting_of_epochs(files: Path) -> None:
    assert plan(files, "recipe.epochs=4", "recipe.steps=20").recipe.epochs == 0
    assert plan(files, "recipe.steps=20", "recipe.epochs=4").recipe.epochs == 4


def test_rows_of_another_make_are_no_place_to_go_on(files: Path) -> None:
    loop.run(plan(files, "recipe.steps=2", "data.packing=off"))
    with pytest.raises(CheckpointError, match=r"trained with data.packing=off, the plan says data.packing=best-fit"):
        loop.run(plan(files, "recipe.steps=4"), resume="auto")
    with pytest.raises(
        CheckpointError, match=r"trained with other text or .*, another template, train_on or thinking,"
    ):
        loop.run(plan(files, "recipe.steps=4", "data.packing=off", "data.train_on=last"), resume="auto")


def test_a_warm_up_longer_than_the_epochs_is_refused_and_one_that_follows_is_not(files: Path) -> None:
    with pytest.raises(PlanError, match=r"recipe.warmup_steps=600 exceeds the \d+ steps of recipe.epochs=1"):
        loop.run(plan(files, "recipe.epochs=1", "recipe.warmup_steps=600"))
    assert Recipe(epochs=2).over(48).rising_steps == 0
    with pytest.raises(PlanError, match=r"recipe.epochs with recipe.batch_ramp"):
        Recipe(epochs=2, batch_ramp=(BatchStage(tokens=9, global_batch=64),))


def test_what_does_not_fit_is_said(files: Path) -> None:
    watcher = Notes()
    loop.run(plan(files, "recipe.steps=1", "recipe.sequence=24"), watchers=[watcher])
    assert watcher.info is not None
    notes = [text for label, text in watcher.info.foreseen if label == "note"]
    assert any("longer than a row lost" in note and "data.overlong=drop" in note for note in notes)


def test_a_template_is_found_from_any_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "other.jinja").write_text(CHATML, encoding="utf-8")
    monkeypatch.chdir(files)
    loop.run(plan(files, "recipe.steps=1", "data.template=other.jinja"))
    monkeypatch.chdir(files.parent)
    stored_plan = planfile.read(files / "run" / "plan.yaml")
    assert prepare(stored_plan.data).train.num_documents > 0


def test_a_model_without_a_template_is_given_a_plain_one_and_it_is_said(files: Path) -> None:
    """Of conversations alone: completions and texts are written by none."""
    (files / "hf" / "chat_template.jinja").unlink()
    config = json.loads((files / "hf" / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (files / "hf" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    pieces = ({"prompt": f"say {number}", "completion": f" {number}"} for number in range(12))
    (files / "pieces.jsonl").write_text("\n".join(map(json.dumps, pieces)), encoding="utf-8")
    notes_of_run = {}
    for name in ("chat", "pieces"):
        watcher = Notes()
        words = ("recipe.steps=1", "data.validation=0", f"data={files / name}.jsonl", f"run={files / name}")
        loop.run(plan(files, *words), watchers=[watcher])
        assert watcher.info is not None
        notes_of_run[name] = [
            text for text in watcher.info.notes if text.startswith("turns are written by the plain template")
        ]
    assert (
        len(notes_of_run["chat"]) == 1
        and "data.template=FILE" in notes_of_run["chat"][0]
        and notes_of_run["pieces"] == []
    )
    assert "data.template=llama-2 is a format whose tokens the vocabulary has" in notes_of_run["chat"][0]
    assert "### assistant" in (files / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
