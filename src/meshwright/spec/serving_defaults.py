"""Defaults of the serving engine: what a step holds, and how much of a GPU keys and values take. Engine and planner
follow them."""

from typing import Literal, get_args

CacheForm = Literal["model", "fp8", "int8"]
"""What keys and values are kept as: the model's dtype, or 8 bits with a scale for each position and head."""
CACHE_FORMS: tuple[CacheForm, ...] = get_args(CacheForm)
HeadForm = Literal["model", "int8"]
"""What the head multiplies in: the model's dtype, or 8 bits."""
HEADS: tuple[HeadForm, ...] = get_args(HeadForm)

BESIDE_ANSWERS = 128
"""Tokens of prompts in a step in which answers grow, on a CPU. There a step's time grows with its tokens, so a long
chunk makes everybody wait; more tokens than these at once are hardly read sooner. On a GPU a step reads all that it has
room for."""
CPU_TOKENS, CPU_SEQUENCES, CPU_CACHE_BYTES = 512, 64, 2**30
"""Tokens of a step, answers at once, and memory of keys and values on a CPU, whose memory is not the engine's alone."""
GPU_SEQUENCES = 256
"""Answers that a GPU makes at once. Reading the weights once for each step is then shared by so many."""
MEMORY_SHARE = 0.9
"""Of a GPU's memory that is free beside weights, CUDA graphs and the largest step, what keys and values take. The rest
is for fragments of the allocator, adapters that are loaded later, and libraries."""
TILE_ELEMENTS = 128 * 256
"""Of a product's result that one processor of a GPU computes at a time: the tile of cuBLAS's fastest bf16 kernels."""
LEAST_WAVES = 4.5
"""Rounds of tiles after which a product runs at 90 % of its rate: in the last round half of the processors have nothing
to do on average, and 4.5 / (4.5 + 0.5) = 0.9."""
MOST_STEP_TOKENS = 16_384
"""A narrow model would want more; its steps would then keep everybody waiting for other reasons than products."""


def step_tokens(processors: int, hidden: int, sequences: int = GPU_SEQUENCES) -> int:
    """Return the tokens of a step at which a GPU's products reach 90 % of their rate, a power of two.

    The narrowest products of a block give `hidden` columns. `sequences`: of which each has a token in a step; prompts
    have as many beside them at least.
    """
    wanted = LEAST_WAVES * processors * TILE_ELEMENTS / hidden
    tokens = 1 << max(0, int(wanted) - 1).bit_length()
    return max(2 * sequences, min(tokens, MOST_STEP_TOKENS))
