"""Bad steps: which are skipped, what they leave as it was, when they end the run, and that a resume is exact."""

import math
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh
from meshwright.parallel.axes.data import local
from meshwright.parallel.engine import Engine
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import NonFiniteLoss
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog
from meshwright.training import job, loop, trainer
from meshwright.training.optimizer import precision
from meshwright.training.optimizer.precision import REASONS, StepSkipper
from tests.training import running
from tests.training.running import Crashed, Notes, PowerCut, tensors

INF, NAN = math.inf, math.nan


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("skipping") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step's numbers are read while the next one runs, as on a GPU."""
    monkeypatch.setattr(trainer, "reads_late", lambda device: request.param)
    return bool(request.param)


def judged(skipper: StepSkipper, norms: Iterable[float], *, loss: float = 1.0, **options: Any) -> list[str | None]:
    options = {"spike_factor": 0.0, **options}
    reasons = [skipper.judge(torch.tensor(loss), torch.tensor(norm), **options) for norm in norms]
    return [REASONS[int(reason)] for reason in reasons]


def test_what_is_no_number_is_counted_and_one_good_step_ends_the_row() -> None:
    skipper = StepSkipper()
    assert judged(skipper, [1.0, NAN, INF]) == [None, "non-finite", "non-finite"]
    assert skipper.values()[2:] == [2, 2]
    assert judged(skipper, [1.0], loss=NAN) == ["non-finite"] and skipper.values()[2:] == [3, 3]
    assert judged(skipper, [1.0]) == [None] and skipper.values()[2:] == [0, 3]
    assert skipper.values()[0] == 1.0, "no norm of a bad step is in the mean"


def test_an_overflow_that_the_loss_scale_explains_is_no_bad_step() -> None:
    skipper = StepSkipper()
    yes, no = torch.tensor(True), torch.tensor(False)
    assert judged(skipper, [NAN], may_overflow=no) == ["non-finite"]
    assert judged(skipper, [NAN], may_overflow=yes) == ["overflow"] and skipper.values()[2:] == [1, 2]
    assert judged(skipper, [NAN], loss=NAN, may_overflow=yes) == ["non-finite"] and skipper.values()[2:] == [2, 3]


def test_a_spike_is_judged_by_the_mean_of_enough_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "HISTORY_STEPS", 4)
    skipper = StepSkipper()
    assert judged(skipper, [100.0, 1.0, 2.0], spike_factor=3.0) == [None] * 3, "too early to judge"
    skipper = StepSkipper()
    assert judged(skipper, [1.0, 2.0, 3.0, 2.0], spike_factor=3.0) == [None] * 4
    assert skipper.values()[:2] == [2.0, 4], "a plain mean so far"
    assert judged(skipper, [5.9, 6.1], spike_factor=0.0) == [None, None], "nobody asked"
    skipper.restore([2.0, 4, 0, 0])
    assert judged(skipper, [6.1, NAN, 6.0], spike_factor=3.0) == ["spike", "non-finite", None]
    mean = 2.0 + (6.0 - 2.0) / 4  # the spike counts as the limit that it was above
    assert skipper.values()[0] == pytest.approx(mean + (6.0 - mean) / 4) and skipper.values()[2:] == [0, 2]


def test_a_norm_that_stays_higher_is_accepted_in_the_end() -> None:
    skipper = StepSkipper()
    judged(skipper, [1.0] * 60)
    reasons = judged(skipper, [100.0] * 200, spike_factor=4.0)
    first = reasons.index(None)
    assert 10 < first < 100 and set(reasons[:first]) == {"spike"} and set(reasons[first:]) == {None}


def spoiled(monkeypatch: pytest.MonkeyPatch, steps: dict[int, float]) -> None:
    """Multiply the gradient of the embedding in some steps of the run, by their number."""
    real = trainer.train_step

    def disturbed(engine: Any, *arguments: Any, **options: Any) -> Any:
        factor = steps.get(spoiled.step(), 1.0)  # type: ignore[attr-defined]
        hook = engine.model.embed.weight.register_hook(lambda gradient: gradient * factor)
        try:
            return real(engine, *arguments, **options)
        finally:
            hook.remove()

    begin = trainer.Trainer._begin_step

    def begun(self: Any, *arguments: Any) -> None:
        spoiled.step = lambda: self.state.progress.step + 1  # type: ignore[attr-defined]
        begin(self, *arguments)

    monkeypatch.setattr(trainer, "train_step", disturbed)
    monkeypatch.setattr(trainer.Trainer, "_begin_step", begun)


Make = Callable[..., Plan]


@pytest.fixture
def make(texts: Path, tmp_path: Path) -> Make:
    return partial(running.plan, texts, tmp_path / "run")


def states(run: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Weights and moments of every checkpoint, by step."""
    folder = run / "checkpoints"
    states_by_step = {saved.step: tensors(folder / saved.name) for saved in checkpoint.list_checkpoints(folder)}
    return {
        step: {name: state for name, state in everything.items() if not name.startswith("rng.")}
        for step, everything in states_by_step.items()
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_skipped_step_leaves_weights_and_moments_and_goes_past_its_tokens(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, precision: str
) -> None:
    spoiled(monkeypatch, {5: NAN, 6: INF})
    notes = Notes()
    plan = make(skip_nonfinite=2, checkpoint_every=1, keep_last=20, steps=9, log_every=4, precision=precision)
    summary = loop.run(plan, watchers=[notes])
    saved = states(tmp_path / "run")
    for step in (5, 6):
        assert all(torch.equal(value, saved[4][name]) for name, value in saved[step].items())
    assert any(not torch.equal(value, saved[6][name]) for name, value in saved[7].items())
    assert all(value.isfinite().all() for value in saved[9].values())
    rows = [row for row in MetricsLog.read(tmp_path / "run" / "metrics.jsonl") if "kind" not in row]
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row.get("skipped") for row in rows] == [None] * 4 + ["non-finite"] * 2 + [None] * 3
    assert [row.get("skipped_steps") for row in rows] == [None] * 4 + [1, 2, 2, 2, 2]
    assert [row["tokens"] for row in rows] == [step * 48 for step in range(1, 10)]
    assert [told.step for told in notes.steps] == [4, 5, 6, 8, 9], "a bad step is told of whenever it comes"
    assert summary.step == 9 and summary.stopped == "done"


def test_one_more_than_the_recipe_skips_ends_the_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    spoiled(monkeypatch, {2: NAN, 5: NAN, 6: NAN, 7: NAN})
    with pytest.raises(NonFiniteLoss) as caught:
        loop.run(make(skip_nonfinite=2, checkpoint_every=3))
    assert str(caught.value).startswith(
        "step 7: the gradient norm is nan, as were 2 before it (recipe.skip_nonfinite=2); the last good checkpoint is "
        f"{tmp_path / 'run' / 'checkpoints' / 'step-000006'}. Lower recipe.learning_rate"
    )
    rows = MetricsLog.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "kind" not in row] == [1, 2, 3, 4, 5, 6]


def test_fp16_a_scale_that_can_be_halved_is_no_row_of_bad_steps(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, {step: INF for step in range(3, 30)})
    with pytest.raises(NonFiniteLoss, match="step 21: the gradient norm is nan, as were 2 before it"):
        loop.run(make(precision="fp16", skip_nonfinite=2, steps=40, checkpoint_every=0, eval_every=0))
    rows = [row for row in MetricsLog.read(tmp_path / "run" / "metrics.jsonl") if "kind" not in row]
    assert [row.get("skipped") for row in rows] == [None] * 2 + ["overflow"] * 16 + ["non-finite"] * 2
    assert all(math.isfinite(row["loss"]) for row in rows)


BAD = {4: NAN, 5: NAN, 9: 1e4, 10: NAN, 11: 1e4}


def test_spikes_and_rows_go_on_after_a_resume_to_the_bit(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Killed in the middle of a row and between two spikes."""
    monkeypatch.setattr(precision, "HISTORY_STEPS", 3)
    spoiled(monkeypatch, BAD)
    options = {"skip_nonfinite": 2, "skip_spikes": 3.0, "checkpoint_every": 1, "keep_last": 20}
    whole = running.plan(texts, tmp_path / "whole", **options)
    loop.run(whole)
    rows = [row for row in running.metrics(tmp_path / "whole") if "kind" not in row]
    assert {row["step"]: row["skipped"] for row in rows if "skipped" in row} == {
        4: "non-finite", 5: "non-finite", 9: "spike", 10: "non-finite", 11: "spike",
    }  # fmt: skip
    plan = replace(whole, run=str(tmp_path / "run"))
    for step in (4, 9):
        with pytest.raises(PowerCut):
            loop.run(plan, watchers=[Crashed(step + 1)], resume="auto")
    loop.run(plan, resume="auto")
    running.assert_same_end(tmp_path / "run", tmp_path / "whole")
    values = checkpoint.read_values(tmp_path / "run" / "checkpoints" / "step-000004")
    assert values["skipping"][2:] == [1, 1]


def test_a_checkpoint_without_the_counts_is_read(make: Make, tmp_path: Path) -> None:
    """Of an earlier version."""
    from meshwright.training.step.state import TrainState

    plan = make(steps=4)
    real = TrainState.values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TrainState,
            "values",
            lambda self, *arguments: {key: value for key, value in real(self, *arguments).items() if key != "skipping"},
        )
        loop.run(plan)
    summary = loop.run(make(steps=6), resume="auto")
    assert summary.step == 6


LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"dp_shard": 2, "zero": 3}]


def run_spoiled(texts: str, folder: str) -> list[tuple[list[float], int, str]]:
    """On one of two ranks: each layout with bad gradients on the second rank alone, which is asked to stop later on;
    what each knows of skipped steps in the end, the last step, and why it ended."""
    os.fsync = lambda number: None  # type: ignore[assignment]
    precision.HISTORY_STEPS = 3
    trainer.reads_late = lambda device: True
    job.make_mesh = partial(make_mesh, process_groups={})
    second, runs, finish, begin = dist.get_rank() == 1, [], Engine.finish_gradients, trainer.Trainer._begin_step

    def disturbed(engine: Engine) -> None:
        finish(engine)
        factor = BAD.get(runs[-1].state.progress.step + 1, 1.0)
        if second:
            [name] = [name for name in engine.parameters if name.endswith("1.attention.o.weight")]
            local(engine.parameters[name].grad).mul_(factor)

    def begun(self: Any, *arguments: Any) -> None:
        runs.append(self)
        begin(self, *arguments)
        if second and self.state.progress.step == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    Engine.finish_gradients, trainer.Trainer._begin_step = disturbed, begun
    outcomes = []
    for number, options in enumerate(LAYOUTS):
        recipe = {"skip_nonfinite": 2, "skip_spikes": 3.0, "checkpoint_every": 0, "eval_every": 0, "steps": 30}
        plan = running.plan(Path(texts), Path(folder, str(number)), **recipe)
        summary = loop.run(replace(plan, layout=replace(Layout(**options), micro_batch=1)))
        outcomes.append((runs[-1].state.skipper.values(), summary.step, summary.stopped))
    return outcomes


@pytest.mark.long
def test_ranks_skip_alike_and_stop_after_the_same_step(texts: Path, tmp_path: Path) -> None:
    """Numbers are read late; a signal of one rank comes with them."""
    mine, other = on_ranks(2, run_spoiled, str(texts), str(tmp_path))
    assert mine == other
    for number, (values, step, stopped) in enumerate(mine):
        assert values[2:] == [0, len(BAD)] and stopped == "terminated" and 15 <= step <= 17, LAYOUTS[number]
        rows = {row["step"]: row.get("skipped") for row in running.metrics(tmp_path / str(number))}
        assert list(rows) == list(range(1, step + 1))
        assert {step: why for step, why in rows.items() if why} == {
            bad: "spike" if math.isfinite(factor) else "non-finite" for bad, factor in BAD.items()
        }
