"""A run folder as it is when nothing runs in it any more: its plan, metrics and ledgers, and what they measured."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from meshwright import __version__, planfile
from meshwright.observe.compare.metric_records import records
from meshwright.observe.shared_document import SharedDocument, TimePart, checked, read, read_json
from meshwright.spec import Plan
from meshwright.spec.errors import MeshwrightError, PlanError, RunError
from meshwright.spec.plan import RANDOM
from meshwright.store.run_folder import RunFolder

DRYRUN, PROFILE = "dryrun.json", "profile.json"
"""In the run folder, beside ledger.json: the shared documents of a dry run and of a profile."""
WARM_UP = 0.1
"""Share of a run's steps, and at most WARM_UP_MOST of them, that are not counted for its speed: caches, compilation."""
WARM_UP_MOST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What lies in a run folder."""

    path: Path
    plan: Plan
    steps: tuple[dict[str, Any], ...] = ()
    """Records of metrics.jsonl."""
    evaluations: tuple[dict[str, Any], ...] = ()
    ledger: SharedDocument | None = None
    dryrun: SharedDocument | None = None
    profile: SharedDocument | None = None
    peaks: tuple[int, ...] = field(default=())
    """Of each rank of a run on GPUs."""

    @property
    def device(self) -> str:
        """cuda or cpu; empty = the run does not say."""
        return next((one.device for one in (self.ledger, self.profile) if one and one.device), "")

    @property
    def environment(self) -> dict[str, Any]:
        """Where it was measured."""
        return next((one.environment for one in (self.ledger, self.profile) if one and one.environment), {})

    @property
    def steady(self) -> tuple[dict[str, Any], ...]:
        """The steps that its speed is told by."""
        last = self.plan_as_run.recipe.global_batch
        own = [step for step in self.steps if step.get("global_batch", last) == last]
        return tuple(own[min(WARM_UP_MOST, math.ceil(WARM_UP * len(own))) if len(own) > 1 else 0 :])

    @property
    def plan_as_run(self) -> Plan:
        """The plan with the batch of its last step, where a ramp had not come to its end or was not begun with."""
        batch = self.steps[-1].get("global_batch") if self.steps else None
        if batch in (None, self.plan.recipe.global_batch):
            return self.plan
        recipe = replace(self.plan.recipe, global_batch=batch, batch_ramp=())
        return replace(self.plan, recipe=recipe)


def open_run(path: Path) -> Finished:
    """Read a run folder. RunError, one line: no run's, damaged, of another program, or nothing measured in it."""
    try:
        plan = RunFolder.open(path).plan
    except PlanError as error:
        raise RunError(f"{path} is damaged or of another program: {error}") from None
    steps, evaluations = records(path / "metrics.jsonl")
    found = Finished(
        path=path,
        plan=plan,
        steps=steps,
        evaluations=evaluations,
        ledger=_ledger(path / "ledger.json"),
        dryrun=read(path / DRYRUN, "dryrun"),
        profile=read(path / PROFILE, "measured"),
        peaks=_peaks(path / "ledger.json"),
    )
    if not found.steps and found.profile is None:
        raise RunError(f"{path} holds no step of a run yet: train it first, or profile its plan")
    _refuse_batch(found)
    return replace(found, plan=_with_device(found))


def _with_device(run: Finished) -> Plan:
    """The plan, with the GPU that the run was on where it names none, as older runs keep it."""
    from meshwright.training import device  # loads torch; what is wrong with a folder is said before

    name = run.environment.get("device")
    seen = device.match_device(name) if run.device == "cuda" and isinstance(name, str) else None
    return replace(run.plan, cluster=device.cluster_of(run.plan, seen, 1))


def _refuse_batch(run: Finished) -> None:
    """RunError where the last step is of a batch that its plan cannot have made."""
    try:
        run.plan_as_run.layout.micro_batches(run.plan_as_run.recipe.global_batch)
    except MeshwrightError as error:
        raise RunError(f"{run.path / 'metrics.jsonl'} is damaged or of another plan: its last step, {error}") from None


def measured(run: Finished) -> SharedDocument | None:
    """What the steps of training themselves measured, in the shared keys; None where the folder has none."""
    if not run.steps:
        return None
    recipe, layout, steady = run.plan_as_run.recipe, run.plan.layout, run.steady
    seconds = _middle(steady, "step_seconds")
    base = run.ledger or SharedDocument(source="measured")
    waited = _middle(steady, "data_wait_seconds")
    return replace(
        base,
        peak_bytes=max(run.peaks, default=None),
        peak_rank=run.peaks.index(max(run.peaks)) if run.peaks else None,
        time=() if waited is None else (TimePart(what="data", seconds=waited),),
        step_seconds=seconds,
        tokens_per_second_per_device=recipe.global_batch * recipe.sequence / seconds / layout.world
        if seconds
        else None,
        mfu_causal=_middle(steady, "mfu_causal"),
        mfu_full=_middle(steady, "mfu_full"),
        hfu=_middle(steady, "hfu"),
    )


def same_program(plan: Plan, document: SharedDocument) -> bool:
    """Whether a dry run or profile is of what this plan runs: all that memory, traffic or time depend on, and for a dry
    run the version of the engine that it ran. What is left to auto is as the other has it, but off on a CPU."""
    ours, theirs = planfile.dump(replace(plan, init=RANDOM)), document.plan
    if not isinstance(theirs.get("recipe"), dict) or not isinstance(theirs.get("layout"), dict):
        return False
    dry = document.source == "dryrun"
    if dry and document.environment.get("meshwright") != __version__:
        return False
    recipe = all(_same(ours["recipe"][key], theirs["recipe"].get(key)) for key in TELLING)
    switches = all(bool(ours["recipe"][key]) == bool(theirs["recipe"].get(key)) for key in SWITCHES)
    layout = all(_same(ours["layout"][key], theirs["layout"].get(key)) for key in ours["layout"] if key not in FREE)
    words = ("cuda_graphs",) if dry else ("compile", "cuda_graphs")
    executed = all(_executed_alike(ours["layout"][key], theirs["layout"].get(key), document.device) for key in words)
    return recipe and switches and layout and executed and _same(ours["model"], _shape(theirs.get("model")))


TELLING = ("sequence", "global_batch", "precision", "reduce_dtype", "dropout", "document_mask")
"""Keys of a recipe that memory, traffic or time depend on."""
SWITCHES = ("clip", "balance_loss", "noise_scale_every")
"""Keys of which only that they are 0 or not does: a norm, a loss, a copy of all gradients, or none."""
FREE = ("compile", "cuda_graphs", "saving")
"""Keys of a layout that may be other words. Neither a dry run nor a profile saves."""


def _shape(model: Any) -> Any:
    """Without where its weights are from: any weights take as long."""
    return {key: value for key, value in model.items() if key != "init"} if isinstance(model, dict) else model


def _executed_alike(ours: Any, theirs: Any, device: str) -> bool:
    """Whether two words of layout.compile or layout.cuda_graphs can mean the same."""
    words = {"off" if word == "auto" and device == "cpu" else word for word in (ours, theirs)}
    return "auto" in words or len(words) == 1


def refuse_other(path: Path, plan: Plan) -> None:
    """RunError where a folder is of another plan than this one, so that nothing measured of this one belongs there."""
    if path.exists() and not path.is_dir():
        raise RunError(f"run={path} is a file, not a folder: choose another run=")
    if not (path / "plan.yaml").exists():
        return
    try:
        kept = [RunFolder.open(path).plan]
    except PlanError as error:
        raise RunError(f"{path} is damaged or of another program: {error}; choose another run=") from None
    with suppress(RunError):  # nothing measured there yet
        kept.append(open_run(path).plan_as_run)
    ours = SharedDocument(source="measured", plan=planfile.dump(plan))
    if not any(same_program(one, ours) for one in kept):
        raise RunError(f"{path} holds a plan.yaml of another model, recipe or layout: choose another run=")


def _same(one: Any, other: Any) -> bool:
    """As JSON has them: a tuple is a list there."""
    return bool(json.loads(json.dumps(one)) == json.loads(json.dumps(other)))


def _ledger(path: Path) -> SharedDocument | None:
    found = read_json(path)
    if found is None:
        return None
    if found.get("source") != "measured":
        raise RunError(f"{path} is of another program: its source is not 'measured'; remove it")
    if "ranks" not in found:  # as written before there were several
        found = {**found, "ranks": [{key: found.get(key) for key in ("rank", "memory", "traffic")}]}
    return checked({"traffic": [], **found}, str(path))


def _peaks(path: Path) -> tuple[int, ...]:
    found = (read_json(path) or {}).get("peaks", [])
    if not isinstance(found, list) or not all(type(peak) is int and peak >= 0 for peak in found):
        raise RunError(f"{path} is damaged: peaks holds no list of bytes; remove it")
    return tuple(found)


def _middle(steps: tuple[dict[str, Any], ...], name: str) -> float | None:
    values = [step[name] for step in steps if isinstance(step.get(name), int | float) and math.isfinite(step[name])]
    return float(median(values)) if values else None
