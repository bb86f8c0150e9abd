"""Norms of a run's steps by several ways: equal where all are right, and a wrong one is named with its parameter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gradient_norms
from tests.train import running


def found(texts: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    words = ["--data", str(texts), "--sequence", "128", "--batch", "4", "--micro-batch", "2", "--steps", "3", "--json"]
    assert gradient_norms.main([*words, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_ways_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = found(running.write_texts(tmp_path / "text"), capsys)
    assert [row["step"] for row in said["steps"]] == [1, 2, 3]
    for row in said["steps"]:
        assert row["norms"].keys() == {"run", "uncompiled", "plain"}
        assert row["norms"]["run"] == pytest.approx(row["norms"]["plain"], rel=1e-4)
        assert all(share < 1e-3 for _, share in row["off"].values())
    assert any(row["documents"] > 4 for row in said["steps"]), "borders are among the rows"
    assert all(1 <= ratio < 3 for ratio in said["largest_over_median"].values())


def test_a_wrong_gradient_of_one_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, real, calls = running.write_texts(tmp_path / "text"), gradient_norms.gradients, iter(range(99))

    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        gradients = real(*given)
        if next(calls) == 2:  # of two ways the first, in the second step
            gradients["layers.1.mlp.down.weight"] *= 50
        return gradients

    monkeypatch.setattr(gradient_norms, "gradients", wrong)
    said = found(texts, capsys, "--ways", "run,plain")
    assert said["steps"][1]["off"]["run"][0] == "layers.1.mlp.down.weight" and said["steps"][1]["off"]["run"][1] > 40
    assert said["largest_over_median"]["run"] > 1.5 * said["largest_over_median"]["plain"]
