"""Which plans a preference objective allows: every rule once, each refusal with the nearest legal change."""

from collections.abc import Iterator

from meshwright.spec.objective_traits import CROSS_ENTROPY, PREFERENCES
from meshwright.spec.recipe import Recipe

_FIRST = Recipe()
_PLAIN = f"recipe.objective={CROSS_ENTROPY}"


def preference_violations(recipe: Recipe, *, form: str, train_on: str, packing: str) -> Iterator[str]:
    """Of a recipe with data of this form, trained tokens and packing (Plan.violations)."""
    said, several = f"recipe.objective={recipe.objective}", ", ".join(PREFERENCES)
    if not recipe.traits.smooths and recipe.preference_smoothing:
        yield (
            f"recipe.preference_smoothing={recipe.preference_smoothing:g} belongs to recipe.objective=dpo, and "
            f"{said}: leave it out"
        )
    if not recipe.traits.pairs:
        if recipe.preference_beta != _FIRST.preference_beta:
            yield (
                f"recipe.preference_beta={recipe.preference_beta:g} belongs to recipe.objective={several}, and {said}: "
                "leave it out, or take one of these"
            )
        return
    if form != "samples":
        yield f"{said} compares answers, and data.form={form} has none: take data.form=samples, or {_PLAIN}"
    if train_on == "all":
        yield f"{said} compares answers, and data.train_on=all counts their prompts too: take data.train_on=auto"
    if packing == "off" and not recipe.document_mask:
        yield f"{said} has two answers in a row, which must not see one another: take recipe.document_mask=true"
    if recipe.noise_scale_every:
        yield (
            f"recipe.noise_scale_every={recipe.noise_scale_every} measures tokens, and {said} counts pairs: "
            "take recipe.noise_scale_every=0"
        )
    if recipe.sequence < 4:
        yield f"recipe.sequence={recipe.sequence} has no room for two answers: take recipe.sequence=4 or more"
