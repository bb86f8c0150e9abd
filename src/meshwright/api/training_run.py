"""`train`: a plan, trained in this process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.determinism import set_environment
from meshwright.api.markup import curve, line, whole
from meshwright.api.plan_reading import read_plan
from meshwright.observe.compare.metric_records import Record, records
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, RunError
from meshwright.spec.units import count, duration
from meshwright.spec.worlds import world_violation
from meshwright.store.run_folder import RunFolder
from meshwright.training.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher

if TYPE_CHECKING:
    from meshwright.api.comparing import ComparisonAnswer
    from meshwright.api.trained_model import TrainedModel
    from meshwright.parallel.health.heartbeat import Heartbeat


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainAnswer(Answer):
    """How a run ended, and what its folder holds."""

    run: Path
    """The run folder."""
    summary: "Summary"

    @property
    def plan(self) -> "Plan":
        """As the folder keeps it."""
        return RunFolder.open(self.run).plan

    @property
    def loss(self) -> float:
        """Of the last step, nats per token."""
        return self.summary.loss

    @property
    def bits_per_byte(self) -> float | None:
        """Of the last evaluation, on held-out text; None = there was none."""
        return self.summary.bits_per_byte

    @property
    def done(self) -> bool:
        """Whether it went to its last step; else it was interrupted, and resume="auto" goes on."""
        return self.summary.stopped == "done"

    def check(self) -> None:
        """RunError where a signal ended it before its last step: where it stands, and how it goes on."""
        if not self.done:
            raise RunError(f"{self.run}: {stopped(self.summary)}")

    @cached_property
    def _records(self) -> "tuple[tuple[Record, ...], tuple[Record, ...]]":
        return records(self.run / "metrics.jsonl")

    def rows(self) -> "list[Record]":
        """A row for each step that was logged."""
        return list(self._records[0])

    def evaluation_rows(self) -> "list[Record]":
        """A row for each evaluation on held-out text."""
        return list(self._records[1])

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright train --json` prints."""
        return {"run": str(self.run), **asdict(self.summary)}

    def load(self, dtype: str | None = "auto", *, checkpoint: str = "last") -> "TrainedModel":
        """The trained model; `checkpoint`: last, best, or the number of a step."""
        from meshwright.api.model_opening import load

        return load(self.run, dtype, checkpoint=checkpoint)

    def compare(self, **options: Any) -> "ComparisonAnswer":
        """Planned, dry run and measured of this run, as `compare` has it."""
        from meshwright.api.comparing import compare

        return compare(self.run, **options)

    def __repr__(self) -> str:
        score = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte on held-out text"
        how = "" if self.done else f", {stopped(self.summary)}"
        return (
            f"{self.run}: step {self.summary.step} of {self.summary.steps} in {duration(self.summary.seconds)}{how}: "
            f"loss {self.loss:.3f}{score}"
        )

    def _repr_html_(self) -> str:
        steps = [(one["step"], one["loss"]) for one in self.rows() if isfinite(one["loss"])]
        scores = [(one["step"], one["loss"]) for one in self.evaluation_rows() if isfinite(one["loss"])]
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

    `plan`: a plan file, a plan or an answer about one, and KEY=VALUE changes; keywords are keys of a plan file, as
    model="llama-tiny", data="texts", recipe={"steps": 500}, run="runs/a". `resume`: no, auto (the newest checkpoint of
    the run folder, if any) or a checkpoint's path. `dry_run`: before the first step; `anyway`: also where it says that
    the plan does not fit. `watchers` see the run; without any a line is printed for each step that is logged, () is
    silent. An interrupt saves, and ends the call with an answer.

    One process: IllegalLayout names the torchrun command of a layout of several. PlanError, DataError, RunError,
    DoesNotFit.
    """
    asked, also = read_plan(plan, keys)
    violation = world_violation(asked, 1)
    if violation:
        raise IllegalLayout(violation)
    seen = (Lines(),) if watchers is None else watchers
    return run(asked, resume=resume if also == "no" else also, dry_run=dry_run, anyway=anyway, watchers=seen)


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
    """One rank's part of training a plan whose layout has as many ranks as there are processes. `progress` of the
    encoding of the text; `pulse`: for a watchdog; `machines` over which the ranks are spread."""
    from meshwright.api.preflight import preflight, settle
    from meshwright.training import loop

    set_environment(plan)
    chosen = Chosen(Path(plan.run))
    summary = loop.run(
        plan,
        watchers=[chosen, *watchers],
        resume=resume,
        progress=progress,
        pulse=pulse,
        preflight=partial(preflight, anyway=anyway, machines=machines) if dry_run else None,
        settle=settle,
        machines=machines,
        sampler=_sampled_answers,
    )
    return TrainAnswer(run=chosen.run, summary=summary)


def _sampled_answers(*prompts: Any, **options: Any) -> list[list[int]]:
    """As meshwright.serve answers them; a run that samples nothing does not load it."""
    from meshwright.serve.sampled_answers import sampled_answers

    return sampled_answers(*prompts, **options)


def stopped(summary: Summary) -> str:
    """Of a run that a signal ended."""
    signal = {"interrupted": "Ctrl-C", "terminated": "SIGTERM"}[summary.stopped]
    saved = " and saved" if summary.checkpoint else ""
    return f'stopped by {signal} after step {summary.step} of {summary.steps}{saved}; resume="auto" continues'


class Chosen(Watcher):
    """The run folder, once it is chosen."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def started(self, info: "RunInfo") -> None:
        """The plan as it is run."""
        self.run = Path(info.plan.run)


class Lines(Watcher):
    """A line for what is known before the first step, for each step that is logged, and for each evaluation."""

    def started(self, info: "RunInfo") -> None:
        """Where, how long, and what plan and dry run say."""
        print(f"{info.plan.run}: {info.steps} steps on {info.device}")
        for label, sentence in info.foreseen:
            print(f"{label}: {sentence}")

    def stepped(self, metrics: "StepMetrics") -> None:
        """Loss and speed."""
        print(f"step {metrics.step}: loss {metrics.loss:.3f}, {count(metrics.tokens_per_second)} tokens/s")

    def evaluated(self, metrics: "EvalMetrics") -> None:
        """On held-out text."""
        known = [] if metrics.bits_per_byte is None else [f"{metrics.bits_per_byte:.3f} bits per byte"]
        known += [f"{name.replace('_', ' ')} {value:.3f}" for name, value in metrics.figures.items()]
        print(", ".join((f"step {metrics.step}: held out {metrics.loss:.3f}", *known)))

    def ended(self, summary: "Summary") -> None:
        """Where it was not the last step."""
        if summary.stopped != "done":
            print(stopped(summary))
