"""Row alignment that the fast matrix products of a GPU require, and the padding that provides it.

A product reads its operands 16 bytes at a time (TMA, `ldmatrix`, vector loads), so every row must begin at a multiple
of 16 bytes. Otherwise cuBLAS falls back to kernels of an older generation: on an H200 in bf16
`cutlass_75_tensorop_s1688gemm`. GPT-2's head of 50,257 rows took 64 of 117 ms of a step. A step with 50,304 rows
is 1.78 times as fast (64 x 1,024 tokens, torch 2.11, 2026-11-27).
"""

ROW_BYTES = 16
"""Alignment of an operand's rows, in bytes."""
PADDED_TO = 128
"""Multiple to which an unaligned width is padded, in columns: the tile of the fast kernels."""


def is_aligned(columns: float, itemsize: float) -> bool:
    """Return whether all rows of a contiguous matrix with `columns` numbers each begin at multiples of ROW_BYTES."""
    return columns * itemsize % ROW_BYTES == 0


def padded_columns(columns: int, itemsize: float) -> int:
    """Return the width in memory of rows with `columns` numbers of `itemsize` bytes."""
    return columns if is_aligned(columns, itemsize) else -(-columns // PADDED_TO) * PADDED_TO
