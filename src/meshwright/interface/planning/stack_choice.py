"""Training software that `--for` names: its restrictions on a search."""

from dataclasses import replace

from meshwright.interface.planning.layouts import Fixed
from meshwright.planner.search.ranking import search
from meshwright.planner.step.predict import Estimator
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, IllegalLayout, argument
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainer_table import software


def chosen_software(word: str) -> TrainingSoftware | None:
    """Return the software of a word, None for this package's own engine. Raises PlanError for an unknown word."""
    return None if word in ("", "meshwright") else software(word)


def check_model_offered(trainer: TrainingSoftware, plan: Plan) -> None:
    """Raise PlanError, before the search, if the software lacks the model or the recipe."""
    if plan.model.lora is not None:
        raise ArgumentError("stack", trainer.word, "writes full training", f"leave {argument('tune', 'lora')} out")
    if plan.recipe.precision != "bf16":
        device = plan.cluster.device
        has = device.bf16_matmul_flop_per_s or device.bf16_flop_per_s
        way = f"leave precision={plan.recipe.precision} out" if has else f"{device.name} has none, take another device"
        raise ArgumentError("stack", trainer.word, "is counted in bf16", way)
    if plan.teacher is not None:
        raise ArgumentError(
            "stack", trainer.word, "writes training without a teacher", f"leave {argument('teacher')} out"
        )
    trainer.facts(replace(plan, layout=replace(plan.layout, dp_replicate=1, micro_batch=1)))


def restricted(trainer: TrainingSoftware, fixed: Fixed) -> Fixed:
    """Return the fixed fields, restricted to what the software offers. Raises ArgumentError if nothing is left."""
    restrictions = trainer.fixed()
    for key, values in fixed.items():
        offered = trainer.offered.get(key, values)
        allowed = tuple(value for value in values if value in offered)
        if not allowed:
            why = f" ({trainer.reasons[key]})" if key in trainer.reasons else ""
            words = " or ".join(str(value).lower() for value in offered)
            raise ArgumentError(
                "layout", rule=f"has {key}={str(values[0]).lower()}, and {trainer.word} has {words}{why}"
            )
        restrictions[key] = allowed
    return restrictions


def none_offered(trainer: TrainingSoftware, estimator: Estimator, plan: Plan, fixed: Fixed) -> Exception:
    """Return the error that no layout of the software exists for these devices, with its refusal of the nearest."""
    other = search(estimator, plan, fixed=fixed, listed=1)
    near = other.best[0] if other.best else other.nearest
    why = trainer.plan_refusal(near.plan) if near else ""
    devices = f"{plan.cluster.devices} devices"
    return IllegalLayout(
        f"{trainer.word} has no layout of {plan.model.name} on {devices} with these degrees: {why}".rstrip(": ")
    )
