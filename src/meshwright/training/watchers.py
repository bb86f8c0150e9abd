"""Watchers that write elsewhere: TensorBoard, Weights & Biases. Both are extras."""

import importlib
import json
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from meshwright.spec.extras import require
from meshwright.store.durable import replace_file
from meshwright.training.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher, numbers

log = logging.getLogger(__name__)


class Forgiving:
    """A watcher whose failures, once it has started, do not end a run of many hours: it is told nothing more."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.failed = watcher, False

    def started(self, info: RunInfo) -> None:
        """Before the first step; a service that cannot be reached now is an error."""
        self.watcher.started(info)

    def stepped(self, metrics: StepMetrics) -> None:
        """After a step."""
        self._tell(lambda: self.watcher.stepped(metrics))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """After an evaluation."""
        self._tell(lambda: self.watcher.evaluated(metrics))

    def saved(self, step: int, path: Path) -> None:
        """After a checkpoint."""
        self._tell(lambda: self.watcher.saved(step, path))

    def ended(self, summary: Summary) -> None:
        """At the end."""
        self._tell(lambda: self.watcher.ended(summary))

    def _tell(self, tell: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            tell()
        except Exception as error:  # of whatever kind: the service is not ours
            self.failed = True
            log.warning("%s is told nothing more, training goes on: %r", type(self.watcher).__name__, error)


class Scalars(Watcher):
    """Writes the numbers of steps and evaluations, a scalar each."""

    def stepped(self, metrics: StepMetrics) -> None:
        """Write the numbers of the step."""
        self.write("train", _numbers(metrics), metrics.step)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Write the numbers of the evaluation."""
        self.write("eval", _numbers(metrics), metrics.step)

    @abstractmethod
    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Each number as GROUP/NAME."""


class TensorBoard(Scalars):
    """Scalars under RUN/tensorboard, one tag per field, over steps."""

    def __init__(self) -> None:
        require("tensorboard", "--tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")

    def started(self, info: RunInfo) -> None:
        """Open the event file; steps beyond the one resumed from are hidden by TensorBoard itself."""
        folder = Path(info.plan.run) / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder), purge_step=info.first_step + 1)
        self._writer.add_text("plan", f"```\n{json.dumps(asdict(info.plan), indent=2)}\n```")

    def ended(self, summary: Summary) -> None:
        """Close the event file."""
        self._writer.close()

    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """As Scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class WandB(Scalars):
    """A Weights & Biases run named like the run folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        require("wandb", "--wandb")
        self._wandb = importlib.import_module("wandb")

    def started(self, info: RunInfo) -> None:
        """Open the run; resuming a folder goes on with the same one."""
        folder = Path(info.plan.run)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project="meshwright",
            name=folder.name,
            id=_stable_id(folder),
            resume="allow",
            dir=str(folder),
            config=asdict(info.plan),
        )

    def ended(self, summary: Summary) -> None:
        """Close the run."""
        self._run.finish()

    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """As Scalars."""
        self._run.log({f"{group}/{name}": value for name, value in numbers.items()}, step=step)


def _numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    """Every field that holds a finite number, but the step itself."""
    fields = numbers(metrics)
    fields.pop("step")
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}


def _stable_id(folder: Path) -> str:
    """The id written on first use, so that a resumed run goes on in the same place."""
    path = folder / "wandb-id"
    if not path.exists():
        import secrets

        replace_file(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="ascii").strip()
