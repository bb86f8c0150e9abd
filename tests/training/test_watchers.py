"""Watchers that write elsewhere: a whole picture, every finite number for the services, a word on absent ones."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.spec.errors import PlanError
from meshwright.training.plot import Smoothed, draw_figure, loss_plot
from meshwright.training.step.watch import Forgiving, TensorBoard, WandB, Watcher
from tests.verbs import watched


def rows(steps: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for i in range(1, steps + 1):
        records.append({"step": i, "loss": 2 + 5 * math.exp(-i / 9), "lr": 1e-3, "tokens": 100 * i})
    if records:
        records.append({"step": steps, "kind": "eval", "loss": 2.5, "tokens": 7})
    return records


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
    nan = {"step": 4, "loss": math.nan, "lr": 1e-3, "tokens": 400}
    odd = [{"step": 0, "kind": "eval", "loss": 2.0, "tokens": 7}, *rows(3), nan]
    loss_plot(odd, tmp_path / "loss.png")
    assert size_of_png(tmp_path / "loss.png") == (1200, 750)


def test_evaluations_stand_at_the_training_tokens_of_their_step() -> None:
    steps = [{"step": i, "loss": 3.0, "lr": 1e-3, "tokens": 100 * i} for i in range(10, 41, 10)]
    evaluations = [{"step": i, "kind": "eval", "loss": i / 10, "tokens": 7} for i in (5, 20, 25, 40)]
    loss, rate, *_ = draw_figure(steps, evaluations, "t", 2.5).axes
    raw, _, points = loss.get_lines()
    assert list(raw.get_xdata()) == [1000, 2000, 3000, 4000]
    assert list(points.get_xdata()) == [2000, 2000, 4000] and list(points.get_ydata()) == [2.0, 2.5, 4.0]
    assert list(rate.get_lines()[0].get_ydata()) == [1e-3] * 4


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


def test_a_service_that_breaks_off_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    class Outage(Watcher):
        steps = 0

        def stepped(self, metrics: Any) -> None:
            self.steps += 1
            if self.steps == 3:
                raise ConnectionError("no route")

        def started(self, info: Any) -> None:
            if info.steps == 1:
                raise ConnectionError("no login")

    service = Outage()
    watched.tell(Forgiving(service), watched.info(steps=10))
    assert service.steps == 3
    [record] = caplog.records
    assert record.message == "Outage failed and gets no more records; training continues: ConnectionError('no route')"
    with pytest.raises(ConnectionError):
        watched.tell(Forgiving(Outage()), watched.info(steps=1))


def test_why_a_step_was_skipped_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services take numbers alone; the count of skipped steps is one."""
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=lambda numbers, step: logged.append(numbers), finish=lambda: None)
    package = ModuleType("wandb")
    package.init = lambda **how: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    service = WandB()
    service.started(watched.info(run=tmp_path / "mine"))
    service.stepped(replace(watched.step(3), skipped="non-finite", skipped_steps=2, grad_norm=math.nan))
    assert logged[0]["train/skipped_steps"] == 2
    assert not {"train/skipped", "train/grad_norm"} & set(logged[0])


def test_the_plot_of_a_distilled_run_shows_what_its_held_out_points_are() -> None:
    steps = [{**record, "cross_entropy": 5.0, "loss": 0.01} for record in rows(20) if record.get("kind") != "eval"]
    points = [{"kind": "eval", "step": 10, "loss": 5.5, "tokens": 9}]
    axes = draw_figure(steps, points, "", None).axes[0]
    labels = [line.get_label() for line in axes.get_lines()]
    assert "cross entropy of each step" in labels and "held out, cross entropy: 5.500 at the end" in labels
    assert axes.get_ylim()[1] > 5.4, "both are on the chart"
