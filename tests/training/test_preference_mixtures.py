"""Runs over several files of preferences: in the shares of their pairs, each answer with its own reference."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import MixedRows, numbered_rows
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError, DataError
from meshwright.training import loop
from tests.training import pairs
from tests.training.running import Crashed, Notes, PowerCut, assert_same_end

MORE = ("recipe.steps=6", "data.validation=0.25", "recipe.eval_every=3", "recipe.checkpoint_every=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files whose pairs fill rows unequally: `pairs.jsonl` of short ones and `long.jsonl`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs.write(tmp_path)
    rows = ({"prompt": f"Tell {n}:", "chosen": " so " * 7, "rejected": " nothing" * 2} for n in range(16))
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


def mixed(folder: Path, *words: str, weights: tuple[float, float] = (3, 1), run: str = "run") -> Plan:
    data = f"data={folder / 'pairs.jsonl'}:{weights[0]},{folder / 'long.jsonl'}:{weights[1]}"
    return pairs.plan(folder, data, *MORE, *words, run=run)


def curve(asked: Plan) -> list[dict[str, Any]]:
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [{"loss": step.loss, "grad_norm": step.grad_norm, **step.figures} for step in watcher.steps]


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (1, 4)])
def test_pairs_are_read_in_the_shares_that_the_weights_say(folder: Path, weights: tuple[float, float]) -> None:
    asked = mixed(folder, weights=weights)
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, asked.recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, MixedRows) and len(rows.rows[0].take(0, 1).tokens) == 1
    batch = rows.take(0, 2000)
    assert batch.answers is not None
    seen = Counter(batch.answers[batch.answers >= 0].tolist())
    border = corpus.train.parts[0].num_documents
    first = sum(number for answer, number in seen.items() if answer < border)
    assert first / seen.total() == pytest.approx(weights[0] / sum(weights), abs=0.01)
    assert set(seen) == set(range(corpus.train.num_documents)), "every answer of both files, each by its own number"
    again = rows.take(777, 30)
    assert again.answers is not None and (again.answers == batch.answers[777:807]).all()


def test_each_answer_is_compared_with_its_own_reference(folder: Path) -> None:
    """Before any step the policy is the reference: rewards are 0 and the loss is log 2, of both files, held out too."""
    watcher = Notes()
    loop.run(mixed(folder, "recipe.learning_rate=0", "recipe.eval_every=1"), watchers=[watcher])
    for record in watcher.steps:
        assert record.loss == pytest.approx(0.6931472, abs=1e-5)
        assert abs(record.figures["chosen_reward"]) < 1e-5 and abs(record.figures["rejected_reward"]) < 1e-5
    for scored in watcher.evaluations:
        assert scored.sources is not None and len(scored.sources) == 2
        assert [record.loss for record in scored.sources] == pytest.approx([0.6931472] * 2, abs=1e-5)
        assert scored.perplexity is None and scored.bits_per_byte is None
        assert abs(scored.figures["reward_margin"]) < 1e-5


def test_figures_of_what_is_held_out_are_means_by_weight(folder: Path) -> None:
    watcher = Notes()
    loop.run(mixed(folder), watchers=[watcher])
    scored = watcher.evaluations[-1]
    assert scored.sources is not None
    short, long = (source.loss for source in scored.sources)
    assert short != pytest.approx(long, abs=1e-3) and scored.loss == pytest.approx((3 * short + long) / 4, rel=1e-6)
    figures = scored.figures
    assert figures["reward_margin"] == pytest.approx(figures["chosen_reward"] - figures["rejected_reward"], abs=1e-6)
    assert watcher.info is not None
    files = [sentence.rpartition("/")[2] for label, sentence in watcher.info.foreseen if label == "source"]
    assert files[0].startswith("pairs.jsonl: 75.0% of the pairs, ") and files[1].startswith("long.jsonl: 25.0% of the")


def test_one_file_under_two_names_is_that_file(folder: Path) -> None:
    """A mixture of one source is its run."""
    single = pairs.plan(folder, f"data.mixture=[{{path: {folder / 'pairs.jsonl'}, weight: 1}}]", *MORE, run="one")
    assert curve(single) == curve(pairs.plan(folder, *MORE, run="plain"))


def test_ended_and_resumed_it_is_the_same_run(folder: Path) -> None:
    loop.run(mixed(folder, run="whole"))
    broken = mixed(folder, run="broken")
    with pytest.raises(PowerCut):
        loop.run(broken, watchers=[Crashed(3)])
    assert loop.run(broken, resume="auto").stopped == "done"
    assert_same_end(folder / "broken", folder / "whole")
    with pytest.raises(
        CheckpointError, match=r"trained with data.mixture.weight=\[3.0, 1.0\], the plan says .*=\[1.0, 1.0\]"
    ):
        loop.run(mixed(folder, weights=(1, 1), run="broken"), resume="auto")


@pytest.mark.long
def test_two_ranks_train_the_same(folder: Path) -> None:
    alone = curve(mixed(folder, run="alone"))
    two = mixed(folder, "layout.dp_shard=2", "layout.zero=3", "layout.micro_batch=1", run="two")
    [curve_of_two, _] = on_ranks(2, curve, two)
    for step, other in zip(curve_of_two, alone, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert torch.isfinite(torch.tensor(curve_of_two[-1]["loss"]))


def test_preferences_and_conversations_are_not_mixed(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "long.jsonl").write_text("\n".join([json.dumps(row)] * 8), encoding="utf-8")
    for objective in ("dpo", "cross-entropy"):
        with pytest.raises(
            DataError, match=r"pairs.jsonl holds preferences .* and .*long.jsonl does not: tune on them"
        ):
            loop.run(mixed(folder, f"recipe.objective={objective}"))
