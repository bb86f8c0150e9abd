"""Norms of a run's steps by several ways: equal where all are right, and a wrong one is named with its cause."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gradient_norms
from meshwright.training.records import Readback
from tests.training import running

WRONG = "layers.1.mlp.down.weight"


def table(texts: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    words = ["--data", str(texts), "--sequence", "128", "--batch", "4", "--micro-batch", "2", "--steps", "3", "--json"]
    assert gradient_norms.main([*words, *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fixed", [False, True])
def test_all_ways_agree(fixed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = table(running.write_texts(tmp_path / "text"), capsys, *(["--fixed"] if fixed else []))
    assert [row["step"] for row in answer["steps"]] == [1, 2, 3] and answer["verdict"].startswith("no norm jumps")
    for row in answer["steps"]:
        assert row["norms"].keys() == {"run", "uncompiled", "plain"}
        assert row["norms"]["run"] == pytest.approx(row["norms"]["plain"], rel=1e-4)
        assert all(share < 1e-3 for _, share in row["off"].values()) and row["again"][1] < 1e-4
        assert fixed or row["step_norm"] == pytest.approx(row["norms"]["run"], rel=1e-4)
    assert any(row["documents"] > 4 for row in answer["steps"]), "borders are among the rows"
    assert all(1 <= ratio < 3 for ratio in answer["largest_over_median"].values())


@pytest.mark.parametrize(
    ("call", "change", "why"),
    [
        (3, lambda x: x * 50, f"run is 4900.0% off plain code in {WRONG}"),
        (5, lambda x: x * 1.5, f"the gradient of {WRONG} made again is 50.0% off"),
        (5, lambda x: x * torch.nan, f"the gradient of {WRONG} made again is inf% off"),
    ],
    ids=["of one way", "made again", "no number"],
)
def test_a_wrong_gradient_of_one_step_is_named(
    call: int, change: Callable[[Tensor], Tensor], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three gradients a step: of both ways, and of the run's once more."""
    texts, real, calls = running.write_texts(tmp_path / "text"), gradient_norms.gradients, iter(range(99))

    def wrong(*inputs: Any) -> dict[str, Tensor]:
        made = real(*inputs)
        number = next(calls)
        if number == call or (call == 3 and number == 5):
            made[WRONG] = change(made[WRONG])
        return made

    monkeypatch.setattr(gradient_norms, "gradients", wrong)
    answer = table(texts, capsys, "--ways", "run,plain")
    assert answer["verdict"].startswith(f"step 2: {why}")


def test_what_nobody_wrote_is_no_number() -> None:
    """And the process is as before."""
    with gradient_norms.poisoned(torch.device("cpu")):
        assert torch.empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_batch_that_changed_on_its_way_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, real, calls = running.write_texts(tmp_path / "text"), gradient_norms.PackedRows.take, iter(range(99))

    def changed(*inputs: Any) -> Any:
        batch = real(*inputs)
        if next(calls) == 2:  # two readings a step
            batch.targets[0, 0] += 1
        return batch

    monkeypatch.setattr(gradient_norms.PackedRows, "take", changed)
    answer = table(texts, capsys, "--ways", "run", "--fixed")
    assert answer["verdict"] == "step 2: on the device, targets is not what the rows say"


def test_a_norm_that_is_read_too_early_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, real, calls = running.write_texts(tmp_path / "text"), Readback.read, iter(range(99))

    def early(self: Readback) -> dict[str, list[float]]:
        numbers = real(self)
        return numbers | {"grad_norm": [6.6]} if next(calls) == 1 else numbers

    monkeypatch.setattr(Readback, "read", early)
    assert table(texts, capsys, "--ways", "run")["verdict"].startswith("step 2: the step read 6.600")


def test_a_jump_of_every_way_is_the_gradients_own() -> None:
    def row(step: int, norm: float) -> dict[str, Any]:
        return {"step": step, "batch": "", "again": ("w", 0.0), "norms": {"run": norm}, "step_norm": norm}

    rows = [row(1, 0.7), row(2, 6.6), row(3, 0.8)]
    assert gradient_norms.verdict(rows, ["run"], "bf16").startswith("the norm jumps in steps 2 by every way")
