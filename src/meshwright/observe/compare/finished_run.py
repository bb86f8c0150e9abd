"""A run folder after the run: its plan, metrics and ledgers, and their measurements.

Everything is validated when it is read, since a folder may come from anywhere.
"""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from meshwright import __version__, planfile
from meshwright.observe.shared_document import SharedDocument, TimePart, parse_document, read, read_json
from meshwright.spec import Plan
from meshwright.spec.errors import MeshwrightError, PlanError, RunError, argument
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.units import duration, many
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training.step.watch import ROLLBACK, SLOW_RANK, read_goodput

Record = dict[str, Any]
STEP_NUMBERS = ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds", "step_seconds")
"""Numbers in every step's record."""
EVALUATION_NUMBERS = ("loss",)
"""Numbers in every evaluation's record."""
OPTIONAL_NUMBERS = ("data_wait_seconds", "mfu_causal", "mfu_full", "hfu", "bits_per_byte")
"""Numbers that a record may lack, or have as null."""
MAY_OVERFLOW = ("loss", "grad_norm")
"""Numbers of a step that may be infinite or NaN in training, by overflow of fp16."""
LARGEST_NUMBER = 2**63
DRYRUN, PROFILE = "dryrun.json", "profile.json"
"""Shared documents of a dry run and of a profile, next to ledger.json in the run folder."""
WARM_UP = 0.1
"""Share of a run's steps, at most WARM_UP_MOST of them, that do not count for its speed: caches, compilation."""
WARM_UP_MOST = 20
COMPARED = ("sequence", "global_batch", "precision", "reduce_dtype", "dropout", "document_mask")
"""Keys of a recipe on which memory, traffic or time depend."""
SWITCHES = ("clip", "balance_loss", "noise_scale_every")
"""Keys that matter only as zero or not: a norm, a loss, a copy of all gradients, or none."""
LEAST_INTERRUPTIONS = 3
"""Fewer give no failure rate: the 90 % interval of one after a single failure spans a factor of 90, after three 9."""
IGNORED = ("compile", "cuda_graphs", "saving")
"""Keys of a layout that may differ. Neither a dry run nor a profile saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Contents of a run folder."""

    path: Path
    plan: Plan
    steps: tuple[dict[str, Any], ...] = ()
    """Records of metrics.jsonl."""
    evaluations: tuple[dict[str, Any], ...] = ()
    incidents: tuple[dict[str, Any], ...] = ()
    """Records of rollbacks and of slow ranks."""
    ledger: SharedDocument | None = None
    dryrun: SharedDocument | None = None
    profile: SharedDocument | None = None
    peaks: tuple[int, ...] = field(default=())
    """Peaks of each rank of a run on GPUs."""

    @property
    def device(self) -> str:
        """Device of the run: cuda or cpu. Empty = the run does not tell."""
        return next((document.device for document in (self.ledger, self.profile) if document and document.device), "")

    @property
    def environment(self) -> dict[str, Any]:
        """Environment of the measurement."""
        documents = (self.ledger, self.profile)
        return next((document.environment for document in documents if document and document.environment), {})

    @property
    def steady(self) -> tuple[dict[str, Any], ...]:
        """The steps that count for the run's speed."""
        # Steps of a batch ramp are shorter, and would lower the time of a step that is compared with the full batch.
        last = self.plan_as_run.recipe.global_batch
        full_batch_steps = [step for step in self.steps if step.get("global_batch", last) == last]
        count = len(full_batch_steps)
        warm_up = min(WARM_UP_MOST, math.ceil(WARM_UP * count)) if count > 1 else 0
        return tuple(full_batch_steps[warm_up:])

    @property
    def plan_as_run(self) -> Plan:
        """The plan with the batch of its last step, if a batch ramp ended early or was not used."""
        batch = self.steps[-1].get("global_batch") if self.steps else None
        if batch in (None, self.plan.recipe.global_batch):
            return self.plan
        recipe = replace(self.plan.recipe, global_batch=batch, batch_ramp=())
        return replace(self.plan, recipe=recipe)


def open_run(path: Path) -> FinishedRun:
    """Read a run folder. Raises RunError: not a run, damaged, of another program, or without measurements."""
    try:
        plan = RunFolder.open(path).plan
    except PlanError as error:
        raise RunError(f"{path} is damaged or of another program: {error}") from None
    steps, evaluations, incidents = metric_records(path / "metrics.jsonl")
    run = FinishedRun(
        path=path, plan=plan, steps=steps, evaluations=evaluations, incidents=incidents,
        ledger=_read_ledger(path / "ledger.json"), dryrun=read(path / DRYRUN, "dryrun"),
        profile=read(path / PROFILE, "measured"), peaks=_read_peaks(path / "ledger.json"),
    )  # fmt: skip
    if not run.steps and run.profile is None:
        raise RunError(f"{path} holds no step of a run yet: train it first, or profile its plan")
    _refuse_batch(run)
    return replace(run, plan=_with_device(run))


def _with_device(run: FinishedRun) -> Plan:
    """Return the plan with the GPU of the run if it names none, as in older runs."""
    # Imported here: an error in the folder is then reported before torch has loaded.
    from meshwright.training import device

    name = run.environment.get("device")
    seen = device.match_device(name) if run.device == "cuda" and isinstance(name, str) else None
    return replace(run.plan, cluster=device.cluster_of(run.plan, seen, 1))


def _refuse_batch(run: FinishedRun) -> None:
    """Raise RunError when the last step has a batch that its plan cannot have made."""
    try:
        run.plan_as_run.layout.micro_batches(run.plan_as_run.recipe.global_batch)
    except MeshwrightError as error:
        raise RunError(f"{run.path / 'metrics.jsonl'} is damaged or of another plan: its last step, {error}") from None


def goodput_document(run: FinishedRun) -> dict[str, Any] | None:
    """Return the account of a run's wall time, with words and with an advice on saves. None = the run kept none.

    A run of less than an hour with fewer than LEAST_INTERRUPTIONS tells nothing about failures, and gets no advice. In
    a longer one the advice assumes a rate, and says so.
    """
    from meshwright.planner.rent.goodput import HOUR_S, Conditions, RunTiming

    account = read_goodput(run.path / "goodput.jsonl")
    if account is None:
        return None
    words = f"{account.words}{_name_incidents(run)}"
    document = {"share": account.share, **asdict(account), "words": words, "advice": ""}
    step_s, number = account.productive_seconds / max(1, account.steps), account.interruptions
    is_measured = number >= LEAST_INTERRUPTIONS
    if step_s and account.saves and (is_measured or account.wall_seconds >= HOUR_S):
        assumed, save_s = Conditions(), account.save_seconds / account.saves
        steps_s = run.plan.recipe.steps * step_s
        beside = (account.evaluation_seconds + account.data_wait_seconds) / account.productive_seconds
        mtbf_s, restart_s = assumed.mtbf_device_hours * HOUR_S / run.plan.layout.world, account.start_seconds
        if is_measured:
            mtbf_s = account.wall_seconds / number
            # Measured with all waits for nodes. Failures shortened some restarts: this is the length of a whole one.
            restart_s = -mtbf_s * math.log1p(-account.restart_seconds / number / mtbf_s)
        timing = RunTiming(
            steps_s=steps_s, work_s=steps_s * (1 + beside), start_s=account.start_seconds, save_s=save_s,
            restart_s=restart_s, mtbf_s=mtbf_s, interval_s=0.0,
            # How long a background write takes was not measured.
            write_s=0.0, hardware=0.0, repair_s=0.0, nodes=1, spares=0,
        )  # fmt: skip
        counted = f"{many(number, 'interruption')} in {duration(account.wall_seconds)}"
        rate = f"measured: {counted}" if is_measured else assumed.rate
        rate += f"; {counted} would be too few to measure one" if number and not is_measured else ""
        document["advice"] = timing.at_best(step_s).advice(step_s, rate)
    return document


def _name_incidents(run: FinishedRun) -> str:
    """Return `; 1 rollback before a spike (step 52); slow: rank 3`, or nothing."""
    begun = [f"{row.get('begun')}" for row in run.incidents if row["kind"] == ROLLBACK]
    slow = sorted({f"rank {row.get('rank')}" for row in run.incidents if row["kind"] == SLOW_RANK})
    words = f"; {many(len(begun), 'rollback')} before spikes (step {', '.join(begun)})" if begun else ""
    return f"{words}; slow: {', '.join(slow)}" if slow else words


def training_document(run: FinishedRun) -> SharedDocument | None:
    """Return the measurements of training itself as a shared document. None without steps."""
    if not run.steps:
        return None
    recipe, layout, steady = run.plan_as_run.recipe, run.plan.layout, run.steady
    seconds = _median_of(steady, "step_seconds")
    base = run.ledger or SharedDocument(source="measured")
    waited = _median_of(steady, "data_wait_seconds")
    tokens = recipe.global_batch * recipe.sequence
    return replace(
        base, peak_bytes=max(run.peaks, default=None),
        peak_rank=run.peaks.index(max(run.peaks)) if run.peaks else None,
        time=() if waited is None else (TimePart(what="data", seconds=waited),), step_seconds=seconds,
        tokens_per_second_per_device=tokens / seconds / layout.world if seconds else None,
        mfu_causal=_median_of(steady, "mfu_causal"), mfu_full=_median_of(steady, "mfu_full"),
        hfu=_median_of(steady, "hfu"),
    )  # fmt: skip


def same_program(plan: Plan, document: SharedDocument) -> bool:
    """Return True if a dry run or profile is of the program that this plan runs.

    Everything is compared on which memory, traffic or time depend, and of a dry run also the engine's version. A field
    left to auto matches any word, but means off on a CPU.
    """
    # Weights from a folder and random ones take the same time and memory.
    plan_document, document_plan = planfile.dump(replace(plan, init=RANDOM)), document.plan
    if not isinstance(document_plan.get("recipe"), dict) or not isinstance(document_plan.get("layout"), dict):
        return False
    # A dry run is the engine's program, so another version is another program. A measurement stays what it was.
    dry = document.source == "dryrun"
    if dry and document.environment.get("meshwright") != __version__:
        return False
    recipe = all(_same(plan_document["recipe"][key], document_plan["recipe"].get(key)) for key in COMPARED)
    switches = all(bool(plan_document["recipe"][key]) == bool(document_plan["recipe"].get(key)) for key in SWITCHES)
    layout = all(
        _same(plan_document["layout"][key], document_plan["layout"].get(key))
        for key in plan_document["layout"]
        if key not in IGNORED
    )
    words = ("cuda_graphs",) if dry else ("compile", "cuda_graphs")
    executed = all(
        _executed_alike(plan_document["layout"][key], document_plan["layout"].get(key), document.device)
        for key in words
    )
    return (
        recipe
        and switches
        and layout
        and executed
        and _same(plan_document["model"], _without_init(document_plan.get("model")))
    )


def _without_init(model: Any) -> Any:
    """Drop the source of the weights: any weights take as long."""
    return {key: value for key, value in model.items() if key != "init"} if isinstance(model, dict) else model


def _executed_alike(ours: Any, theirs: Any, device: str) -> bool:
    """Return True if two words of layout.compile or layout.cuda_graphs can mean the same."""
    words = {"off" if word == "auto" and device == "cpu" else word for word in (ours, theirs)}
    return "auto" in words or len(words) == 1


def refuse_other(path: Path, plan: Plan) -> None:
    """Raise RunError if a folder is of another plan, so that measurements of this one do not belong there."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{argument('run', path)} is a file, not a folder: choose another {argument('run')}")
    if not (path / "plan.yaml").exists():
        return
    try:
        plans = [RunFolder.open(path).plan]
    except PlanError as error:
        raise RunError(f"{path} is damaged or of another program: {error}; choose another {argument('run')}") from None
    # The run may have trained with a smaller batch than its plan. RunError: nothing is measured there yet.
    with suppress(RunError):
        plans.append(open_run(path).plan_as_run)
    ours = SharedDocument(source="measured", plan=planfile.dump(plan))
    if not any(same_program(plan_there, ours) for plan_there in plans):
        raise RunError(f"{path} holds a plan.yaml of another model, recipe or layout: choose another {argument('run')}")


def _same(left: Any, right: Any) -> bool:
    """Compare as JSON, where a tuple is a list."""
    return bool(json.loads(json.dumps(left)) == json.loads(json.dumps(right)))


def _read_ledger(path: Path) -> SharedDocument | None:
    content = read_json(path)
    if content is None:
        return None
    if content.get("source") != "measured":
        raise RunError(f"{path} is of another program: its source is not 'measured'; remove it")
    if "ranks" not in content:  # files of older versions, with one rank
        content = {**content, "ranks": [{key: content.get(key) for key in ("rank", "memory", "traffic")}]}
    return parse_document({"traffic": [], **content}, str(path))


def _read_peaks(path: Path) -> tuple[int, ...]:
    peaks = (read_json(path) or {}).get("peaks", [])
    if not isinstance(peaks, list) or not all(type(peak) is int and peak >= 0 for peak in peaks):
        raise RunError(f"{path} is damaged: peaks holds no list of bytes; remove it")
    return tuple(peaks)


def _median_of(steps: tuple[dict[str, Any], ...], name: str) -> float | None:
    values = [step[name] for step in steps if isinstance(step.get(name), int | float) and math.isfinite(step[name])]
    return float(median(values)) if values else None


def metric_records(path: Path) -> tuple[tuple[Record, ...], tuple[Record, ...], tuple[Record, ...]]:
    """Return steps, evaluations and incidents.

    Raises RunError naming the first record that is damaged or of another program.
    """
    rows = MetricsLog.read(path)
    steps = tuple(_check_record(row, STEP_NUMBERS, path) for row in rows if "kind" not in row)
    evaluations = tuple(_check_record(row, EVALUATION_NUMBERS, path) for row in rows if row.get("kind") == "eval")
    return steps, evaluations, tuple(row for row in rows if row.get("kind") in (ROLLBACK, SLOW_RANK))


def _check_record(record: Record, names: tuple[str, ...], path: Path) -> Record:
    # fp16 overflows in training, and such steps are skipped. An evaluation with an infinite loss is damage.
    step, may_overflow = record.get("step"), names is STEP_NUMBERS
    wrong = [name for name in names if not _is_number(record.get(name), may_overflow and name in MAY_OVERFLOW)]
    wrong += [name for name in OPTIONAL_NUMBERS if record.get(name) is not None and not _is_number(record[name])]
    batch = record.get("global_batch", 1)
    if type(step) is not int or not 0 <= step < LARGEST_NUMBER:
        what = "a record has no step"
    elif wrong:
        what = f"the record of step {step} has no number {wrong[0]}"
    elif may_overflow and (type(batch) is not int or not 1 <= batch < LARGEST_NUMBER):
        what = f"the record of step {step} has no global_batch of 1 or more"
    else:
        return record
    raise RunError(f"{path} is damaged or of another program: {what}")


def _is_number(value: Any, may_overflow: bool = False) -> bool:
    # bool is a subclass of int, and true in a record is no figure.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST_NUMBER or (may_overflow and isinstance(value, float))
