"""Plan and dry run of a training run, printed before its first step."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from meshwright.observe.compare.comparison import columns, compare
from meshwright.observe.compare.finished_run import open_run
from meshwright.observe.compare.table import memory_line
from meshwright.observe.dryrun.document import dry_run_document, needed_bytes, room_here, room_sentence, unfit_message
from meshwright.observe.dryrun.simulate import device_of, dry_run
from meshwright.observe.ranks import TooLong
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan
from meshwright.spec.errors import DoesNotFit, MeshwrightError, argument
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.units import count, duration, gib
from meshwright.training.step.watch import Forecast, Summary

LIMIT_S = 60.0
"""Seconds that a dry run may delay a run. A slower one is given up, with a note."""
NAMED_FROM = 0.1
"""Share of the speed from which a default is named as the cost."""


def preflight(plan: Plan, target: torch.device, *, anyway: bool = False, machines: int = 1) -> Forecast:
    """Return the planner's figures, and the peak of a dry run of the rank that the planner takes for the fullest.

    Ranks are spread evenly over `machines`. Raises DoesNotFit if the dry run does not fit, unless `anyway`.
    """
    predicted = build_estimator(plan).predict(plan)
    # A plan for GPUs may be tried on a CPU; its planned times then describe another machine.
    elsewhere = plan.cluster.device.name if target.type == "cpu" and device_of(plan) == "cuda" else ""
    sentences = [("plan", _planned(predicted) + (f"; planned for {elsewhere}, run on a CPU" if elsewhere else ""))]
    by_length = partial(_with_documents, plan) if plan.recipe.document_mask else None
    # One rank, the fullest by the plan: a dry run of all would delay the run too long.
    rank = pipeline_ranks(plan.layout)[predicted.worst.pp_rank]
    try:
        run = dry_run(plan, ranks=[rank], device=target.type, limit_s=LIMIT_S)
    except TooLong:
        sentences.append(("dryrun", f"not ready after {LIMIT_S:.0f} s, skipped: `meshwright dryrun` has no limit"))
        return Forecast(sentences=tuple(sentences), with_documents=by_length)
    room = room_here(plan, target, machines)
    planned_bytes = {rank.pp_rank: rank.total_bytes - rank.kinds["reserve"] for rank in predicted.memory}
    document = dry_run_document(run, room, planned_bytes)
    needed = needed_bytes(run, room, planned_bytes)
    peak = f"peak {gib(run.peak_bytes)} (rank {rank}, {phase_words(run.worst.when)})"
    sentences.append(("dryrun", peak + room_sentence(run, room, needed)))
    if document["fits"] is False and not anyway:
        raise DoesNotFit(f"{unfit_message(run, room, needed)}; {argument('anyway', True)} tries all the same")
    return Forecast(sentences=tuple(sentences), dry_run=document, with_documents=by_length)


def settle(plan: Plan, lacks: str) -> tuple[Plan, str]:
    """Return the plan as this GPU runs it, without `auto`, and the reason.

    `lacks`: what compiling needs and is missing here.
    """
    requested = plan
    # Only auto gives way: an explicit compile=on must fail loudly rather than train slowly.
    if lacks and plan.layout.compile == "auto":
        plan = replace(plan, layout=replace(plan.layout, compile="off"))
    prediction = predict(plan)
    if prediction.settled == requested:
        return requested, ""
    why = [] if prediction.executions is None else list(prediction.executions.why)
    if plan != requested:
        why.append(f"No blocks are compiled: {lacks} is missing.")
    return prediction.settled, " ".join(why or ["Blocks run uncompiled: no plan knows this GPU."])


def _with_documents(plan: Plan, tokens: float) -> tuple[tuple[str, str], ...]:
    """Predict packed documents of this average length, and the cost of the mask between them, if that is high."""
    if not plan.cluster.device.half_flop_per_s:
        return ()
    with_mask, without_mask = (
        predict(plan, document_tokens=tokens),
        replace(plan, recipe=replace(plan.recipe, document_mask=False)),
    )
    rate, share = count(with_mask.tokens_per_s_per_device), 1 - predict(without_mask).step_s / with_mask.step_s
    pace = f"{duration(with_mask.step_s)} per step, {rate} tokens/s per device"
    sentences = [("plan", f"a token's document has {count(tokens)} on average: {pace}")]
    if share >= NAMED_FROM:
        sentences.append(
            (
                "note",
                f"recipe.document_mask keeps packed documents apart and costs {share:.0%} of the planned speed: "
                "recipe.document_mask=false lets them attend to each other",
            )
        )
    return tuple(sentences)


def memory_summary(run: Path, summary: Summary) -> str:
    """Return the peak of a finished run, planned, dry run and measured, in one sentence.

    Empty = no dry run was kept.
    """
    if not (run / "dryrun.json").is_file():
        return ""
    try:
        finished = open_run(run)
        return memory_line(compare(finished.plan_as_run, columns(finished)), summary.peak_allocated_bytes)
    except MeshwrightError as error:  # the run itself has succeeded
        return f"no comparison with the plan: {error}"


def _planned(prediction: Prediction) -> str:
    """Describe predicted memory, and time if the plan's device is known."""
    reserve = prediction.worst.kinds["reserve"]
    memory = f"peak {gib(prediction.peak_bytes - reserve)} and {gib(reserve)} of reserve"
    if prediction.plan.layout.pp > 1:
        memory += f" (pipeline rank {prediction.worst.pp_rank})"
    if not prediction.plan.cluster.device.half_flop_per_s:
        return memory
    return (
        f"{memory}, {duration(prediction.step_s)} per step, "
        f"{count(prediction.tokens_per_s_per_device)} tokens/s per device, MFU {prediction.mfu(causal=True):.1%} causal"
    )
