"""Watchers that write to TensorBoard and Weights & Biases. Both are extras."""

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
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher, numbers

log = logging.getLogger(__name__)


class Forgiving:
    """A watcher whose failures after the start do not end a long run. After a failure it is not called again."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.failed = watcher, False

    def started(self, info: RunInfo) -> None:
        """Start the watcher. A service that cannot be reached now is an error."""
        self.watcher.started(info)

    def stepped(self, metrics: StepMetrics) -> None:
        """Forward a logged step."""
        self._forward(lambda: self.watcher.stepped(metrics))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Forward an evaluation."""
        self._forward(lambda: self.watcher.evaluated(metrics))

    def saved(self, step: int, path: Path) -> None:
        """Forward the path of a committed checkpoint."""
        self._forward(lambda: self.watcher.saved(step, path))

    def ended(self, summary: Summary) -> None:
        """Forward the outcome."""
        self._forward(lambda: self.watcher.ended(summary))

    def _forward(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:  # a service may raise anything
            self.failed = True
            log.warning("%s is told nothing more, training goes on: %r", type(self.watcher).__name__, error)


class Scalars(Watcher):
    """Watcher that writes the numbers of steps and evaluations, one scalar each."""

    def stepped(self, metrics: StepMetrics) -> None:
        """Write the numbers of the step."""
        self.write("train", _numbers(metrics), metrics.step)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Write the numbers of the evaluation."""
        self.write("eval", _numbers(metrics), metrics.step)

    @abstractmethod
    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Write each number as GROUP/NAME."""


class TensorBoard(Scalars):
    """Scalars under RUN/tensorboard, one tag per field, over steps."""

    def __init__(self) -> None:
        require("tensorboard", "--tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")

    def started(self, info: RunInfo) -> None:
        """Open the event file. TensorBoard itself hides steps beyond the one resumed from."""
        folder = Path(info.plan.run) / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder), purge_step=info.first_step + 1)
        self._writer.add_text("plan", f"```\n{json.dumps(asdict(info.plan), indent=2)}\n```")

    def ended(self, summary: Summary) -> None:
        """Close the event file."""
        self._writer.close()

    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Write each number to the event file."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class WandB(Scalars):
    """A Weights & Biases run named like the run folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        require("wandb", "--wandb")
        self._wandb = importlib.import_module("wandb")

    def started(self, info: RunInfo) -> None:
        """Open the run. A resumed folder continues the same one."""
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
        """Log all numbers of the step in one call."""
        self._run.log({f"{group}/{name}": value for name, value in numbers.items()}, step=step)


def _numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    """Return every finite number of a record, except the step."""
    fields = numbers(metrics)
    fields.pop("step")
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}


def _stable_id(folder: Path) -> str:
    """Return the id written on first use, so that a resumed run continues in the same place."""
    path = folder / "wandb-id"
    if not path.exists():
        import secrets

        replace_file(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="ascii").strip()
