"""The three columns of a comparison, each a shared document or the reason for its absence."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.observe.compare.finished_run import DRYRUN, PROFILE, FinishedRun, same_program, training_document
from meshwright.observe.shared_document import KindBytes, RankRecord, SentEntry, SharedDocument, parse_document
from meshwright.planner import explain
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan, presets
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.units import many

DryRunner = Callable[[Plan, str], SharedDocument]
"""(plan, device) -> its dry run, if the run folder has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of planned, dry run, measured."""

    title: str
    document: SharedDocument | None
    about: str
    """Description of the document, or the reason for its absence."""
    timeless: str = ""
    """Reason why it has no times."""
    elsewhere: str = ""
    """Explanation if it is for another device than the run's. Empty = it is not."""
    trained: SharedDocument | None = None
    """Beside a profile, the measurements of training itself."""

    def rank(self, rank: int) -> RankRecord | None:
        """Return the record of a rank."""
        return next((record for record in self.document.ranks if record.rank == rank), None) if self.document else None


def columns(
    run: FinishedRun, planner: Estimator | None = None, dryer: DryRunner | None = None
) -> tuple[Column, Column, Column]:
    """Return planned, dry run, measured. `planner` knows this machine; without one data sheets are used."""
    plan = run.plan_as_run
    on_cpu = planner is None and run.device == "cpu" and plan.cluster.device.is_gpu
    first = _program_column(plan) if on_cpu else planned_column(plan, planner)
    return first, dry_run_column(run, plan, dryer), measured_column(run, plan)


def planned_column(plan: Plan, planner: Estimator | None = None) -> Column:
    """Return the planner's prediction for every pipeline stage, with times only if the device is known."""
    cluster = planner.cluster if planner else plan.cluster
    known, device = planner is not None or cluster.device.half_flop_per_s > 0, cluster.device.name
    prediction = (planner or build_estimator(plan)).predict(plan)
    document = replace(parse_document(explain.document(prediction), "the prediction"), ranks=_stage_records(prediction))
    if not known:
        document = replace(
            document, time=(), step_seconds=None, tokens_per_second_per_device=None, mfu_causal=None, mfu_full=None,
            hfu=None, bubble_fraction=None,
        )  # fmt: skip
    return Column(
        title="planned",
        document=document,
        about=f"the planner's formulas, for {device}",
        timeless="" if known else f"the plan's device, {device}, is not described: name a cluster",
    )


def _program_column(plan: Plan) -> Column:
    """Return the prediction for a GPU's plan that ran on a CPU: memory and traffic of its program there."""
    device = plan.cluster.device.name
    here = replace(plan, cluster=replace(plan.cluster, device=presets.device("local")))
    return replace(
        planned_column(here),
        about="the planner's formulas, for this program on a CPU",
        timeless=f"the plan is for {device}, and the run was on a CPU",
        elsewhere=f"The plan is for {device}, and the run was on a CPU: memory and traffic of the program are "
        "compared, and no time. A cluster file of this machine, made by meshwright calibrate, has times too.",
    )


def _stage_records(prediction: Prediction) -> tuple[RankRecord, ...]:
    ranks = pipeline_ranks(prediction.plan.layout)
    return tuple(
        RankRecord(
            rank=rank,
            peak_bytes=round(memory.total_bytes - memory.kinds["reserve"]),
            when=memory.when,
            memory=tuple(KindBytes(kind=kind, bytes=round(size)) for kind, size in memory.kinds.items() if size),
            traffic=tuple(
                SentEntry(axis=sent.axis, collective=sent.collective, bytes=sent.sent_bytes, calls=sent.calls)
                for sent in prediction.traffic(stage)
            ),
        )
        for stage, (rank, memory) in enumerate(zip(ranks, prediction.memory, strict=True))
    )


def dry_run_column(run: FinishedRun, plan: Plan, dryer: DryRunner | None = None) -> Column:
    """Return the dry run in the folder, or a new one."""
    stored = run.dryrun
    timeless = "a dry run moves no numbers, so it takes no time"
    ours = stored is not None and same_program(plan, stored) and run.device in ("", stored.device)
    whole = stored is not None and {record.rank for record in stored.ranks}.issuperset(pipeline_ranks(plan.layout))
    if stored is not None and ours and (whole or dryer is None):
        about = f"the real program on fake tensors, as on a {stored.device} device ({DRYRUN})"
        return Column(title="dry run", document=stored, about=about, timeless=timeless)
    if dryer is None:
        reason = (
            f"its {DRYRUN} is of another plan, device or version" if stored else f"there is no {DRYRUN} in the folder"
        )
        return Column(title="dry run", document=None, about=f"{reason}: meshwright compare makes it", timeless=timeless)
    document = dryer(plan, run.device)
    about = f"the real program on fake tensors, as on a {document.device} device"
    return Column(title="dry run", document=document, about=about, timeless=timeless)


def measured_column(run: FinishedRun, plan: Plan) -> Column:
    """Return the profile in the folder, completed by the measurements of training."""
    trained_document, profile = training_document(run), run.profile
    trained = f"{many(len(run.steps), 'step')} of training"
    if profile is None or not same_program(plan, profile):
        other = f"; {PROFILE} is of another plan and not used" if profile else ""
        if trained_document is None:
            return Column(title="measured", document=None, about=f"nothing was trained here{other}")
        what = "" if run.ledger else ", which left no ledger.json"
        timeless = "training keeps no parts of its time: meshwright profile measures them"
        return Column(title="measured", document=trained_document, about=f"{trained}{what}{other}", timeless=timeless)
    profiled = "; ".join((f"a profile of the plan ({PROFILE})", *profile.notes))
    if trained_document is None:
        return Column(title="measured", document=profile, about=profiled)
    ranks = {record.rank: record for record in (*trained_document.ranks, *profile.ranks)}
    for record in trained_document.ranks:
        if ranks[record.rank].traffic is None:
            ranks[record.rank] = replace(ranks[record.rank], traffic=record.traffic)
    document = replace(
        profile, ranks=tuple(ranks[rank] for rank in sorted(ranks)), time=(*profile.time, *trained_document.time)
    )
    speed = f", which took {trained_document.step_seconds:.3g} s each" if trained_document.step_seconds else ""
    return Column(title="measured", document=document, about=f"{profiled}; {trained}{speed}", trained=trained_document)
