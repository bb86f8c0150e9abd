"""What plan and dry run say of a run before its first step."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from meshwright.observe.compare.finished_run import open_run
from meshwright.observe.compare.judge import compare
from meshwright.observe.compare.sources_of_columns import columns
from meshwright.observe.compare.table import memory_line
from meshwright.observe.dryrun.dryrun_document import (
    dry_run_document,
    needed_bytes,
    room_here,
    room_sentence,
    unfit_message,
)
from meshwright.observe.dryrun.simulate import device_of, dry_run
from meshwright.observe.subprocesses import TooLong
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan
from meshwright.spec.errors import DoesNotFit, MeshwrightError
from meshwright.spec.places import pipeline_ranks
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import count, duration, gib
from meshwright.training.watch import Foreseen, Summary

LIMIT_S = 60.0
"""A dry run may keep a run waiting so long; one that takes longer is given up, and said to be."""


def preflight(plan: Plan, target: torch.device, *, anyway: bool = False, machines: int = 1) -> Foreseen:
    """The planner's figures, and the peak of a dry run of the rank that the planner takes for the worst.

    DoesNotFit where the dry run says so, unless `anyway`. Ranks are spread evenly over `machines`.
    """
    predicted = build_estimator(plan).predict(plan)
    elsewhere = plan.cluster.device.name if target.type == "cpu" and device_of(plan) == "cuda" else ""
    said = [("plan", _planned(predicted) + (f"; planned for {elsewhere}, run on a CPU" if elsewhere else ""))]
    by_length = partial(_with_documents, plan) if plan.recipe.document_mask else None
    rank = pipeline_ranks(plan.layout)[predicted.worst.pp_rank]
    try:
        found = dry_run(plan, ranks=[rank], device=target.type, limit_s=LIMIT_S)
    except TooLong:
        said.append(("dryrun", f"not ready after {LIMIT_S:.0f} s, left out: `meshwright dryrun` takes its time"))
        return Foreseen(sentences=tuple(said), with_documents=by_length)
    room = room_here(plan, target, machines)
    of_places = {one.pp_rank: one.total_bytes - one.kinds["reserve"] for one in predicted.memory}
    document = dry_run_document(found, room, of_places)
    needed = needed_bytes(found, room, of_places)
    said.append(
        (
            "dryrun",
            f"peak {gib(found.peak_bytes)} (rank {rank}, {phase_words(found.worst.when)})"
            + room_sentence(found, room, needed),
        )
    )
    if document["fits"] is False and not anyway:
        raise DoesNotFit(f"{unfit_message(found, room, needed)}; anyway=True tries all the same")
    return Foreseen(sentences=tuple(said), dry_run=document, with_documents=by_length)


def settle(plan: Plan, lacks: str) -> tuple[Plan, str]:
    """A plan as this GPU runs it, without auto, and why so. `lacks`: what a machine has not that compiling takes."""
    asked = plan
    if lacks and plan.layout.compile == "auto":
        plan = replace(plan, layout=replace(plan.layout, compile="off"))
    prediction = predict(plan)
    if prediction.settled == asked:
        return asked, ""
    why = [] if prediction.executions is None else list(prediction.executions.why)
    if plan != asked:
        why.append(f"No blocks are compiled: {lacks} is missing.")
    return prediction.settled, " ".join(why or ["Blocks run uncompiled: no plan knows this GPU."])


NAMED_FROM = 0.1
"""Share of the speed from which on a default is named as what costs it."""


def _with_documents(plan: Plan, tokens: float) -> tuple[tuple[str, str], ...]:
    """What the planner says of packed documents of so many tokens, where it knows the device; and what the mask between
    them costs, where that is much."""
    if not plan.cluster.device.half_flop_per_s:
        return ()
    found, other = (
        predict(plan, document_tokens=tokens),
        replace(plan, recipe=replace(plan.recipe, document_mask=False)),
    )
    rate, share = count(found.tokens_per_s_per_device), 1 - predict(other).step_s / found.step_s
    said = [("plan", f"a token's document has {count(tokens)} on average: {duration(found.step_s)} per step, {rate} "
             "tokens/s per device")]  # fmt: skip
    if share >= NAMED_FROM:
        said.append(
            (
                "note",
                f"recipe.document_mask keeps packed documents apart and costs {share:.0%} of the planned speed: "
                "recipe.document_mask=false lets them attend to each other",
            )
        )
    return tuple(said)


def memory_summary(run: Path, summary: Summary) -> str:
    """The peak of a run that has ended, planned, dry run and measured, in one sentence; empty where it keeps no dry
    run."""
    if not (run / "dryrun.json").is_file():
        return ""
    try:
        finished = open_run(run)
        return memory_line(compare(finished.plan_as_run, columns(finished)), summary.peak_allocated_bytes)
    except MeshwrightError as error:  # the run itself is well: say what its comparison lacks
        return f"no comparison with the plan: {error}"


def _planned(found: Prediction) -> str:
    """Memory, and time where the plan's device is known."""
    reserve = found.worst.kinds["reserve"]
    memory = f"peak {gib(found.peak_bytes - reserve)} and {gib(reserve)} of reserve"
    if found.plan.layout.pp > 1:
        memory += f" (pipeline rank {found.worst.pp_rank})"
    if not found.plan.cluster.device.half_flop_per_s:
        return memory
    return (
        f"{memory}, {duration(found.step_s)} per step, {count(found.tokens_per_s_per_device)} tokens/s per device, "
        f"MFU {found.mfu(causal=True):.1%} causal"
    )
