"""Defaults of the serving engine, also for the planner: size of a step, memory of the cache, sizes of CUDA graphs."""

from typing import Literal, get_args

CacheForm = Literal["model", "fp8", "int8"]
"""Format of cached keys and values: the model's dtype, or 8 bits with a scale per position and head."""
CACHE_FORMS: tuple[CacheForm, ...] = get_args(CacheForm)
HeadForm = Literal["model", "int8"]
"""Format of the head's products: the model's dtype, or 8 bits."""
HEADS: tuple[HeadForm, ...] = get_args(HeadForm)

BESIDE_ANSWERS = 128
"""Tokens of prompts in a step that also extends answers, on a CPU. A step there takes time in proportion to its tokens,
so a long chunk delays every answer, and larger chunks hardly finish prompts sooner. On a GPU a step reads as many as
fit."""
CPU_TOKENS, CPU_SEQUENCES, CPU_CACHE_BYTES = 512, 64, 2**30
"""Tokens of a step, answers at once, and memory of keys and values on a CPU, whose memory the engine shares."""
GPU_SEQUENCES = 256
"""Answers that a GPU makes at once. They share one read of the weights per step."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for keys and values, of that free beside weights, CUDA graphs and the largest step. The rest
is for fragmentation, adapters loaded later, and libraries."""
TILE_ELEMENTS = 128 * 256
"""Elements of a product that one processor of a GPU computes at a time: the tile of cuBLAS's fastest bf16 kernels."""
LEAST_WAVES = 4.5
"""Rounds of tiles after which a product reaches 90 % of its rate: half of the processors idle in the last round on
average, and 4.5 / (4.5 + 0.5) = 0.9."""
MOST_STEP_TOKENS = 16_384
"""Limit for narrow models, whose larger steps would delay answers for reasons other than products."""


def step_tokens(processors: int, hidden: int, sequences: int = GPU_SEQUENCES) -> int:
    """Return the number of tokens at which a GPU's products reach 90 % of their rate, a power of two.

    The narrowest products of a block give `hidden` columns. Each of the `sequences` has a token in a step, and prompts
    have at least as many tokens.
    """
    wanted = LEAST_WAVES * processors * TILE_ELEMENTS / hidden
    # Rounded up to a power of two.
    tokens = 1 << max(0, int(wanted) - 1).bit_length()
    return max(2 * sequences, min(tokens, MOST_STEP_TOKENS))


SPLIT = 256
"""Positions per program of the row-wise attention kernel. Small enough to occupy the GPU with one row of 8,192
positions, large enough that partial results take little memory beside keys."""
WIDEST = 256
"""Widest heads that this kernel supports. Models with wider ones have no graphs."""
FINE = 8
"""Row counts up to here are powers of two. Above, one more lies between two powers."""
GRAPH_POOLS = 1.25
"""Memory pool of all graphs, relative to the largest graph. That one is captured first, and smaller ones reuse its
memory apart from gaps."""
SPARSE = 4
"""Ratio of successive position counts. A position that a row does not see costs a launch but no read."""


def row_numbers(most: int) -> tuple[int, ...]:
    """Return the row counts of graphs for steps of at most `most` rows: 1, 2, 4, 8, 12, 16, 24, 32 ..."""
    counts, size = list[int](), 1
    while size < most:
        counts += [size] if size < FINE else [size, size + size // 2]
        size *= 2
    return (*(count for count in counts if count < most), most)


def position_numbers(longest: int) -> tuple[int, ...]:
    """Return the position counts of graphs for sequences of at most `longest` positions."""
    counts = [SPLIT]
    while counts[-1] < longest:
        # The last count is the longest sequence, rounded up to a whole program.
        counts.append(min(counts[-1] * SPARSE, -(-longest // SPLIT) * SPLIT))
    return tuple(counts)
