"""What a student holds while it samples inside of training (recipe.distillation_on_policy): its cache of keys and
values in blocks. The sampler makes it so large, and plan and dry run count it."""

from meshwright.spec.layout import Layout
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape

BLOCK = 16
"""Positions of a block."""
SPARE = 2
"""Blocks that no answer has: of zeros, and one that nobody reads."""
MOST_AT_ONCE = 64
"""Answers that are made at once; others wait."""
MOST_BYTES = 2**30
"""Of the cache."""


def at_once(recipe: Recipe, layout: Layout) -> int:
    """Answers of a rank that are made at once: rows of a step, which may hold several."""
    return min(MOST_AT_ONCE, max(1, recipe.largest.global_batch // layout.dp))


def position_bytes(shape: ModelShape, width: int) -> int:
    """Of keys and values of one position in all layers, `width` bytes a number. Latent attention keeps its low rank
    alone, unless an adapter stands beside what makes keys of it."""
    if shape.mla is None:
        each = 2 * shape.kv_heads * shape.head_dim
    elif shape.lora is None:
        each = shape.mla.kv_rank + shape.mla.rope_dim
    else:
        each = shape.kv_heads * (shape.head_dim + shape.mla.v_dim)
    return shape.layers * each * width


def cache_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, width: int) -> int:
    """Of a rank that samples."""
    of_block = BLOCK * position_bytes(shape, width)
    wanted = at_once(recipe, layout) * -(-min(recipe.sequence, shape.max_positions) // BLOCK)
    return (max(1, min(wanted, MOST_BYTES // of_block)) + SPARE) * of_block
