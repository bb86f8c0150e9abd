"""Rows of preferences: a pair stays together, is cut fairly, and counts as one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import prepare
from meshwright.data.report import note_fit, view
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows, share_row
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.spec.recipe.recipe import most_answers


def rows_of(path: Path, *lines: str, sequence: int = 64, objective: Any = "dpo", **data: Any) -> SampleRows:
    file = path / "pairs.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    given_data = Data(path=str(file), tokenizer="bytes", form="samples", validation=0, **data)
    corpus = prepare(given_data, cache_root=path / "cache", processes=0)
    recipe = Recipe(sequence=sequence, objective=objective)
    rows = numbered_rows(given_data, recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, SampleRows)
    return rows


def pair(prompt: str, chosen: str, rejected: str) -> str:
    return f'{{"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}"}}'


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=8), st.integers(4, 64))
def test_answers_share_a_row_fairly(lengths: list[tuple[int, int]], sequence: int) -> None:
    given_lengths = np.array(lengths)
    fitted = share_row(given_lengths, sequence)
    assert (fitted <= given_lengths).all() and (fitted.sum(1) <= sequence).all()
    whole = given_lengths.sum(1) <= sequence
    assert (fitted[whole] == given_lengths[whole]).all(), "what fits stays whole"
    for (chosen, rejected), (ours, theirs) in zip(fitted[~whole].tolist(), given_lengths[~whole].tolist(), strict=True):
        assert chosen + rejected >= sequence - 1, "no place is left while an answer is cut"
        assert min(chosen, rejected) >= min(sequence // 2, ours, theirs)


def test_a_pair_never_leaves_its_row(tmp_path: Path) -> None:
    lines = [pair("ab", "c" * (1 + 3 * n % 9), "d" * (1 + 5 * n % 7)) for n in range(30)]
    rows = rows_of(tmp_path, *lines, sequence=40)
    seen = []
    for row in range(len(rows)):
        numbers = rows.samples_of(row)
        assert [number % 2 for number in numbers] == [0, 1] * (len(numbers) // 2)
        assert [number // 2 for number in numbers[::2]] == [number // 2 for number in numbers[1::2]]
        seen += numbers
    assert sorted(seen) == list(range(60)) and len(rows) < 30
    batch = rows.take(0, len(rows))
    assert batch.answers is not None and batch.answers.shape == (len(rows), most_answers(40))
    for documents, answers, targets in zip(batch.documents, batch.answers, batch.targets, strict=True):
        present = int((answers >= 0).sum())
        assert present % 2 == 0 and (answers[present:] == -1).all()
        trained = [bool((targets[documents == number] >= 0).any()) for number in range(documents.max() + 1)]
        assert trained[:present] == [True] * present and not any(trained[present:])


def test_long_pairs_are_cut_at_the_end_of_both_left_out_or_refused(tmp_path: Path) -> None:
    lines = [pair("ab", "c" * 20, "d" * 30), pair("ab", "c" * 3, "d" * 30), pair("p" * 30, "yes", "no")]
    rows = rows_of(tmp_path, *lines, sequence=20)
    assert (rows.fitted.overlong, rows.fitted.left_out, rows.fitted.untrained, rows.fitted.retained) == (3, 1, 1, 2)
    lengths = sorted(np.unique(row, return_counts=True)[1].tolist() for row in rows.take(0, 2).documents)
    assert lengths == [[5 + 1, 14], [10, 10]]
    [cut, out] = note_fit(rows, Data(path="x", form="samples"))
    assert "3 pairs longer than a row" in cut and "1 pair left out" in out
    assert rows_of(tmp_path, lines[0], pair("a", "b", "c"), sequence=20, overlong="drop").fitted.retained == 1
    with pytest.raises(DataError, match=r"3 of 3 pairs are longer than recipe.sequence=20 tokens, the longest 67"):
        rows_of(tmp_path, *lines, sequence=20, overlong="refuse")


def test_objective_and_data_must_agree(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds preferences .* recipe.objective=cross-entropy .* take recipe.objective=dpo"
    ):
        rows_of(tmp_path, pair("a", "b", "c"), objective="cross-entropy")
    with pytest.raises(
        DataError, match=r"recipe.objective=orpo compares answers, .* take recipe.objective=cross-entropy"
    ):
        rows_of(tmp_path, '{"prompt": "a", "completion": "b"}', objective="orpo")
    with pytest.raises(DataError, match=r"has rows with chosen and rejected, and rows without: put them in two files"):
        rows_of(tmp_path, pair("a", "b", "c"), '{"prompt": "a", "completion": "b"}')


def test_pairs_are_shown_whatever_the_objective(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(pair("ab", "c" * n, "de") for n in range(1, 7)), encoding="utf-8")
    given_data = Data(path=str(file), tokenizer="bytes", form="samples")
    corpus = prepare(given_data, cache_root=tmp_path / "cache", processes=0)
    shown = view(given_data, Recipe(sequence=32), corpus)
    assert shown.samples is not None and shown.samples.pairs
    trained = {token.document for token in shown.tokens if token.mark == "trained"}
    assert trained == set(range(len(trained))) and len(trained) % 2 == 0


def test_a_run_names_the_pairs_that_compare_an_answer_with_itself(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, pair("a", "same", "same"), pair("b", "same", "same"), pair("c", "yes", "no"))
    [note] = note_fit(rows, Data(path="x", form="samples"))
    assert note == "2 pairs have two equal answers, which teach nothing"
