"""The three columns of a comparison, each a shared document or a sentence that says why it is not there."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.observe.compare.finished_run import DRYRUN, PROFILE, Finished, measured, same_program
from meshwright.observe.shared_document import KindBytes, RankRecord, SentEntry, SharedDocument, checked
from meshwright.planner.plan_document import document
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan, presets
from meshwright.spec.places import pipeline_ranks
from meshwright.spec.units import many

DryRunner = Callable[[Plan, str], SharedDocument]
"""(plan, device) -> its dry run, where the run folder keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of planned, dry run, measured."""

    title: str
    found: SharedDocument | None
    about: str
    """What it is of; or, where nothing was found, why."""
    timeless: str = ""
    """Why it has no times."""
    elsewhere: str = ""
    """That it is of another device than the run's, and what that means; empty = it is not."""
    trained: SharedDocument | None = None
    """Beside a profile, what training itself measured."""

    def rank(self, rank: int) -> RankRecord | None:
        """What it says of a rank."""
        return next((one for one in self.found.ranks if one.rank == rank), None) if self.found else None


def columns(
    run: Finished, of: Estimator | None = None, dryer: DryRunner | None = None
) -> tuple[Column, Column, Column]:
    """planned, dry run, measured. `of`: a planner that knows this machine; without it one that knows data sheets."""
    plan = run.plan_as_run
    on_cpu = of is None and run.device == "cpu" and plan.cluster.device.is_gpu
    return _of_program(plan) if on_cpu else planned(plan, of), dried(run, plan, dryer), of_measured(run, plan)


def planned(plan: Plan, of: Estimator | None = None) -> Column:
    """The planner's prediction, of every pipeline place; times only where the device is known."""
    cluster = of.cluster if of else plan.cluster
    known, device = of is not None or cluster.device.half_flop_per_s > 0, cluster.device.name
    prediction = (of or build_estimator(plan)).predict(plan)
    found = replace(checked(document(prediction), "the prediction"), ranks=_places(prediction))
    if not known:
        found = replace(
            found, time=(), step_seconds=None, tokens_per_second_per_device=None, mfu_causal=None, mfu_full=None,
            hfu=None, bubble_fraction=None,
        )  # fmt: skip
    return Column(
        title="planned",
        found=found,
        about=f"the planner's formulas, for {device}",
        timeless="" if known else f"the plan's device, {device}, is not described: name a cluster",
    )


def _of_program(plan: Plan) -> Column:
    """The prediction for a plan of a GPU that was run on a CPU: what its program holds and sends there."""
    device = plan.cluster.device.name
    here = replace(plan, cluster=replace(plan.cluster, device=presets.device("local")))
    return replace(
        planned(here),
        about="the planner's formulas, for this program on a CPU",
        timeless=f"the plan is for {device}, and the run was on a CPU",
        elsewhere=f"The plan is for {device}, and the run was on a CPU: memory and traffic of the program are "
        "compared, and no time. A cluster file of this machine, made by meshwright calibrate, has times too.",
    )


def _places(prediction: Prediction) -> tuple[RankRecord, ...]:
    ranks = pipeline_ranks(prediction.plan.layout)
    return tuple(
        RankRecord(
            rank=rank,
            peak_bytes=round(one.total_bytes - one.kinds["reserve"]),
            when=one.when,
            memory=tuple(KindBytes(kind=kind, bytes=round(size)) for kind, size in one.kinds.items() if size),
            traffic=tuple(
                SentEntry(axis=sent.axis, collective=sent.collective, bytes=sent.sent_bytes, calls=sent.calls)
                for sent in prediction.traffic(place)
            ),
        )
        for place, (rank, one) in enumerate(zip(ranks, prediction.memory, strict=True))
    )


def dried(run: Finished, plan: Plan, dryer: DryRunner | None = None) -> Column:
    """The dry run that the folder keeps, or a new one."""
    kept = run.dryrun
    timeless = "a dry run moves no numbers, so it takes no time"
    ours = kept is not None and same_program(plan, kept) and run.device in ("", kept.device)
    whole = kept is not None and {one.rank for one in kept.ranks}.issuperset(pipeline_ranks(plan.layout))
    if kept is not None and ours and (whole or dryer is None):
        about = f"the real program on fake tensors, as on a {kept.device} device ({DRYRUN})"
        return Column(title="dry run", found=kept, about=about, timeless=timeless)
    if dryer is None:
        why = f"its {DRYRUN} is of another plan, device or version" if kept else f"there is no {DRYRUN} in the folder"
        return Column(title="dry run", found=None, about=f"{why}: meshwright compare makes it", timeless=timeless)
    found = dryer(plan, run.device)
    about = f"the real program on fake tensors, as on a {found.device} device"
    return Column(title="dry run", found=found, about=about, timeless=timeless)


def of_measured(run: Finished, plan: Plan) -> Column:
    """The profile that the folder keeps, with what training measured where there is none or it says nothing."""
    own, profile = measured(run), run.profile
    trained = f"{many(len(run.steps), 'step')} of training"
    if profile is None or not same_program(plan, profile):
        other = f"; {PROFILE} is of another plan and not used" if profile else ""
        if own is None:
            return Column(title="measured", found=None, about=f"nothing was trained here{other}")
        what = "" if run.ledger else ", which left no ledger.json"
        timeless = "training keeps no parts of its time: meshwright profile measures them"
        return Column(title="measured", found=own, about=f"{trained}{what}{other}", timeless=timeless)
    profiled = "; ".join((f"a profile of the plan ({PROFILE})", *profile.notes))
    if own is None:
        return Column(title="measured", found=profile, about=profiled)
    ranks = {one.rank: one for one in own.ranks} | {one.rank: one for one in profile.ranks}
    for one in own.ranks:
        if ranks[one.rank].traffic is None:
            ranks[one.rank] = replace(ranks[one.rank], traffic=one.traffic)
    found = replace(profile, ranks=tuple(ranks[rank] for rank in sorted(ranks)), time=(*profile.time, *own.time))
    speed = f", which took {own.step_seconds:.3g} s each" if own.step_seconds else ""
    return Column(title="measured", found=found, about=f"{profiled}; {trained}{speed}", trained=own)
