"""Sizes of buffers that the engine allocates and the planner counts."""

from collections.abc import Iterable

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe

BUCKET_BYTES = 8 * 2**20
"""Gradients that one all-reduce sums (parallel/axes/data.py): size at which a bucket is full, so blocks of small
models share one. Besides its bytes, an all-reduce of Gloo costs half a millisecond of processor time for two processes
on two cores (docs/decisions/0042)."""


def bucket_counts(sizes: Iterable[float]) -> list[int]:
    """Return the number of units in each bucket, given the bytes of each unit in backward order."""
    counts, room = list[int](), 0.0
    for size in sizes:
        if room > 0:
            counts[-1] += 1
        else:
            counts.append(1)
            room = BUCKET_BYTES
        room -= size
    return counts


CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Bytes of fp32 logits that a loss computes at a time, by kind of device."""
ADDED_AT_ONCE = 2**19
"""Elements of a 16-bit product that a CPU adds to fp32 sums at a time: 1 MiB, and 2 MiB widened."""
ROW_BYTES = 16
"""Alignment of rows that the fast matrix products of a GPU require: they read operands 16 bytes at a time (TMA,
`ldmatrix`, vector loads). Otherwise cuBLAS falls back to kernels of an older generation: on an H200 in bf16
`cutlass_75_tensorop_s1688gemm`. GPT-2's head of 50,257 rows took 64 of 117 ms of a step. A step with 50,304 rows is
1.78 times as fast (64 x 1,024 tokens, torch 2.11, 2026-11-27)."""
PADDED_TO = 128
"""Multiple to which an unaligned width is padded, in columns: the tile of the fast kernels."""


def is_aligned(columns: float, itemsize: float) -> bool:
    """Return whether all rows of a contiguous matrix with `columns` numbers each begin at multiples of ROW_BYTES."""
    return columns * itemsize % ROW_BYTES == 0


def padded_columns(columns: int, itemsize: float) -> int:
    """Return the width in memory of rows with `columns` numbers of `itemsize` bytes."""
    return columns if is_aligned(columns, itemsize) else -(-columns // PADDED_TO) * PADDED_TO


BLOCK = 16
"""Positions of a block of the cache with which a student samples during training (distillation_on_policy)."""
SPARE = 2
"""Blocks that belong to no answer: one of zeros, and one that is never read."""
MOST_AT_ONCE = 64
"""Answers that are sampled at once. Others wait."""
MOST_BYTES = 2**30
"""Largest cache."""


def at_once(recipe: Recipe, layout: Layout) -> int:
    """Return the number of answers that a rank samples at once: the rows of its share of a step."""
    return min(MOST_AT_ONCE, max(1, recipe.largest.global_batch // layout.dp))


def position_bytes(shape: ModelShape, width: int) -> int:
    """Return the number of bytes of keys and values of a position in all layers, `width` bytes each."""
    if shape.mla is None:
        numbers = 2 * shape.kv_heads * shape.head_dim
    elif shape.lora is None:  # the latent vector itself is cached
        numbers = shape.mla.kv_rank + shape.mla.rope_dim
    else:
        numbers = shape.kv_heads * (shape.head_dim + shape.mla.v_dim)
    return shape.layers * numbers * width


def cache_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, width: int) -> int:
    """Return the number of bytes of the cache of a rank that samples."""
    block_bytes = BLOCK * position_bytes(shape, width)
    wanted = at_once(recipe, layout) * -(-min(recipe.sequence, shape.max_positions) // BLOCK)
    return (max(1, min(wanted, MOST_BYTES // block_bytes)) + SPARE) * block_bytes
