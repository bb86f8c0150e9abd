"""The learning rate of a step."""

import math

from meshwright.spec.recipe.recipe import Recipe

_NO_JUMP = 0.01
"""Share of a rate by which two schedules may differ without a note."""


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 1 .. steps: linear warm-up, then the schedule down to min_learning_rate_ratio.

    cosine (Loshchilov and Hutter 2017) and linear fall over all steps after the warm-up. wsd (warm-up, stable, decay;
    Hu et al. 2024, arXiv:2404.06395) falls linearly over the last decay_steps.
    """
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    return recipe.learning_rate * _share(recipe, step)


def _share(recipe: Recipe, step: int) -> float:
    floor = recipe.min_learning_rate_ratio
    if recipe.learning_rate_schedule == "constant":
        return 1.0
    first = recipe.warmup_steps
    if recipe.learning_rate_schedule == "wsd":
        first = max(first, recipe.steps - (recipe.decay_steps or max(1, recipe.steps // 5)))
        if step <= first:
            return 1.0
    done = min(1.0, (step - first) / max(1, recipe.steps - first))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if recipe.learning_rate_schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def rate_jump(before: Recipe, now: Recipe, step: int) -> str | None:
    """Return a note when a run that resumes after `step` has another rate there than `before`. None = it does not."""
    if not 0 < step < now.steps:
        return None
    previous, current = learning_rate(before, min(step, before.steps)), learning_rate(now, step)
    if abs(current - previous) <= _NO_JUMP * max(current, previous):
        return None
    why = f"has {now.steps} steps, and had {before.steps}" if now.steps != before.steps else "is another"
    following = f"{learning_rate(now, step + 1):.3g} at step {step + 1}"
    return f"the learning rate goes from {previous:.3g} at step {step} to {following}: its schedule {why}"
