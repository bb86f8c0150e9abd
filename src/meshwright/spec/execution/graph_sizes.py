"""Sizes of the serving engine's CUDA graphs: number of rows, and most positions that a row sees."""

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
        counts.append(min(counts[-1] * SPARSE, -(-longest // SPLIT) * SPLIT))
    return tuple(counts)
