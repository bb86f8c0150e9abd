"""Buckets of gradients of replicated parameters: those that one all-reduce sums (parallel/zero/replicas.py)."""

from collections.abc import Iterable

BUCKET_BYTES = 8 * 2**20
"""Size at which a bucket is full, so blocks of small models share one. Besides its bytes, an all-reduce of Gloo costs
half a millisecond of processor time for two processes on two cores (docs/decisions/0042)."""


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
