"""Chunk sizes of the logits in losses (kernels/loss/cross_entropy.py, kernels/loss/linear_divergence.py)."""

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Bytes of fp32 logits in a chunk, by kind of device."""
ADDED_AT_ONCE = 2**19
"""Elements of a 16-bit product that a CPU adds to fp32 sums at a time: 1 MiB, and 2 MiB widened."""
