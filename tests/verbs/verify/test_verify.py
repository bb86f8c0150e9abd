"""`meshwright verify`: the cases that it runs, its output, and that it can fail."""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from meshwright.observe.oracle import feature_matrix
from meshwright.observe.oracle.feature_matrix import (
    FEATURES,
    LARGEST_WORLD,
    PLAIN,
    Trial,
    merge_settings,
    trial,
    trials,
    trials_of_one_rank,
)
from meshwright.spec import Layout
from meshwright.verbs.main import main
from meshwright.verbs.verify.command import support_page


def test_every_pair_is_tried_refused_or_impossible() -> None:
    chosen, refused = trials()
    tried = {frozenset(pair) for candidate in chosen for pair in combinations(candidate.features, 2)}
    assert not tried & refused.keys()
    for pair in combinations(FEATURES, 2):
        if frozenset(pair) not in tried | refused.keys():
            assert merge_settings(pair) is None or trial(pair) is None, pair
    assert max(candidate.layout.world for candidate in chosen) <= LARGEST_WORLD and len(chosen) >= 60


@pytest.mark.slow
def test_two_ranks_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--processes", "2", "--only", "tp + sp", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layouts"] == len(document["results"]) >= 1 and document["different"] == 0


def test_a_difference_is_exit_code_4(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        feature_matrix, "run", lambda chosen, device: [(trial, "loss is 2 on rank 1") for trial in chosen]
    )
    assert main(["verify", "--processes", "1"]) == 4
    captured = capsys.readouterr()
    assert "differ from one device" in captured.err and "loss is 2 on rank 1" in captured.out


def test_an_unknown_feature_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--only", "tensor"]) == 2
    assert "--only tensor is not a feature: choose from" in capsys.readouterr().err


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_one_gpu_says_at_once_what_it_can_show(
    one_gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also reports each case as it ends, not eight at a time."""
    seen: list[Trial] = []

    def tried(chosen: list[Trial], device: str) -> Iterator[tuple[Trial, None]]:
        before = capsys.readouterr()
        assert "1 GPU: 43 cases, 5 of them compiled" in before.err and not before.out
        for candidate in chosen:
            assert device == "cuda" and candidate.layout.world == 1
            seen.append(candidate)
            yield candidate, None
            assert f"{len(seen):>3}/43  1 rank  {candidate.title}: equal" in capsys.readouterr().out

    monkeypatch.setattr(feature_matrix, "run", tried)
    assert main(["verify", "--device", "cuda"]) == 0
    features = set().union(*(trial.features for trial in seen))
    assert {"full", "packed", "bf16", "fp8", "fp16", "compiled", "muon", "torch's kernels", "no masters"} <= features
    # Counted, not timed: at a second a case and fifteen a compiled one, behind 40 s for the kernels, under 3 minutes.
    assert sum(15 if trial.layout.compile == "on" else 1 for trial in seen) + 40 <= 180
    assert [trial.layout.compile for trial in seen] == sorted((trial.layout.compile for trial in seen), reverse=False)


def test_one_rank_is_compared_with_plain_code_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [trial for trial in trials_of_one_rank()[0] if trial.layout.compile == "off"][:3]
    called: list[Layout] = []

    def outcome(case: Any, layout: Layout, **options: Any) -> Any:
        called.append(layout)
        return real(case, layout, **options)

    real = feature_matrix.outcome
    monkeypatch.setattr(feature_matrix, "outcome", outcome)
    monkeypatch.setattr(feature_matrix, "on_ranks", None)  # no process is started
    outcomes = feature_matrix.run(chosen)
    assert next(outcomes) == (chosen[0], None) and called == [chosen[0].layout, PLAIN]
    assert [difference for _, difference in outcomes] == [None, None]


@pytest.mark.long
def test_recipes_and_kernels_of_one_rank_equal_plain_code() -> None:
    chosen = [trial for trial in trials_of_one_rank()[0] if trial.layout.compile == "off"]
    assert {trial.title: difference for trial, difference in feature_matrix.run(chosen) if difference} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cuda"]) == 2
    assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["different"] == 0


def test_the_page_marks_what_differs() -> None:
    tried_trial = trial(["tp", "zero 3"])
    assert isinstance(tried_trial, Trial)
    assert "**no**" in support_page([(tried_trial, "gradient of x differs")], {})


def test_the_page_says_nothing_of_what_was_not_run() -> None:
    tried_trial = trial(["tp", "zero 3"])
    assert isinstance(tried_trial, Trial)
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in support_page([(tried_trial, None)], {}).splitlines()}
    columns = [name for name in FEATURES if name != "compiled"][1:]
    cells = dict(zip(columns, (cell.strip(" |") for cell in rows["| tp"]), strict=True))
    assert (cells["tp + sp"], cells["cp ring"], cells["packed"]) == ("-", "", "")
    assert "**no**" not in support_page([(tried_trial, None)], {})


def test_nothing_to_compare_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--processes", "2", "--only", "tp,zero 3", "--json"]) == 2
    captured = capsys.readouterr()
    assert "no layout of at most 2 processes has zero 3 and tp: take --processes 4" in captured.err and not captured.out
    assert main(["verify", "--only", "tp,tp 4"]) == 2
    assert "no layout has all of these: some are alternatives" in capsys.readouterr().err


def test_features_that_no_layout_of_the_matrix_has_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"tp", "zero 3", "full", "cp gather", "packed", "micro-batches of 1"}
    monkeypatch.setattr(feature_matrix, "run", lambda chosen, device: [(trial, None) for trial in chosen])
    assert main(["verify", "--only", ",".join(wanted), "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert wanted <= set(result["features"].split(", "))


@pytest.mark.parametrize(
    ("words", "message"), [(["--random", "0"], "--random 0 must be at least 1"), (["--case", ""], "--case is empty")]
)
def test_an_empty_number_or_case_is_not_the_whole_matrix(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err
