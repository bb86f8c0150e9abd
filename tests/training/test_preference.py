"""Objectives over pairs: written out, under layouts, resumed, refused; and where the reference comes from."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data import Sequences
from meshwright.observe.ranks import on_ranks
from meshwright.planner.time.collectives import traffic
from meshwright.spec import Recipe
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.recipe.recipe import FIGURES, PREFERENCES, most_answers
from meshwright.store import checkpoint
from meshwright.training import loop
from meshwright.training.objectives import reference as reference_pass
from meshwright.training.objectives.objectives import REFERENCE, objective_of
from meshwright.training.step.batches import Batch, to_batch
from tests.model.shrunk import VOCAB
from tests.training import pairs
from tests.training.running import MOE, Notes
from tests.training.tiny import relative, small, trained

LENGTHS = ((3, 5, 4, 2), (6, 3), (2, 2, 2, 2, 2, 2))
"""Tokens of the answers of each row, prompts included; two of a pair."""
SEQUENCE = 16
PROMPT = 1
BETA = 0.3


def packed() -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    """Rows of pairs, and each pair by itself: (better, worse) tokens, of which all but the first is an answer."""
    draw, shape = np.random.default_rng(5), (len(LENGTHS), SEQUENCE)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, -100, np.int64)
    documents, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    answers = np.full((len(LENGTHS), most_answers(SEQUENCE)), -1)
    singles, number = [], 0
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for answer, length in enumerate(lengths):
            here = slice(start, start + length)
            tokens[row, here] = ids = draw.integers(VOCAB, size=length)
            documents[row, here], positions[row, here] = answer, np.arange(length)
            targets[row, start + PROMPT - 1 : start + length - 1] = ids[PROMPT:]
            answers[row, answer], number, start = number, number + 1, start + length
            singles.append(torch.as_tensor(ids))
        documents[row, start:], positions[row, start:] = len(lengths), np.arange(SEQUENCE - start)
    rows = Sequences(
        tokens=tokens, targets=targets, documents=documents, positions=positions, packed=True, answers=answers
    )
    batch = to_batch(
        rows, torch.device("cpu"), document_mask=True, read_answers=lambda numbers: {REFERENCE: reference(numbers)}
    )
    return batch, list(zip(singles[::2], singles[1::2], strict=True))


def reference(numbers: Any) -> Any:
    """What another model said of an answer."""
    return np.where(numbers < 0, 0.0, -3.0 - numbers * 0.7)


Answer = tuple[Tensor, int, float]
"""(log-probability, tokens, reference)."""


def dpo(better: Answer, worse: Answer, smoothing: float = 0.0) -> Tensor:
    margin = BETA * ((better[0] - better[2]) - (worse[0] - worse[2]))
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def ipo(better: Answer, worse: Answer) -> Tensor:
    margin = (better[0] - better[2]) / better[1] - (worse[0] - worse[2]) / worse[1]
    return (margin - 1 / (2 * BETA)) ** 2


def orpo(better: Answer, worse: Answer) -> Tensor:
    p, q = ((side[0] / side[1]).exp() for side in (better, worse))
    return -p.log() - BETA * torch.sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q))).log()


WRITTEN: dict[str, tuple[dict[str, Any], Callable[[Answer, Answer], Tensor]]] = {
    "dpo": ({}, dpo),
    "smoothed": ({"objective": "dpo", "preference_smoothing": 0.2}, lambda better, worse: dpo(better, worse, 0.2)),
    "ipo": ({}, ipo),
    "orpo": ({}, orpo),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("size", [1, 3])
def test_packed_pairs_are_those_of_the_written_out_loss(name: str, size: int) -> None:
    """Each answer through a plain model by itself, in fp32; gradients too, whatever shares a row or a micro-batch."""
    keys, written = WRITTEN[name]
    recipe = Recipe(**{"objective": name, "sequence": SEQUENCE, "preference_beta": BETA, **keys})
    whole, singles = packed()
    plain, number, losses = small(), 0, []
    for pair in singles:
        sides = []
        for ids in pair:
            scores = plain(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])
            sides.append((scores.double().sum(), len(ids) - PROMPT, float(reference(np.array(number)))))
            number += 1
        losses.append(written(sides[0], sides[1]))
    expected = torch.stack(losses).mean()
    expected.backward()
    result, optimizer = trained(small(), whole, size, clip=0.0, objective=objective_of(recipe))
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None and relative(optimizer.seen[key], parameter.grad) < 1e-4, key
    named = dict(zip(FIGURES, result.figures.tolist(), strict=True))
    assert named["reward_margin"] == pytest.approx(named["chosen_reward"] - named["rejected_reward"], abs=1e-5)
    assert named["accuracy"] * len(singles) == pytest.approx(round(named["accuracy"] * len(singles)), abs=1e-5)


def test_every_objective_over_pairs_is_written_out() -> None:
    assert set(PREFERENCES) <= set(WRITTEN), "write its formula in plain code"


def test_a_row_without_pairs_changes_nothing() -> None:
    whole, _ = packed()
    objective = objective_of(Recipe(objective="orpo", sequence=SEQUENCE))
    empty = replace(
        whole,
        tokens=torch.cat((whole.tokens, whole.tokens[:1])),
        targets=torch.cat((whole.targets, torch.full((1, SEQUENCE), -100))),
        documents=torch.cat((_there(whole.documents), torch.zeros(1, SEQUENCE, dtype=torch.int32))),
        positions=torch.cat((_there(whole.positions), _there(whole.positions)[:1])),
        valid_of_rows=(*whole.valid_of_rows, 0),
        documents_of_rows=(*whole.documents_of_rows, (1, SEQUENCE)),
        answers_of_rows=(*whole.answers_of_rows, 0),
        more={name: torch.cat((tensor, tensor[:1])) for name, tensor in whole.more.items()},
    )
    outcome, first = trained(small(), whole, 1, clip=0.0, objective=objective)
    other, second = trained(small(), empty, 2, clip=0.0, objective=objective)
    assert other.loss.item() == pytest.approx(outcome.loss.item(), rel=1e-6)
    assert all(relative(second.seen[name], grad) < 1e-5 for name, grad in first.seen.items())


def _there(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


LAYOUTS = {
    "tp": ("layout.tp=2", "layout.sp=true"),
    "cp": ("layout.cp=2", "layout.context_split=striped"),
    "pp": ("layout.pp=2", "layout.schedule=1f1b", "layout.micro_batch=1"),
    "zero": ("layout.dp_shard=2", "layout.zero=2", "layout.micro_batch=1"),
}
SLOW = ((), pytest.mark.slow)
FOUR = {
    "cp-pp": ("layout.cp=2", "layout.pp=2", "layout.micro_batch=2"),
    "tp-dp": ("layout.tp=2", "layout.dp_replicate=2", "layout.zero=0", "layout.micro_batch=1"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return pairs.write(tmp_path)


def same(curve: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(curve) == len(expected)
    for step, (ours, theirs) in enumerate(zip(curve, expected, strict=True)):
        for name in ours.keys() - ({"accuracy"} if step == 0 else set()):  # at first margins are 0 but for rounding
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), (step, name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW[name != "cp"]) for name in LAYOUTS])
def test_every_layout_is_one_device(folder: Path, name: str) -> None:
    """And sends what the planner says, but for the documents that cp ranks tell each other."""
    expected = pairs.curve(str(folder), "alone", ())
    same(on_ranks(2, pairs.curve, str(folder), name, LAYOUTS[name])[0], expected)
    ledger = json.loads((folder / name / "ledger.json").read_text(encoding="utf-8"))
    sent = {(entry["axis"], entry["collective"]): (entry["calls"], entry["bytes"]) for entry in ledger["traffic"]}
    sent.pop(("cp", "all_gather"), None)
    planned = traffic(pairs.plan(folder, *LAYOUTS[name]))
    assert sent == {(entry.axis, entry.collective): (entry.calls, entry.sent_bytes) for entry in planned}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_device(folder: Path, name: str, objective: str) -> None:
    words = (f"recipe.objective={objective}", "data.validation=0.2")
    expected = pairs.curve(str(folder), "alone", words)
    same(on_ranks(4, pairs.curve, str(folder), name, (*words, *FOUR[name]))[0], expected)
    mine, theirs = (_evaluations(folder / run)[-1] for run in (name, "alone"))
    for key in ("loss", *FIGURES):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key


def _evaluations(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record.get("kind") == "eval"]


@pytest.mark.parametrize("storage", ["run", "cache", "nothing"])
@pytest.mark.long
def test_a_resumed_run_compares_with_the_weights_it_began_with(folder: Path, storage: str) -> None:
    """Wherever their log-probabilities are found; where they are lost, with the first weights themselves."""
    words = ("recipe.steps=6",)
    whole = pairs.curve(str(folder), "whole", words)
    first = pairs.curve(str(folder), "parts", ("recipe.steps=3",))
    if storage != "run":
        (folder / "parts" / "reference.safetensors").unlink()
    if storage != "cache":
        shutil.rmtree(folder / "cache" / "meshwright" / "reference")
    same(first + pairs.curve(str(folder), "parts", words, resume="auto"), whole)


def test_held_out_pairs_have_loss_and_accuracy(folder: Path) -> None:
    watcher = Notes()
    loop.run(pairs.plan(folder, "data.validation=0.25", "recipe.learning_rate=0"), watchers=[watcher])
    [evaluation] = watcher.evaluations
    assert (
        evaluation.loss == pytest.approx(math.log(2), abs=1e-6)
        and evaluation.perplexity is evaluation.bits_per_byte is None
    )
    assert evaluation.figures.keys() == set(FIGURES) and evaluation.figures["reward_margin"] == pytest.approx(
        0, abs=1e-6
    )
    assert watcher.summary is not None and watcher.summary.bits_per_byte is None
    [record] = _evaluations(folder / "run")
    assert record["accuracy"] == evaluation.figures["accuracy"] and "perplexity" not in record


def test_the_reference_is_kept_by_content(folder: Path) -> None:
    """Another run over the same weights and pairs finds it; other weights, text or rows make another."""

    def reference_line(run: str, *words: str) -> str:
        watcher = Notes()
        loop.run(pairs.plan(folder, "recipe.steps=1", *words, run=run), watchers=[watcher])
        assert watcher.info is not None
        return dict(watcher.info.foreseen).get("reference", "")

    assert "computed in" in reference_line("first")
    assert "found in" in reference_line("second", "recipe.preference_beta=0.5", "data.packing=off")
    assert "computed in" in reference_line("shorter", "recipe.sequence=32")
    weights = next((folder / "hf").glob("*.safetensors"))
    blob = bytearray(weights.read_bytes())
    blob[-1] ^= 1
    weights.write_bytes(blob)
    assert "computed in" in reference_line("other")
    assert reference_line("none", "recipe.objective=orpo") == ""
    assert not (folder / "none" / "reference.safetensors").exists()


def test_a_long_wait_for_the_reference_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr(reference_pass.time, "perf_counter", lambda: float(next(seconds)))
    batches = [packed()[0]] * 40
    assert list(reference_pass.announce_progress(iter(batches), 40)) == batches
    assert caplog.messages == ["log-probabilities of answers under the first weights take about 1 min 12 s more"]
    caplog.clear()
    list(reference_pass.announce_progress(iter(batches[:12]), 12))
    assert not caplog.messages


def test_drawn_weights_are_a_reference_too(folder: Path) -> None:
    curve = pairs.curve(str(folder), "drawn", ("model.init=random",))
    assert curve[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and curve[-1]["loss"] < curve[0]["loss"]


@pytest.mark.slow
def test_experts_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs.write(tmp_path, shape=replace(MOE, vocab=2048, max_positions=64))
    curve = pairs.curve(str(tmp_path), "run", ())
    assert curve[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and curve[-1]["loss"] < curve[0]["loss"]
    spread = ("layout.dp_shard=2", "layout.ep=2", "layout.micro_batch=1")
    same(on_ranks(2, pairs.curve, str(tmp_path), "spread", spread)[0], curve)


def test_weights_that_are_gone_are_named(folder: Path) -> None:
    pairs.curve(str(folder), "run", ("recipe.steps=1",))
    (folder / "run" / "reference.safetensors").unlink()
    for weights in (folder / "hf").glob("*.safetensors"):
        weights.unlink()
    assert checkpoint.find_latest(folder / "run" / "checkpoints") is not None
    with pytest.raises(PlanError, match=r"has no \*\.safetensors files, .* need these weights: put them back"):
        loop.run(pairs.plan(folder, "recipe.steps=2"), resume="auto")


REFUSED = {
    "data.form=text": "compares answers, and data.form=text has none: take data.form=samples",
    "data.train_on=all": "data.train_on=all counts their prompts too: take data.train_on=auto",
    "data.packing=off recipe.document_mask=false": "two answers in a row, .* take recipe.document_mask=true",
    "recipe.noise_scale_every=2 layout.micro_batch=2": "counts pairs: take recipe.noise_scale_every=0",
    "recipe.objective=ipo recipe.preference_smoothing=0.1": "smoothing=0.1 belongs to recipe.objective=dpo",
    "recipe.objective=cross-entropy recipe.preference_beta=0.2": "beta=0.2 belongs to recipe.objective=dpo, ipo, orpo",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_combinations_are_refused_before_anything_begins(folder: Path, words: str) -> None:
    with pytest.raises(IllegalLayout, match=REFUSED[words]):
        pairs.plan(folder, *words.split()).check()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recipe.preference_beta=0", r"recipe.preference_beta=0.0 must be a finite number above 0"),
        ("recipe.preference_smoothing=0.5", r"recipe.preference_smoothing=0.5 is a share of pairs: .* \[0, 0.5\)"),
        ("recipe.beta=0.1", r"preference tuning recipe.preference_beta"),
    ],
)
def test_wrong_values_are_refused(folder: Path, word: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pairs.plan(folder, word)


def test_names_of_other_tools_are_read(folder: Path) -> None:
    words = ("recipe.loss_type=sigmoid", "recipe.dpo_beta=0.2", "recipe.label_smoothing=0.1")
    with pytest.warns(UserWarning, match="is read as recipe"):
        recipe = pairs.plan(folder, *words).recipe
    assert (recipe.objective, recipe.preference_beta, recipe.preference_smoothing) == ("dpo", 0.2, 0.1)
