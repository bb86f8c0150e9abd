"""Layouts of another training software: what restricts a search to them, and its files."""

from dataclasses import replace

from meshwright.api.layout_argument import Fixed
from meshwright.planner.search.ranking import search
from meshwright.planner.step.predict import Estimator
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, IllegalLayout
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainer_table import software


def chosen(word: str) -> TrainingSoftware | None:
    """The software of a word; None for this package's own engine, PlanError for a word that is not known."""
    return None if word in ("", "meshwright") else software(word)


def checked_model(of: TrainingSoftware, plan: Plan) -> None:
    """PlanError where the software has no such model or recipe, before anything is searched."""
    if plan.model.lora is not None:
        raise ArgumentError(f"--for {of.word} writes full training: leave tune=lora out")
    if plan.recipe.precision != "bf16":
        device = plan.cluster.device
        has = device.bf16_matmul_flop_per_s or device.bf16_flop_per_s
        way = f"leave precision={plan.recipe.precision} out" if has else f"{device.name} has none, take another device"
        raise ArgumentError(f"--for {of.word} is counted in bf16: {way}")
    if plan.teacher is not None:
        raise ArgumentError(f"--for {of.word} writes training without a teacher: leave teacher= out")
    of.facts(replace(plan, layout=replace(plan.layout, dp_replicate=1, micro_batch=1)))


def restricted(of: TrainingSoftware, fixed: Fixed) -> Fixed:
    """What is fixed, of what the software offers; ArgumentError where it offers no such value."""
    found = of.fixed()
    for key, values in fixed.items():
        offered = of.offered.get(key, values)
        kept = tuple(value for value in values if value in offered)
        if not kept:
            why = f" ({of.reasons[key]})" if key in of.reasons else ""
            words = " or ".join(str(value).lower() for value in offered)
            raise ArgumentError(f"layout= has {key}={str(values[0]).lower()}, and {of.word} has {words}{why}")
        found[key] = kept
    return found


def none_offered(of: TrainingSoftware, estimator: Estimator, plan: Plan, fixed: Fixed) -> Exception:
    """Why the software has no layout of these devices: what it says of the nearest that any software may have."""
    other = search(estimator, plan, fixed=fixed, listed=1)
    near = other.best[0] if other.best else other.nearest
    why = of.plan_refusal(near.plan) if near else ""
    devices = f"{plan.cluster.devices} devices"
    return IllegalLayout(
        f"{of.word} has no layout of {plan.model.name} on {devices} with these degrees: {why}".rstrip(": ")
    )
