"""Which widths of matrices the fast products of a GPU take, and to what others are padded in memory.

A product reads its operands 16 bytes at a time (TMA, `ldmatrix`, vector loads), so every row must begin at a multiple
of 16 bytes. Where one does not, cuBLAS falls back to kernels of an older generation: on an H200 in bf16
`cutlass_75_tensorop_s1688gemm`. GPT-2's head of 50,257 rows took 64 of 117 ms of a step, and a step with 50,304 rows
is 1.78 times as fast (64 x 1,024 tokens, torch 2.11, 2026-11-27).
"""

ROW_BYTES = 16
"""Rows of an operand begin at multiples of this."""
PADDED_TO = 128
"""Columns to whose multiple a width is padded that does not keep rows so: the tile of the fast kernels."""


def is_aligned(columns: float, itemsize: float) -> bool:
    """Whether rows of so many numbers, one behind the other, all begin at multiples of ROW_BYTES."""
    return columns * itemsize % ROW_BYTES == 0


def padded_columns(columns: int, itemsize: float) -> int:
    """The width that is laid out in memory for `columns` numbers of `itemsize` bytes."""
    return columns if is_aligned(columns, itemsize) else -(-columns // PADDED_TO) * PADDED_TO
