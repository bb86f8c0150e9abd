"""Runs over several sources: of one source they are its run, ended or laid out otherwise they are the same run."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import prepare
from meshwright.data.corpus import token_cache
from meshwright.data.corpus.corpus import MixedStream
from meshwright.data.report import describe_run
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.interface.trained.opening import load
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Data, Layout, Plan
from meshwright.spec.errors import CheckpointError, DataError
from meshwright.spec.plan.plan import MixtureSource
from meshwright.store import checkpoint
from meshwright.training import loop, plot
from meshwright.training.step.evaluate import score_sources
from meshwright.training.step.watch import EvalMetrics
from tests.training import running
from tests.training.running import Notes, PowerCut, Terminated, assert_same_end, metrics, tensors

OPTIONS: dict[str, Any] = {"steps": 10, "eval_every": 5, "checkpoint_every": 5, "eval_sequences": 0}
Make = Callable[..., Plan]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A plan over two sources, files of text and rows of .jsonl whose field has another name."""
    texts = running.write_texts(tmp_path / "texts")
    lines = (json.dumps({"body": f"line {number} says {'ho ' * (number % 7)}\n" * 3}) for number in range(60))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))

    def made(name: str = "run", weights: tuple[float, ...] = (3, 1), **recipe: Any) -> Plan:
        both = (
            MixtureSource(path=str(texts), weight=weights[0]),
            *(MixtureSource(path=str(tmp_path / "rows.jsonl"), weight=w, text_field="body") for w in weights[1:]),
        )
        asked = running.plan(texts, tmp_path / name, **{**OPTIONS, **recipe})
        return replace(asked, data=replace(asked.data, path="", mixture=both))

    return made


def alone(plan: Plan, source: int, run: str) -> Plan:
    """The run of one of its sources by itself."""
    return replace(plan, data=plan.data.sources[source], run=run)


def test_a_mixture_of_one_source_is_its_run(make: Make, tmp_path: Path) -> None:
    """Every number, and every bit of weights and optimizer; a run may go on under either name."""
    plan = make("mixed", weights=(0.4,))
    loop.run(plan)
    loop.run(alone(plan, 0, str(tmp_path / "alone")))
    records = metrics(tmp_path / "mixed")
    for record in records:
        record.pop("sources", None)
    expected = metrics(tmp_path / "alone")
    for ours, other in zip(records, expected, strict=True):
        if "kind" in ours:  # bits per byte come from a mean by weight
            assert ours.pop("bits_per_byte") == pytest.approx(other.pop("bits_per_byte"), rel=1e-12)
        assert ours == other
    ends = [checkpoint.find_latest(tmp_path / name / "checkpoints") for name in ("mixed", "alone")]
    assert ends[0] is not None and ends[1] is not None
    ours, other = (tensors(end) for end in ends if end is not None)
    assert ours.keys() == other.keys() and all(ours[name].equal(other[name]) for name in ours)
    longer = replace(plan, recipe=replace(plan.recipe, steps=12))
    assert loop.run(alone(longer, 0, str(tmp_path / "mixed")), resume="auto").step == 12


def test_ended_and_resumed_it_is_the_same_run(make: Make, tmp_path: Path) -> None:
    loop.run(make("whole"))
    broken = make("broken")
    assert loop.run(broken, watchers=[Terminated(3)]).stopped == "terminated"
    with pytest.raises(PowerCut):
        loop.run(broken, watchers=[running.Crashed(8)], resume="auto")
    assert loop.run(broken, resume="auto").stopped == "done"
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


def quietly(plan: Plan) -> None:
    """On one rank, without a picture and without waiting for the disk."""
    os.fsync = lambda number: None  # type: ignore[assignment]
    plot.loss_plot = lambda *arguments, **named: None
    loop.run(plan)


def test_two_ranks_read_the_same_rows(make: Make, tmp_path: Path) -> None:
    on_one_rank, on_two_ranks = make("one"), replace(make("two"), layout=Layout(dp_replicate=2, micro_batch=2))
    loop.run(on_one_rank)
    on_ranks(2, quietly, on_two_ranks)
    for single, double in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert single["loss"] == pytest.approx(double["loss"], rel=1e-5)
        for here, there in zip(single.get("sources", ()), double.get("sources", ()), strict=True):
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-5) and here["tokens"] == there["tokens"]


def test_other_weights_or_sources_are_refused_on_resume(make: Make, tmp_path: Path) -> None:
    loop.run(make(steps=5))
    with pytest.raises(CheckpointError) as error:
        loop.run(make(weights=(1, 1)), resume="auto")
    assert str(error.value).endswith(
        "trained with data.mixture.weight=[3, 1], the plan says data.mixture.weight=[1, 1]: the place in the data "
        "cannot be carried over; keep what it was trained with, or start a new run from its export"
    )
    with pytest.raises(CheckpointError, match=r"weight=\[3, 1\], the plan says data.mixture.weight=\[\]"):
        loop.run(alone(make(), 0, str(tmp_path / "run")), resume="auto")


def test_other_weights_encode_nothing_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(make().data)

    def never(*arguments: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(token_cache._Build, "into", never)
    again = prepare(make(weights=(1, 9)).data)
    assert again.fingerprint == first.fingerprint and again.train.num_tokens == first.train.num_tokens


def test_each_source_is_scored_and_the_whole_is_their_mean_by_weight(make: Make, tmp_path: Path) -> None:
    """Weights that stay as they are drawn: each score is that of a run over the source by itself."""
    scores = {}
    for name in ("both", "texts", "rows"):
        plan = make("both", learning_rate=0.0, steps=2)
        plan = plan if name == "both" else alone(plan, int(name == "rows"), str(tmp_path / name))
        watcher = Notes()
        summary = loop.run(plan, watchers=[watcher])
        scores[name] = watcher.evaluations[-1]
        assert summary.bits_per_byte == pytest.approx(scores[name].bits_per_byte, rel=1e-9)
    assert scores["both"].sources is not None and scores["texts"].sources is None
    for source, name in zip(scores["both"].sources, ("texts", "rows"), strict=True):
        assert (source.loss, source.tokens) == (pytest.approx(scores[name].loss, rel=1e-6), scores[name].tokens)
        assert source.bits_per_byte == pytest.approx(scores[name].bits_per_byte, rel=1e-6)
    assert scores["both"].loss == pytest.approx(0.75 * scores["texts"].loss + 0.25 * scores["rows"].loss, rel=1e-6)
    assert scores["both"].tokens == scores["texts"].tokens + scores["rows"].tokens


def source_lines(plan: Plan) -> list[tuple[str, str]]:
    """The lines of data before the first step."""
    corpus = prepare(plan.data)
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    return list(describe_run(plan.data, plan.recipe.over(len(rows)), corpus.train, rows))


def test_what_is_read_of_each_source_is_said_before_the_start(make: Make) -> None:
    """60 steps of 4 rows: 180 and 60 of them."""
    watcher = Notes()
    plan = make(steps=60)
    loop.run(plan, watchers=[watcher])
    assert watcher.info is not None
    sources = [(label, sentence.rpartition("/")[2]) for label, sentence in watcher.info.foreseen if label == "source"]
    assert sources == [
        ("source", "texts: 75.0% of the trained tokens, 3.47K tokens of 1.00 bytes in 289 rows, 62% of it is read"),
        (
            "source",
            "rows.jsonl: 25.0% of the trained tokens, 3.32K tokens of 0.99 bytes in 276 rows, 22% of it is read",
        ),
    ]
    assert [row for row in watcher.info.foreseen if row[0] == "source"] == source_lines(plan)


def test_a_source_that_is_repeated_often_is_warned_of(make: Make) -> None:
    """1,800 rows, 1,200 of a source of 289 and 600 of one of 276."""
    lines = source_lines(make(weights=(2, 1), steps=450))
    assert [sentence.rpartition("/")[2] for label, sentence in lines if label == "note"] == [
        "texts: repeated 4.2 times, and beyond 4 a repetition teaches little: take a lower weight, fewer steps, or "
        "more text"
    ]
    assert [sentence.rpartition(", ")[2] for label, sentence in lines if label == "source"] == [
        "read 4.2 times",
        "read 2.2 times",
    ]


@pytest.mark.parametrize(("sequence", "warned"), [(2048, True), (64, False)])
def test_a_step_of_more_rows_than_the_samples_fill_is_warned_of(sequence: int, warned: bool, tmp_path: Path) -> None:
    """30 short conversations fill one long row: epochs of them are a single step, and that is said."""
    turn = '{"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "word"}]}'
    (tmp_path / "chat.jsonl").write_text("\n".join([turn] * 30))
    data = Data(path=str(tmp_path / "chat.jsonl"), form="samples", tokenizer="bytes", validation=0.2)
    asked = running.plan(tmp_path, tmp_path / "run", **{**OPTIONS, "sequence": sequence, "steps": 1})
    notes = [sentence for label, sentence in source_lines(replace(asked, data=data)) if label == "note"]
    told = (
        "a step reads 4 rows, and the samples fill 1 row: 1 step may teach little; recipe.global_batch=1 makes more "
        "steps"
    )
    assert notes == ([told] if warned else [])


def test_an_epoch_of_a_mixture_is_as_many_rows_as_all_sources_have(make: Make) -> None:
    lines = source_lines(make(weights=(1, 1), epochs=2.0))
    assert [sentence.rpartition(", ")[2] for _, sentence in lines] == ["read 2.0 times", "read 2.1 times"]


def test_a_source_that_is_shorter_than_a_row_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("no")
    plan = make()
    tiny = replace(plan.data.mixture[1], path=str(tmp_path / "tiny.txt"))
    with pytest.raises(
        DataError, match=r"data\.path=.*tiny\.txt: recipe\.sequence=12 needs 13 tokens and the data has 3"
    ):
        loop.run(replace(plan, data=replace(plan.data, validation=0.0, mixture=(plan.data.mixture[0], tiny))))


def test_a_trained_model_is_scored_on_what_its_run_held_out_and_on_any_file(make: Make, tmp_path: Path) -> None:
    loop.run(make(steps=2))
    model = load(tmp_path / "run")
    scored, other = model.evaluate(), model.evaluate(tmp_path / "texts")
    assert scored.tokens > 0 and scored.loss > 0
    assert other.tokens > scored.tokens, "all of a file, not what is held out of it"


def test_a_trained_model_says_of_its_mixture_what_the_run_said(make: Make, tmp_path: Path) -> None:
    asked, watcher = make(), Notes()
    loop.run(asked, watchers=[watcher])
    during, after = watcher.evaluations[-1], load(tmp_path / "run").evaluate()
    assert after.loss == pytest.approx(during.loss, rel=1e-6) and after.tokens == during.tokens
    assert after.bits_per_byte == pytest.approx(during.bits_per_byte, rel=1e-6)
    assert [source.path for source in after.sources or ()] == [source.path for source in during.sources or ()]


def test_what_was_not_scored_weighs_nothing(make: Make) -> None:
    data = make().data
    stream = prepare(data).validation
    assert isinstance(stream, MixedStream)
    score = EvalMetrics(step=1, loss=2.0, perplexity=1.0, bits_per_byte=1.0, tokens=5, seconds=0.0)
    none = replace(score, loss=0.0, tokens=0)
    first = stream.parts[0]
    mean = score_sources(data, stream, 0, lambda _, part, limit: score if part is first else none)
    assert mean is not None and mean.loss == 2.0 and len(mean.sources or ()) == 1


def test_conversations_of_several_files_are_tuned_on(tmp_path: Path) -> None:
    """In the shares of their trained tokens, each file scored by its answers, and any other file read alike."""
    for name, words in (("short", 2), ("long", 9)):
        rows = (
            {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": "word " * words}]}
            for n in range(30)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = running.plan(tmp_path, tmp_path / "run", **{**OPTIONS, "sequence": 96, "steps": 4})
    mixture = tuple(MixtureSource(path=str(tmp_path / f"{name}.jsonl"), weight=1) for name in ("short", "long"))
    data = Data(mixture=mixture, form="samples", tokenizer="bytes", validation=0.2)
    watcher = Notes()
    loop.run(replace(asked, data=data), watchers=[watcher])
    scored = watcher.evaluations[-1]
    assert scored.sources is not None and scored.loss == pytest.approx(sum(score.loss for score in scored.sources) / 2)
    corpus = prepare(data)
    rows_of = numbered_rows(data, asked.recipe, corpus, corpus.train, shuffle=True)
    batch = rows_of.take(0, 600)
    sources = rows_of.interleaving.locate(np.arange(600))[0]  # type: ignore[attr-defined]  # of MixedRows
    trained = [int((batch.targets[sources == source] >= 0).sum()) for source in (0, 1)]
    assert trained[0] == pytest.approx(trained[1], rel=0.02)
    assert load(tmp_path / "run").evaluate(tmp_path / "long.jsonl").tokens > 30 * 40
