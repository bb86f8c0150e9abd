"""What weights that are rounded in every product (recipe.fake_quantize) add to a stage: a rounded copy of each matrix
is kept from its pass forward to its pass back. Layers that are computed again make theirs again, one at a time."""

from collections.abc import Sequence
from functools import cache
from math import prod

from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.spec.held import WIDTHS
from meshwright.spec.inventory import parameters
from meshwright.spec.recipe import NO_SCHEME, Recipe
from meshwright.spec.shape import ModelShape

AGAIN = ("full", "all-but-attention")
"""Policies that repeat products of weights."""


@cache
def layer_elements(shape: ModelShape) -> int:
    """Of the matrices of one layer."""
    return sum(prod(one.shape) for one in parameters(shape) if one.layer == 0 and one.matrices is not None)


def with_rounded(
    cost: MicroBatchCost, shape: ModelShape, recipe: Recipe, policies: Sequence[tuple[str, int]]
) -> MicroBatchCost:  # fmt: skip
    """A stage; `policies`: how its layers recompute, and how many do so."""
    if recipe.fake_quantize == NO_SCHEME:
        return cost
    layer = layer_elements(shape) * WIDTHS[recipe.precision].parameter
    kept = layer * sum(layers for policy, layers in policies if policy not in AGAIN)
    made = float(layer * any(layers for policy, layers in policies if policy in AGAIN))
    return cost._replace(
        kept_bytes=cost.kept_bytes + kept, mlp_bytes=cost.mlp_bytes + made, attention_bytes=cost.attention_bytes + made
    )
