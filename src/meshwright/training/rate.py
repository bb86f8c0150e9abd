"""The learning rate of a step."""

import math

from meshwright.spec.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rate of step 1 .. steps: linear warm-up, then the schedule down to min_learning_rate_ratio x learning_rate.

    cosine (Loshchilov and Hutter 2017) and linear fall over all steps after the warm-up; wsd (warm-up, stable, decay;
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
