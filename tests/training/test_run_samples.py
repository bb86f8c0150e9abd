"""Samples while a run is trained: greedy continuations of its weights, the same under every layout, and no change of
what is trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.interface.trained.opening import load
from meshwright.model.generate import generate
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.training import loop
from meshwright.training.run_samples import choose_prompts, read_samples
from tests.training.running import Notes
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan

WORDS = ["recipe.sample_every=2", "recipe.sample_tokens=6", "recipe.steps=4", "data.validation=0.2"]


def taken(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_samples_are_what_the_model_says(files: Path) -> None:
    """The last ones are those of the exported weights; prompts are what comes before held-out answers."""
    asked = plan(files, *WORDS)
    loop.run(asked)
    records = taken(files / "run")
    assert [entry["step"] for entry in records] == [2, 4] and read_samples(files / "run" / "samples.jsonl") == records
    trained, corpus = load(files / "run"), prepare(asked.data)
    held = choose_prompts(asked, corpus)
    assert len(held) == 3 and all(corpus.tokenizer.decode(entry.ids).endswith("<assistant>") for entry in held)
    for entry, sample in zip(held, records[-1]["samples"], strict=True):
        made = generate(trained.model, entry.ids, max_new_tokens=6, stop_ids=trained.stop_ids)
        assert sample["text"] == corpus.tokenizer.decode(made.ids)
        assert sample["prompt"] == corpus.tokenizer.decode(entry.ids)
        assert sample["held_out"].endswith("<|endoftext|>") and " é" in sample["held_out"]
    assert records[0]["samples"] != records[1]["samples"], "the weights are others"


def test_what_is_trained_is_the_same(files: Path) -> None:
    """To the bit, with dropout, whether samples are taken or not."""
    losses = []
    for name, every in (("with", 1), ("without", 0)):
        watcher = Notes()
        words = [*WORDS, f"recipe.sample_every={every}", "recipe.dropout=0.2", f"run={files / name}"]
        loop.run(plan(files, *words), watchers=[watcher])
        losses.append([(step.loss, step.grad_norm) for step in watcher.steps])
    assert losses[0] == losses[1]
    assert not (files / "without" / "samples.jsonl").exists()


def test_prompts_may_be_given(files: Path) -> None:
    loop.run(plan(files, *WORDS, 'recipe.sample_prompts=["say 3", "what?"]', "recipe.steps=1"))
    [record] = taken(files / "run")
    assert [sample["prompt"] for sample in record["samples"]] == [
        "<user>say 3\n<assistant>",
        "<user>what?\n<assistant>",
    ]
    assert [sample["held_out"] for sample in record["samples"]] == ["", ""]


def test_a_resumed_run_forgets_what_came_after(files: Path) -> None:
    words = [*WORDS, "recipe.checkpoint_every=2", "recipe.sample_every=1"]
    loop.run(plan(files, *words, "recipe.steps=3"))
    whole = taken(files / "run")
    assert [record["step"] for record in whole] == [1, 2, 3]
    (files / "run" / "checkpoints" / "step-000003" / "COMMIT").unlink()
    loop.run(plan(files, *words, "recipe.steps=3"), resume="auto")
    assert taken(files / "run") == whole


def test_what_makes_no_sense_is_refused(files: Path) -> None:
    with pytest.raises(PlanError, match=r"recipe.sample_tokens=64 must be at least 1 and below recipe.sequence=64"):
        plan(files, "recipe.sample_every=1")
    with pytest.raises(PlanError, match=r"recipe.sample_every=-1 must be 0 or more"):
        plan(files, "recipe.sample_every=-1")


def test_without_prompts_a_run_says_so(files: Path) -> None:
    watcher = Notes()
    loop.run(plan(files, *WORDS, "data.validation=0", "recipe.steps=1"), watchers=[watcher])
    assert watcher.info is not None
    assert any(note.startswith("no samples are taken: nothing is held out") for note in watcher.info.notes)


LAYOUTS = [
    ["layout.dp_shard=2", "layout.zero=3"],
    ["layout.dp_replicate=2", "layout.zero=0"],
    ["layout.tp=2", "layout.sp=true"],
    ["layout.cp=2"],
    ["layout.pp=2"],
]


def _run(asked: Plan) -> list[str]:
    """What the run said at its start, on the first rank."""
    torch.set_num_threads(1)
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return list(watcher.info.notes) if watcher.info else []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda words: words[0])
@pytest.mark.long
def test_every_layout_says_the_same(files: Path, layout: list[str]) -> None:
    words = [*WORDS, "recipe.global_batch=4", "layout.micro_batch=2", "recipe.learning_rate=1e-3"]
    loop.run(plan(files, *words, f"run={files / 'alone'}"))
    notes, _ = on_ranks(2, _run, plan(files, *words, *layout))
    assert taken(files / "run") == taken(files / "alone")
    together = any(note.startswith("samples take up to 12 forward passes") for note in notes)
    assert together == ("layout.zero=0" not in layout)
