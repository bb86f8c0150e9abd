"""A run whose device lags behind the host, on a made-up clock: a step has its own time, whenever that is read."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compat import torch_compile
from meshwright.interface.terminal import fields
from meshwright.store.run_folder import MetricsLog
from meshwright.training import loop, records, trainer
from meshwright.training.step.watch import Summary
from tests.training import running

STEP_S, COMPILED_S, LAUNCH_S, SAVE_S, SCORE_S = 0.5, 30.0, 0.125, 5.0, 2.0
"""Powers of two, so that sums are exact."""


class LaggingDevice:
    """A queue that takes STEP_S for what the host launches in LAUNCH_S; the first step waits for a compiler."""

    def __init__(self) -> None:
        self.host_s, self.busy_until_s, self.waits = 100.0, 0.0, 0
        self.steps = 0

    def launch_step(self) -> None:
        self.steps += 1
        self.host_s += LAUNCH_S + (COMPILED_S if self.steps == 1 else 0)
        self.busy_until_s = max(self.host_s, self.busy_until_s) + STEP_S
        # The queue holds less than a whole step: the host comes back when the device has all but done it.
        self.host_s = max(self.host_s, self.busy_until_s - LAUNCH_S)

    def block(self, seconds: float) -> None:
        """The host works, and waits for the device first."""
        self.host_s = max(self.host_s, self.busy_until_s) + seconds

    def mark(self, device: torch.device) -> "LaggingBorder":
        return LaggingBorder(self)


class LaggingBorder:
    def __init__(self, device: LaggingDevice) -> None:
        self.device, self.at_s = device, max(device.host_s, device.busy_until_s)

    def wait(self) -> None:
        self.device.waits += 1
        self.device.host_s = max(self.device.host_s, self.at_s)

    def seconds_since(self, earlier: "LaggingBorder") -> float:
        assert self.at_s <= self.device.host_s, "read before the device has come so far, which waits"
        return self.at_s - earlier.at_s


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaggingDevice]:
    """A device whose steps, evaluations and saves take made-up seconds; all reading of clocks goes to it."""
    device = LaggingDevice()
    step, save, score = trainer.train_step, trainer.Trainer._save, trainer.Trainer._evaluate

    def launched(*arguments: Any, **options: Any) -> Any:
        outcome = step(*arguments, **options)
        device.launch_step()
        return outcome

    def slow(seconds: float, call: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            device.block(seconds)
            return call(*arguments, **options)

        return called

    monkeypatch.setattr(trainer, "train_step", launched)
    monkeypatch.setattr(trainer, "reads_late", lambda device: True)
    monkeypatch.setattr(trainer.Trainer, "_save", slow(SAVE_S, save))
    monkeypatch.setattr(trainer.Trainer, "_evaluate", slow(SCORE_S, score))
    monkeypatch.setattr(records, "mark_border", device.mark)
    monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)
    yield device


def test_a_step_has_its_own_time_beside_saves_and_evaluations_and_at_the_end(
    texts: Path, tmp_path: Path, lagging: LaggingDevice
) -> None:
    """Saves after steps 4, 8 and 12, evaluations after 5, 10 and 12: what is read there is read at once."""
    summary = loop.run(running.plan(texts, tmp_path / "run"))
    rows = [row for row in MetricsLog.read(tmp_path / "run" / "metrics.jsonl") if "kind" not in row]
    first, rest = rows[0], rows[1:]
    assert first["step_seconds"] == COMPILED_S + LAUNCH_S + STEP_S
    after_pause = {5: SAVE_S, 6: SCORE_S, 9: SAVE_S, 11: SCORE_S}
    for row in rest:
        launch = LAUNCH_S if row["step"] in after_pause else 0.0  # the device has nothing to do until then
        assert row["step_seconds"] == STEP_S + launch, row["step"]
        assert row["tokens_per_second"] == 48 / row["step_seconds"]
        assert row.get("pause_seconds", 0.0) == after_pause.get(row["step"], 0.0), row["step"]
    assert summary.paused_seconds == 3 * SAVE_S + 3 * SCORE_S
    assert summary.seconds == sum(row["step_seconds"] for row in rows) == rows[-1]["seconds"]
    assert summary.seconds + summary.paused_seconds == lagging.host_s - 100.0, "nothing is lost, nothing counted twice"
    assert (summary.starting_steps, summary.starting_seconds) == (1, first["step_seconds"])
    assert summary.steady_tokens_per_second == 11 * 48 / sum(row["step_seconds"] for row in rest)
    assert summary.tokens_per_second == 12 * 48 / summary.seconds


def test_a_step_is_waited_for_once(texts: Path, tmp_path: Path, lagging: LaggingDevice) -> None:
    loop.run(running.plan(texts, tmp_path / "run"))
    assert lagging.waits == 12 + 1, "each step, and what came after the last one"


def test_the_last_line_says_rates_with_and_without_what_compiled() -> None:
    run = {"step": 500, "steps": 500, "loss": 2.0, "tokens": 4_096_000, "peak_allocated_bytes": 2**30}
    ended = {"checkpoint": None, "stopped": "done", "seconds": 148.0, "tokens_per_second": 27_675.7}
    apart = {"starting_steps": 3, "starting_seconds": 82.0, "steady_tokens_per_second": 61_700.0}
    line = fields.closing(Summary(**run, **ended, **apart, paused_seconds=12.0), "NVIDIA H200")
    assert "in 2 min 28 s of steps, 27.7K tokens/s (61.7K without 3 steps that compiled, 1 min 22 s)" in line
    assert "12 s more for evaluation, samples and checkpoints" in line
    single = fields.closing(Summary(**run, **ended, **apart | {"starting_steps": 1}), "NVIDIA H200")
    assert "(61.7K without the first step, 1 min 22 s)" in single and " more for " not in single
    assert "without" not in fields.closing(Summary(**run, **ended), "NVIDIA H200"), "a run of one step"


def test_compilations_are_counted() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager")
    counts = [torch_compile.compiled_graphs()]
    for shape in ((3,), (3,), (3, 4)):
        function(torch.ones(shape))
        counts.append(torch_compile.compiled_graphs())
    assert [after - before for before, after in pairwise(counts)] == [1, 0, 1]


def test_a_cpu_is_timed_by_its_own_clock() -> None:
    first = records.mark_border(torch.device("cpu"))
    second = records.mark_border(torch.device("cpu"))
    second.wait()
    assert isinstance(second, records.HostBorder) and 0 <= second.seconds_since(first) < 60


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_queue() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    first = records.mark_border(device)
    started = time.perf_counter()
    for _ in range(50):
        x = x @ x * 1e-2
    second = records.mark_border(device)
    second.wait()
    assert 0.3 * (time.perf_counter() - started) < second.seconds_since(first) <= time.perf_counter() - started


def test_a_pause_of_two_parts_is_counted_whole(lagging: LaggingDevice) -> None:
    clock = records.StepClock(torch.device("cuda"))
    lagging.launch_step()
    span = clock.end_step(records.mark_border(torch.device("cuda")))
    for seconds in (SCORE_S, SAVE_S):
        lagging.block(seconds)
        clock.end_pause()
    clock.close()
    clock.close()
    assert (clock.paused_s, span.pause_s, clock.steady_tokens_per_second) == (SCORE_S + SAVE_S, 0.0, None)
