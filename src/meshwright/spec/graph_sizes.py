"""Sizes of the CUDA graphs of a serving engine: numbers of rows, and of positions that a row sees at most."""

SPLIT = 256
"""Positions of a program of the kernel that attends row by row: enough programs for one row of 8,192 positions, and few
bytes of parts beside keys."""
WIDEST = 256
"""Of heads that this kernel takes; a model of wider ones has no graphs."""
FINE = 8
"""Numbers of rows up to which are powers of two alone; above is one more between two of them."""
GRAPH_POOLS = 1.25
"""Memory of the pool of all graphs, over that of the largest, which is captured first: smaller ones find room in what
it has left, but for gaps."""
SPARSE = 4
"""Times as many positions has the next number of them: what a row does not see costs a launch and no reading."""


def row_numbers(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs have, for steps of at most so many: 1, 2, 4, 8, 12, 16, 24, 32 ..."""
    found, size = list[int](), 1
    while size < most:
        found += [size] if size < FINE else [size, size + size // 2]
        size *= 2
    return (*(one for one in found if one < most), most)


def position_numbers(longest: int) -> tuple[int, ...]:
    """Most positions that rows of a graph see, for sequences of at most so many."""
    found = [SPLIT]
    while found[-1] < longest:
        found.append(min(found[-1] * SPARSE, -(-longest // SPLIT) * SPLIT))
    return tuple(found)
