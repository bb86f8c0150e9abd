"""Memory of a student that samples during training (recipe.distillation_on_policy): its cache of keys and values.

The sampler allocates it by these rules, and plan and dry run count it.
"""

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe

BLOCK = 16
"""Positions of a block."""
SPARE = 2
"""Blocks that belong to no answer: one of zeros, and one that is never read."""
MOST_AT_ONCE = 64
"""Answers that are sampled at once. Others wait."""
MOST_BYTES = 2**30
"""Largest cache."""


def at_once(recipe: Recipe, layout: Layout) -> int:
    """Return the answers that a rank samples at once: the rows of its share of a step."""
    return min(MOST_AT_ONCE, max(1, recipe.largest.global_batch // layout.dp))


def position_bytes(shape: ModelShape, width: int) -> int:
    """Return the bytes of keys and values of one position in all layers, with `width` bytes per number."""
    if shape.mla is None:
        each = 2 * shape.kv_heads * shape.head_dim
    elif shape.lora is None:
        each = shape.mla.kv_rank + shape.mla.rope_dim
    else:
        each = shape.kv_heads * (shape.head_dim + shape.mla.v_dim)
    return shape.layers * each * width


def cache_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, width: int) -> int:
    """Return the bytes of the cache of a rank that samples."""
    of_block = BLOCK * position_bytes(shape, width)
    wanted = at_once(recipe, layout) * -(-min(recipe.sequence, shape.max_positions) // BLOCK)
    return (max(1, min(wanted, MOST_BYTES // of_block)) + SPARE) * of_block
