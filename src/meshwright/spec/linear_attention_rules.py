"""Layouts and recipes that layers of linear attention are not counted for. They are planned, and not trained here."""

from collections.abc import Iterator

from meshwright.spec.layout import Layout
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape


def linear_attention_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """A sentence for each."""
    linear = shape.unbuilt.linear if shape.unbuilt else None
    if linear is None:
        return
    if linear.key_heads % layout.tp:
        heads = f"{linear.key_heads} key heads of linear attention"
        yield f"layout.tp={layout.tp} does not divide the {heads}: take layout.tp=1"
    if layout.cp > 1:
        yield (
            f"layout.cp={layout.cp} shares a sequence among ranks, for which states of linear attention are not "
            "counted: take layout.cp=1"
        )
    if recipe.optimizer == "muon":
        yield "recipe.optimizer=muon is not counted for layers of linear attention: take recipe.optimizer=adamw"
