"""Small whole runs: their plans, those who watch and disturb them, and what they leave."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.spec import Data, Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog
from meshwright.training import loop
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary

CLOCK = {
    "seconds", "step_seconds", "data_wait_seconds", "pause_seconds", "tokens_per_second", "allocated_bytes",
    "reserved_bytes",
}  # fmt: skip
"""Fields of a record that no second run can repeat."""
SHAPE = ModelShape(name="dot", vocab=257, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, max_positions=32)
MOE = replace(SHAPE, name="dots", family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=12))
RECIPE = Recipe(
    steps=12, sequence=12, global_batch=4, learning_rate=5e-3, eval_every=5, eval_sequences=6, checkpoint_every=4
)


def write_texts(folder: Path) -> Path:
    """Twenty files of some hundred bytes: borders in every few windows."""
    folder.mkdir(parents=True)
    for number in range(20):
        lines = (f"{number} times {i} is {number * i}\n" for i in range(3 + number))
        (folder / f"{number:02}.txt").write_text("".join(lines))
    return folder


def plan(texts: Path, run: Path, *, shape: ModelShape = SHAPE, micro_batch: int = 2, **recipe: Any) -> Plan:
    return Plan(
        model=shape,
        data=Data(path=str(texts), tokenizer="bytes", validation=0.2),
        run=str(run),
        recipe=replace(RECIPE, warmup_steps=min(2, recipe.get("steps", 2)), **recipe),
        layout=Layout(micro_batch=micro_batch),
    )


class Notes:
    """Writes down all that a run tells."""

    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvalMetrics] = []
        self.saves: list[int] = []
        self.uploads: list[int] = []
        self.summary: Summary | None = None

    def started(self, info: RunInfo) -> None:
        self.info = info

    def stepped(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def evaluated(self, metrics: EvalMetrics) -> None:
        self.evaluations.append(metrics)

    def saved(self, step: int, path: Path) -> None:
        assert path.is_dir() and int(path.name.rpartition("-")[2]) == step
        self.saves.append(step)

    def stored(self, step: int, url: str) -> None:
        self.uploads.append(step)

    def ended(self, summary: Summary) -> None:
        self.summary = summary


class Terminated(Notes):
    """Asks the run to end, as a cluster does, after one of its steps."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__()
        self.step, self.number = step, number

    def stepped(self, metrics: StepMetrics) -> None:
        super().stepped(metrics)
        if metrics.step == self.step:
            os.kill(os.getpid(), self.number)


class Crashed(Notes):
    """Ends the run after one of its steps as a power cut would: nothing more is saved."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def stepped(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            raise PowerCut


class CrashedAgain(Crashed):
    """Ends the run the second time that a step is made."""

    times = 0

    def stepped(self, metrics: StepMetrics) -> None:
        self.times += metrics.step == self.step
        if self.times == 2:
            raise PowerCut


class PowerCut(Exception):
    """What `Crashed` raises."""


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run without what the clock and the machine say."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in MetricsLog.read(run / "metrics.jsonl")]


def tensors(saved: Path) -> dict[str, Tensor]:
    """All that a checkpoint holds."""
    by_name: dict[str, Tensor] = {}
    for file in sorted(saved.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            by_name |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return by_name


def assert_same_end(run: Path, right: Path) -> None:
    """Metrics, and every bit of the last checkpoint: weights, optimizer, scale, random states, counters."""
    assert metrics(run) == metrics(right)
    mine, theirs = (checkpoint.find_latest(folder / "checkpoints") for folder in (run, right))
    assert mine is not None and theirs is not None and mine.name == theirs.name
    ours_by_name, other = tensors(mine), tensors(theirs)
    assert ours_by_name.keys() == other.keys() and len(ours_by_name) > 20
    for name, tensor in ours_by_name.items():
        assert torch.equal(tensor, other[name]), name
    ours, others = (checkpoint.read_values(saved) for saved in (mine, theirs))
    assert {**ours, "seconds": 0} == {**others, "seconds": 0}


def train_in_child(texts: str, run: str, options: dict[str, Any]) -> None:
    """A run to be killed: the process, not the machine, so that nothing is gained by waiting for the disk."""
    os.fsync = lambda fd: None
    loop.run(plan(Path(texts), Path(run), **options), resume="auto")


def lines(path: Path) -> int:
    """Whole lines of a file, 0 where there is none yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def steps_of(rows: list[dict[str, Any]], kind: str | None = None) -> Iterator[int]:
    """The steps of the records of a kind."""
    return (row["step"] for row in rows if row.get("kind") == kind)
