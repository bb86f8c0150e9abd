"""Which gradients of replicated parameters are summed over the ranks in one call (parallel/replicas.py)."""

from collections.abc import Iterable

BUCKET_BYTES = 8 * 2**20
"""Of a sum, from which on a bucket is full: blocks of small models are put together. Beside its bytes an all-reduce of
Gloo costs processor time, of two processes on two cores half a millisecond (docs/decisions/0042)."""


def bucket_counts(sizes: Iterable[float]) -> list[int]:
    """Units of each bucket, for bytes of the units in the order in which their gradients are made."""
    counts, room = list[int](), 0.0
    for size in sizes:
        if room > 0:
            counts[-1] += 1
        else:
            counts.append(1)
            room = BUCKET_BYTES
        room -= size
    return counts
