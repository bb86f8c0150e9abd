"""How often a step waits for the device, and that reading its numbers later changes nothing that a run leaves."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.kernels.attention import varlen
from meshwright.spec import Plan
from meshwright.spec.errors import NonFiniteLoss
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog
from meshwright.training import loop, trainer
from meshwright.training.records import Readback
from tests.training import running
from tests.training.running import MOE, Notes, Terminated

WAITS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero"}
"""Methods of a tensor whose answer the host needs."""
DEPENDS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "repeat_interleave"}
"""Operations whose answer, or its size, the host needs."""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("readback") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    # Which rows nobody scores a CPU may ask, and no other device is asked.
    monkeypatch.setattr("meshwright.kernels.loss.cross_entropy.multiplied_rows", lambda valid, vocabulary: None)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in WAITS:
            self.seen[name] += 1
            with torch._C.DisableTorchFunction(), _quiet():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Those that no method of a tensor asked for, in backward passes and optimizers too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name.startswith("index") and any(x is not None and x.dtype == torch.bool for x in _indices(args))
        if (name in DEPENDS or masks) and not QUIET:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def _indices(args: Any) -> list[Any]:
    """Of `index` and `index_put`: what is looked up; a mask is turned into numbers of rows first."""
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []


QUIET: list[bool] = []


@contextmanager
def _quiet() -> Iterator[None]:
    QUIET.append(True)
    try:
        yield
    finally:
        QUIET.pop()


def waits_of_steps(plan: Plan) -> list[int]:
    """How often the main thread waits for numbers of the device in each step of a run."""
    waits: list[int] = []
    begin = trainer.Trainer._begin_step
    functions, operations = Functions(), Operations()
    rows = varlen.rows_of

    def read(*arguments: Any) -> Any:
        """A CPU's kernel looks into the documents; a GPU's is given their borders (tests/kernels/test_varlen.py)."""
        with torch._C.DisableTorchFunction(), _quiet():
            return rows(*arguments)

    def counted(self: Any, *arguments: Any) -> None:
        waits.append(functions.seen.total() + operations.seen.total())
        begin(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "_begin_step", counted)
        patch.setattr(varlen, "rows_of", read)
        with functions, operations:
            loop.run(plan)
    return [after - before for before, after in pairwise(waits)]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"clip": 0.0, "skip_nonfinite": 2, "skip_spikes": 2.0},
        {"noise_scale_every": 2},
    ],
    ids=["fp32", "bf16", "fp16", "skipping", "noise"],
)
@pytest.mark.long
def test_a_step_waits_for_the_device_once(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(trainer, "reads_late", lambda device: late)
    plan = running.plan(texts, tmp_path / "run", eval_every=0, checkpoint_every=0, **changes)
    assert waits_of_steps(plan) == ([0] if late else [1]) + [1] * 10


def test_routed_experts_wait_once_more_for_each_layer_and_micro_batch(texts: Path, tmp_path: Path) -> None:
    """On a CPU their rows are cut by numbers that the host must know."""
    plan = running.plan(texts, tmp_path / "run", shape=MOE, eval_every=0, checkpoint_every=0, steps=4)
    assert set(waits_of_steps(plan)) == {1 + MOE.layers * 2}


def test_the_counter_sees_what_waits() -> None:
    functions, operations = Functions(), Operations()
    with functions, operations:
        x = torch.arange(4.0)
        x.sum().item()
        x.tolist()
        bool(x.sum() > 1)
        torch.nonzero(x)
        x[x > 1]
    assert functions.seen.total() + operations.seen.total() == 5


@pytest.mark.parametrize("changes", [{}, {"precision": "fp16"}, {"noise_scale_every": 3, "micro_batch": 1}], ids=str)
def test_reading_late_leaves_the_same_run(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    notes = {}
    for name, late in (("at once", False), ("late", True)):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "reads_late", lambda device, late=late: late)
            notes[name] = Notes()
            loop.run(running.plan(texts, tmp_path / name, **changes), watchers=[notes[name]])
    running.assert_same_end(tmp_path / "late", tmp_path / "at once")
    for watcher in notes.values():
        assert [told.step for told in watcher.steps] == list(range(1, 13)) and watcher.saves == [4, 8, 12]
    seconds = [row["seconds"] for row in MetricsLog.read(tmp_path / "late" / "metrics.jsonl") if "kind" not in row]
    assert seconds == sorted(seconds)


def test_a_signal_that_is_heard_late_ends_after_the_step_that_was_begun(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "reads_late", lambda device: True)
    plan = running.plan(texts, tmp_path / "run", checkpoint_every=0, eval_every=0)
    summary = loop.run(plan, watchers=[Terminated(6)])
    assert (summary.step, summary.stopped) == (7, "terminated")
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [7]
    steps = list(running.steps_of(running.metrics(tmp_path / "run")))
    assert steps == list(range(1, 8)), "the step that was begun is recorded too"
    monkeypatch.undo()
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    loop.run(plan, resume="auto")
    loop.run(replace(plan, run=str(tmp_path / "whole")))
    running.assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_bad_step_that_is_read_late_is_not_saved(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it has been begun, with weights that the bad one left as they were."""
    monkeypatch.setattr(trainer, "reads_late", lambda device: True)
    real, calls = trainer.train_step, iter(range(1, 99))

    def disturbed(engine: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 6:
            engine.model.embed.weight.register_hook(lambda gradient: gradient * torch.nan)
        return real(engine, *arguments, **options)

    monkeypatch.setattr(trainer, "train_step", disturbed)
    notes = Notes()
    with pytest.raises(NonFiniteLoss, match=r"^step 6: the gradient norm is nan; the last good checkpoint is .*000004"):
        loop.run(running.plan(texts, tmp_path / "run", eval_every=0), watchers=[notes])
    assert notes.saves == [4] and next(calls) == 8, "step 7 had begun"
    assert list(running.steps_of(running.metrics(tmp_path / "run"))) == [1, 2, 3, 4, 5]


def test_numbers_come_back_by_name() -> None:
    tensors = {"loss": torch.tensor(2.5), "squared": torch.tensor([1.0, 4.0]), "last": torch.tensor(7.0)}
    read = Readback(tensors)
    tensors["loss"].add_(1)
    assert read.read() == {"loss": [2.5], "squared": [1.0, 4.0], "last": [7.0]}
