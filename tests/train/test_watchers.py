"""Watchers that write elsewhere: a whole picture, every finite number for the services, a word on absent ones."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.spec.errors import PlanError
from meshwright.train.plot import loss_plot
from meshwright.train.smooth import Smoothed
from meshwright.train.watchers import PlotWatcher, TensorBoard, WandB, read_metrics
from tests.cli import watched


def rows(steps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(1, steps + 1):
        found.append({"step": i, "loss": 2 + 5 * math.exp(-i / 9), "lr": 1e-3, "tokens": 100 * i})
    if found:
        found[-1]["eval_loss"] = 2.5
    return found


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.mark.parametrize("steps", [0, 1, 300])
def test_the_picture_is_a_whole_png_and_nothing_else_is_left(tmp_path: Path, steps: int) -> None:
    loss_plot(rows(steps), tmp_path / "run" / "loss.png", title="t", bytes_per_token=2.5)
    assert size_of_png(tmp_path / "run" / "loss.png") == (1200, 750)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["loss.png"]


def test_the_picture_bears_nan_and_rows_of_evaluation_alone(tmp_path: Path) -> None:
    odd = [
        *rows(3),
        {"step": 4, "loss": math.nan, "lr": 1e-3, "tokens": 400},
        {"step": 4, "eval_loss": 2.0, "tokens": 400},
    ]
    loss_plot(odd, tmp_path / "loss.png")
    assert size_of_png(tmp_path / "loss.png") == (1200, 750)


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        loss_plot(rows(3), path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_the_plot_watcher_reads_the_run_folder(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row) for row in rows(20)) + '\n{"step": 21, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    watched.tell(PlotWatcher(), watched.info(run=tmp_path))
    assert size_of_png(tmp_path / "loss.png") == (1200, 750)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 20


def test_a_run_without_metrics_leaves_no_picture(tmp_path: Path) -> None:
    watched.tell(PlotWatcher(), watched.info(run=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("service", "package"), [(TensorBoard, "tensorboard"), (WandB, "wandb")])
def test_a_missing_service_names_its_extra(service: type, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PlanError, match=rf"pip install 'meshwright\[{package}\]'"):
        service()


def test_wandb_gets_every_finite_number_and_the_same_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    opened: list[dict[str, Any]] = []
    finished: list[bool] = []
    run = SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: finished.append(True)
    )
    package = ModuleType("wandb")
    package.init = lambda **how: opened.append(how) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    for _ in range(2):
        watched.tell(WandB(), watched.info(run=tmp_path / "mine", steps=10))
    assert [how["name"] for how in opened] == ["mine", "mine"] and opened[0]["id"] == opened[1]["id"]
    assert opened[0]["config"]["recipe"]["steps"] == 10
    assert len(logged) == 22 and finished == [True, True]
    assert logged[0][0] == 1 and logged[0][1]["train/tokens_per_second"] == 9123.0
    assert "train/mfu_causal" not in logged[0][1], "unknown is not zero"
    assert logged[10] == (
        10,
        {
            f"eval/{k}": v
            for k, v in {
                "loss": 3.0,
                "perplexity": 20.1,
                "bits_per_byte": 1.49,
                "tokens": 40_000,
                "seconds": 1.2,
            }.items()
        },
    )


def test_tensorboard_gets_every_finite_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []
    made: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            made.append((folder, purge_step))

        def add_text(self, tag: str, text: str) -> None:
            assert tag == "plan" and '"steps": 10' in text

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars.append((tag, value, step))

        def close(self) -> None:
            made.append(("closed", 0))

    package = ModuleType("torch.utils.tensorboard")
    package.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    watched.tell(TensorBoard(), watched.info(run=tmp_path, steps=10, first_step=4))
    assert made == [(str(tmp_path / "tensorboard"), 5), ("closed", 0)]
    assert ("train/loss", pytest.approx(watched.step(5).loss), 5) in scalars
    assert ("eval/bits_per_byte", 1.49, 10) in scalars
    assert {step for tag, _, step in scalars if tag == "train/lr"} == set(range(5, 11))


def test_smoothing_starts_at_the_first_value_and_skips_what_is_no_number() -> None:
    mean = Smoothed(keep=0.9)
    assert math.isnan(mean.value)
    assert mean.add(5.0) == pytest.approx(5.0)
    assert mean.add(3.0) == pytest.approx((0.9 * 5 + 3) / 1.9)
    assert mean.add(math.nan) == mean.value
    for _ in range(500):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0)
