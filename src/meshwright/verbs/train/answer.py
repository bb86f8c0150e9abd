"""`train`: a plan, trained in this process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import curve, line, whole
from meshwright.interface.planning.plan_reading import read_plan
from meshwright.interface.process.environment import fix_cublas_workspace
from meshwright.observe.compare.finished_run import Record, metric_records
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, RunError
from meshwright.spec.plan.plan import world_violation
from meshwright.spec.units import count, duration
from meshwright.store.run_folder import RunFolder
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher

if TYPE_CHECKING:
    from meshwright.interface.trained.trained_model import TrainedModel
    from meshwright.parallel.health.heartbeat import Heartbeat
    from meshwright.verbs.compare.answer import ComparisonAnswer


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainAnswer(Answer):
    """Outcome of a run, and the contents of its folder."""

    run: Path
    """The run folder."""
    summary: "Summary"

    @property
    def plan(self) -> "Plan":
        """The plan, as the folder keeps it."""
        return RunFolder.open(self.run).plan

    @property
    def loss(self) -> float:
        """Loss of the last step, in nats per token."""
        return self.summary.loss

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the last evaluation on held-out text. None = there was none."""
        return self.summary.bits_per_byte

    @property
    def done(self) -> bool:
        """Did it reach its last step? Otherwise it was interrupted, and resume="auto" continues."""
        return self.summary.stopped == "done"

    def check(self) -> None:
        """Raise RunError for a run that a signal ended: how far it came, and how to continue."""
        if not self.done:
            raise RunError(f"{self.run}: {stopped(self.summary)}")

    @cached_property
    def _records(self) -> "tuple[tuple[Record, ...], tuple[Record, ...]]":
        return metric_records(self.run / "metrics.jsonl")[:2]

    def rows(self) -> "list[Record]":
        """Return a row for each logged step."""
        return list(self._records[0])

    def evaluation_rows(self) -> "list[Record]":
        """Return a row for each evaluation on held-out text."""
        return list(self._records[1])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the JSON-ready dict that `meshwright train --json` prints."""
        return {"run": str(self.run), **asdict(self.summary)}

    def load(self, dtype: str | None = "auto", *, checkpoint: str = "last") -> "TrainedModel":
        """Open the trained model. `checkpoint`: last, best, or a step."""
        from meshwright.interface.trained.opening import load

        return load(self.run, dtype, checkpoint=checkpoint)

    def compare(self, **options: Any) -> "ComparisonAnswer":
        """Compare planned, dry run and measured of this run, as `compare`."""
        from meshwright.verbs.compare.answer import compare

        return compare(self.run, **options)

    def __repr__(self) -> str:
        score = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte on held-out text"
        how = "" if self.done else f", {stopped(self.summary)}"
        return (
            f"{self.run}: step {self.summary.step} of {self.summary.steps} in {duration(self.summary.seconds)}{how}: "
            f"loss {self.loss:.3f}{score}"
        )

    def _repr_html_(self) -> str:
        steps = [(row["step"], row["loss"]) for row in self.rows() if isfinite(row["loss"])]
        scores = [(row["step"], row["loss"]) for row in self.evaluation_rows() if isfinite(row["loss"])]
        return whole(
            line(repr(self), "good" if self.done else "alarm"),
            curve({"training": steps, "held out": scores}, "step", "loss, nats per token"),
        )


@checked
def train(
    *plan: str | Path | Plan | HasPlan,
    resume: str = "no",
    dry_run: bool = True,
    anyway: bool = False,
    watchers: Sequence[Watcher] | None = None,
    **keys: Any,
) -> TrainAnswer:
    """Train a plan in this process; without one, the default plan.

    A layout of several ranks raises IllegalLayout, which names the torchrun command. An interrupt saves a checkpoint
    and ends the call with an answer.

    Args:
        plan: A plan file, a plan or an answer about one, and KEY=VALUE changes.
        resume: no, auto (the newest checkpoint of the run folder, if any), or the path of a checkpoint.
        dry_run: Make a dry run before the first step.
        anyway: Train even if the dry run says that the plan does not fit.
        watchers: Watch the run. None = print a line for each logged step, () = print nothing.
        keys: Keys of a plan file, as model="llama-tiny", data="texts", recipe={"steps": 500}, run="runs/a".

    Raises:
        PlanError, DataError, RunError, DoesNotFit: The plan cannot be trained here.
    """
    parsed, word = read_plan(plan, keys)
    return run_alone(parsed, resume if word == "no" else word, dry_run=dry_run, anyway=anyway, watchers=watchers)


def run_alone(
    plan: Plan, resume: str, *, dry_run: bool, anyway: bool, watchers: Sequence[Watcher] | None
) -> TrainAnswer:
    """Train a plan of one rank; None = a watcher that prints lines. Raises IllegalLayout for a plan of several."""
    violation = world_violation(plan, 1)
    if violation:
        raise IllegalLayout(violation)
    watching = (Lines(),) if watchers is None else watchers
    return run(plan, resume=resume, dry_run=dry_run, anyway=anyway, watchers=watching)


def run(
    plan: "Plan",
    *,
    watchers: "Sequence[Watcher]" = (),
    resume: str = "no",
    dry_run: bool = True,
    anyway: bool = False,
    progress: Callable[[int, int], None] | None = None,
    pulse: "Heartbeat | None" = None,
    machines: int = 1,
) -> TrainAnswer:
    """Train one rank's part of a plan, whose layout has as many ranks as there are processes.

    `progress`: called while text is encoded. `pulse`: for a watchdog. `machines`: number that the ranks are spread
    over.
    """
    from meshwright.training import loop
    from meshwright.verbs.train.preflight import preflight, settle

    fix_cublas_workspace(plan)
    folder_watcher = RunFolderWatcher(Path(plan.run))
    summary = loop.run(
        plan,
        watchers=[folder_watcher, *watchers],
        resume=resume,
        progress=progress,
        pulse=pulse,
        preflight=partial(preflight, anyway=anyway, machines=machines) if dry_run else None,
        settle=settle,
        machines=machines,
        sampler=_sample_answers,
    )
    return TrainAnswer(run=folder_watcher.run, summary=summary)


def _sample_answers(*prompts: Any, **options: Any) -> list[list[int]]:
    """Sample with meshwright.serving.engine. A run that samples nothing does not import it."""
    from meshwright.serving.engine.serving_engine import sample_answers

    return sample_answers(*prompts, **options)


def stopped(summary: Summary) -> str:
    """Describe a run that a signal ended."""
    signal = {"interrupted": "Ctrl-C", "terminated": "SIGTERM", "preempted": "SIGUSR1"}[summary.stopped]
    saved = " and saved" if summary.checkpoint else ""
    return f'stopped by {signal} after step {summary.step} of {summary.steps}{saved}; resume="auto" continues'


class RunFolderWatcher(Watcher):
    """Learns the run folder once it is chosen."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def started(self, info: "RunInfo") -> None:
        """Keep the folder of the plan as it is run."""
        self.run = Path(info.plan.run)


class Lines(Watcher):
    """Prints a line for figures known before the first step, for each logged step, and for each evaluation."""

    def started(self, info: "RunInfo") -> None:
        """Print folder, length, plan and dry run."""
        print(f"{info.plan.run}: {info.steps} steps on {info.device}")
        for label, sentence in info.foreseen:
            print(f"{label}: {sentence}")

    def stepped(self, metrics: "StepMetrics") -> None:
        """Print loss and speed."""
        print(f"step {metrics.step}: loss {metrics.loss:.3f}, {count(metrics.tokens_per_second)} tokens/s")

    def evaluated(self, metrics: "EvalMetrics") -> None:
        """Print the figures on held-out text."""
        known = [] if metrics.bits_per_byte is None else [f"{metrics.bits_per_byte:.3f} bits per byte"]
        known += [f"{name.replace('_', ' ')} {figure:.3f}" for name, figure in metrics.figures.items()]
        print(", ".join((f"step {metrics.step}: held out {metrics.loss:.3f}", *known)))

    def ended(self, summary: "Summary") -> None:
        """Print where a run stopped before its last step."""
        if summary.stopped != "done":
            print(stopped(summary))
